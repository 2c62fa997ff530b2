"""Structs that hosts and kernels share, as NumPy sees them: client.cuh and protocol.cuh, field by field.

A test compares sizes and offsets. Addresses are uint64; what kernels alone use is left out.
"""

from __future__ import annotations

import numpy as np

from lora_server.device.protocol.codes import COMMANDS, HANDLE_BITS, NOTES

MAX_GENERATION = (1 << 15) - 1
ORDER_BYTES = 384

_Code = str | np.dtype[np.void]


def _struct(nbytes: int, **fields: tuple[int, _Code] | tuple[int, _Code, int]) -> np.dtype[np.void]:
    return np.dtype(
        {
            "names": list(fields),
            "formats": [(code, *count) if count else code for _, code, *count in fields.values()],
            "offsets": [offset for offset, *_ in fields.values()],
            "itemsize": nbytes,
        }
    )


def _words(nbytes: int, *names: str) -> np.dtype[np.void]:
    return _struct(nbytes, **{name: (8 * i, "<u8") for i, name in enumerate(names)})


CLIENT = _words(
    256,
    *("epoch", "client", "depth", "request_slots", "request_signal", "request_bytes", "response_slots"),
    *("response_signal", "response_bytes", "pushed", "status_seq", "budget_ns", "arrived", "status", "abort", "pe"),
    *("live", "failed"),
)
LINK = _words(
    256,
    *("epoch", "client", "depth", "request_slots", "request_signal", "request_bytes", "response_slots"),
    *("response_signal", "response_bytes", "tables", "pe", "tenant", "slowness", "step_ns", "served", "had"),
)
ENTRY = np.dtype(
    [
        ("ready", "<u8"),
        ("generation", "<u4"),
        ("row", "<i4"),
        ("first_tile", "<i4"),
        ("tiles_each", "<i4"),
        ("first_expert", "<i4"),
        ("end_expert", "<i4"),
    ]
)
HERE = (1 << 64) - 1  # a link's pe: the other end's memory is mapped, and in no heap
TENANT = np.dtype([("had", "<f8"), ("share", "<u8")])
SITE = np.dtype([("in_width", "<i4"), ("out_width", "<i4"), ("experts", "<i4"), ("unused", "<i4")])
COMMAND = np.dtype([("kind", "<u8"), ("link", "<u8"), ("words", "<u8", 14)])
NOTE = np.dtype([("kind", "<u8"), ("link", "<u8"), ("seq", "<u8"), ("what", "<u8")])
_COMMANDS_AT, _KERNELS_AT = 128, 128 + COMMANDS * COMMAND.itemsize
_ACKS_AT = _KERNELS_AT + 128
_NOTES_AT = _ACKS_AT + 8 * COMMANDS
MAILBOX = _struct(
    _NOTES_AT + NOTES * NOTE.itemsize,
    posted=(0, "<u8"),
    heard=(8, "<u8"),
    abort=(16, "<u8"),
    commands=(_COMMANDS_AT, COMMAND, COMMANDS),
    taken=(_KERNELS_AT, "<u8"),
    noted=(_KERNELS_AT + 8, "<u8"),
    turn=(_KERNELS_AT + 16, "<u8"),
    done=(_KERNELS_AT + 24, "<u8"),
    beat_ns=(_KERNELS_AT + 32, "<u8"),
    left=(_KERNELS_AT + 40, "<u8"),
    acks=(_ACKS_AT, "<u8", COMMANDS),
    notes=(_NOTES_AT, NOTE, NOTES),
)
_SERVE_NUMBERS = (
    *("max_entries", "max_rank", "table_bytes", "dtype", "num_handles", "num_layers", "num_projections"),
    *("tells_all", "num_links", "role", "row_words"),
)
_SERVE_WORDS = (
    *("links", "orders", "directory", "sites", "blocks", "mailbox", "partial", "v", "delta", "groups", "arrivals"),
    *("idle_ns", "held", "used", "places", "results", "followers", "numbers", "other_partial", "tenants"),
)
SERVE = _struct(
    512,
    **{name: (8 * i, "<u8") for i, name in enumerate(_SERVE_WORDS)},
    **{name: (8 * len(_SERVE_WORDS) + 4 * i, "<i4") for i, name in enumerate(_SERVE_NUMBERS)},
    turn=(256, "<u8"),
    left=(264, "<u8"),
    **{name: (384 + 8 * i, "<u8") for i, name in enumerate(("done", "sent", "tickets", "several", "draining"))},
    taken=(424, "<u8"),
    noted=(432, "<u8"),
    number=(440, "<u8"),
    tenants_share=(448, "<f8"),
)


def handle_of(index: int, generation: int) -> int:
    """Return the handle that a segment names. Raises ValueError for a generation that does not fit."""
    if not 0 < generation <= MAX_GENERATION or not 0 <= index < 1 << HANDLE_BITS:
        raise ValueError(f"got index {index}, generation {generation}; expected 16 and 15 bits, generations from 1 on")
    return index | generation << HANDLE_BITS


def parts(handle: int) -> tuple[int, int]:
    """Return index and generation of a handle."""
    return handle & ((1 << HANDLE_BITS) - 1), handle >> HANDLE_BITS


def share_words(tenant: int, weight: float, step_us: int) -> dict[str, int]:
    """Return CONNECT's words about a client's share: its tenant's number and weight, its SLO class's time per step."""
    (slowness,) = np.array([1 / weight], "<f8").view("<u8")
    return {"tenant": tenant, "slowness": int(slowness), "step_ns": 1000 * step_us}
