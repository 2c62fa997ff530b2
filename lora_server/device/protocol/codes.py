"""Numbers and codes that hosts and kernels share: kernels include `codes.cuh`, which is made of this file."""

from __future__ import annotations

from enum import IntEnum

from lora_server.timings import Timings
from lora_server.wire import slot

MAX_LINKS = 1024  # of a shard's kernel; a lane of its poller has 32 of them, a bit each
CONNECT_WORDS = 14  # of layout.LINK
MAX_TENANTS = 1024  # of which a shard's kernel keeps shares; the last is shared by all that come later
ORDERS, COMMANDS, NOTES = 4, 16, 64  # places for each, which are used in turn
HANDLE_BITS = 16  # of a handle's index; above it lie 15 bits of its generation
GONE_BIT = 32  # of an entry's `ready`, beside the generation of an adapter that was dropped
UNEVEN = -1  # tiles of each expert: first_tile is where the experts' places begin


class LinkStatus(IntEnum):
    """The reason why a client's pass gets no more deltas. After TIMEOUT, ABORTED and BROKEN the client joins anew."""

    OK = 0
    TIMEOUT = 1
    ABORTED = 2
    FAILED = 3
    BROKEN = 4


class CommandKind(IntEnum):
    """A command of the host to the kernel. Its words: CONNECT's link, as in layout.LINK; REVOKE's epoch."""

    CONNECT = 1
    REVOKE = 2
    RETIRE = 3
    DRAIN = 4
    STOP = 5


class NoteKind(IntEnum):
    """A message of the kernel to its host; those from TAKEN on are sent only if `tells_all`."""

    PREFETCH = 1
    REFUSED = 2
    CUT_OFF = 3
    TAKEN = 4
    READY = 5
    ORDERED = 6
    CHANGED = 7
    STARTED = 8


class Refusal(IntEnum):
    """The reason why a step was answered with an error; request.cuh has a sentence for each."""

    NOTHING_WRONG = 0
    BAD_HEADER = 1
    BAD_SITE = 2
    BAD_COUNTS = 3
    BAD_WINDOWS = 4
    BAD_SIZE = 5
    BAD_SEGMENTS = 6
    BAD_MAP = 7
    UNKNOWN_ADAPTER = 8
    MISPLACED = 9
    BAD_DTYPE = 10
    NOT_LOADED = 11
    DRAINING = 12
    NOT_HELD = 13
    BAD_WIRE = 14
    BAD_SCALE = 15
    NOT_NUMBERED = 16


class KernelRole(IntEnum):
    """A shard's role in its stage; in leader mode one leads, and the others follow."""

    INDEPENDENT = 0
    LEADS = 1
    FOLLOWS = 2


NUMBERS = {name: value for name, value in globals().items() if isinstance(value, int)}  # those above
NUMBERS |= {"MAX_BUDGET_US": slot.MAX_BUDGET_US, "STEP_ROWS": slot.STEP_ROWS, "MOST_ROWS": slot.MOST_ROWS}
NUMBERS |= {"AHEAD_ROWS": slot.AHEAD_ROWS, "WEIGHTS_NS": round(Timings.weights * 1e9)}
ENUMS = {
    LinkStatus: "LINK_",
    CommandKind: "",
    NoteKind: "",
    Refusal: "",
    KernelRole: "",
}  # to prefixes
HEADER = "\n".join(
    [f"#define LORA_{name} {value}" for name, value in NUMBERS.items()]
    + [
        f"enum {enum.__name__} {{ {', '.join(f'{prefix}{code.name} = {code.value}' for code in enum)} }};"
        for enum, prefix in ENUMS.items()
    ]
)
