"""The cost of a step in NVSHMEM's world: by Link; as put, wait and add; and its push beside a raw put of its bytes.

The raw put is `link_send` of a step that was answered already: NVSHMEM's own put with signal, of as many bytes, to the
same slot and the same word, which it does not change. PEs of one GPU take turns on it, and the times include that.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from bench.gpu_run.served import Steps, by_link_us, passed, timed_us
from client_connector.remote import RemoteServer, RemoteSession
from lora_server.device.client.link import KernelLink
from lora_server.wire import slot

WARM_UP = 3


def measure(server: RemoteServer, device: torch.device, rows: int, rounds: int) -> dict[str, Any]:
    """Medians in us, of steps of so many rows; whether all answers were the same. It joins twice, since a link counts
    its steps by hosts or by kernels."""
    session = server.join()
    steps = Steps(session, device, rows)
    expected = steps.once()
    by_link = [by_link_us(steps) for _ in range(WARM_UP + rounds)]
    session.leave()
    session = server.join()
    found = by_kernels(session, device, rows, rounds, expected)
    session.leave()
    return {"rows": rows, "push_and_wait_by_link_us": median(by_link), **found}


def by_kernels(
    session: RemoteSession, device: torch.device, rows: int, rounds: int, expected: torch.Tensor
) -> dict[str, Any]:
    """Put, wait and add, in a CUDA graph where there is a GPU; and the put by itself."""
    link = session.links[0]
    assert isinstance(link, KernelLink)
    steps = Steps(session, device, rows)
    passes = passed(steps)
    same = torch.equal(passes.run(), expected)
    whole = [timed_us(device, passes.once) for _ in range(WARM_UP + rounds)]
    pushes, raws, nothing = list[float](), list[float](), list[float]()
    for _ in range(WARM_UP + rounds):
        pushes.append(timed_us(device, queued(link, passes.site.put)))
        passes.site.wait()
        passes.site.add(passes.y)
        passes.captured.finish()
        raws.append(timed_us(device, raw_put(link, steps)))
        nothing.append(timed_us(device, queued(link, lambda: None)))
    return {
        "same_answers": same and torch.equal(passes.run(), expected),
        "put_wait_add_us": median(whole),
        "bytes": request_bytes(steps),
        "push_us": median(pushes),
        "raw_put_us": median(raws),
        "no_kernel_us": median(nothing),
        "push_over_raw": round(median(pushes) / median(raws), 3),
    }


def request_bytes(steps: Steps) -> int:
    """Count the bytes of a step by kernels, with its header."""
    return slot.request_offsets(1, steps.rows, slot.HAS_IN_MAP, 2 * steps.rows * steps.width).end


def queued(link: KernelLink, launch: Callable[[], None]) -> Callable[[], None]:
    """Return a call that runs `launch` in the link's queue, after what torch has queued and before what follows."""

    def between() -> None:
        link.queue.follow_engine()
        launch()
        link.queue.lead_engine()

    return between


def raw_put(link: KernelLink, steps: Steps) -> Callable[[], None]:
    """Return a call that launches `link_send` for the newest step, whatever this PE's copy of the slot contains."""
    state = link.state.read()
    seq = int(state["pushed"])
    memory = bytearray(slot.HEADER_BYTES)
    steps.header(seq, slot.HAS_IN_MAP, request_bytes(steps) - slot.HEADER_BYTES).pack_into(memoryview(memory))
    link.gpu.write(int(state["request_slots"]) + seq % int(state["depth"]) * int(state["request_bytes"]), bytes(memory))
    return queued(link, lambda: link.queue.launch("link_send", link.state.address, seq))


def median(times: list[float]) -> float:
    """Return the median of the times after the warm-up."""
    return round(statistics.median(times[WARM_UP:]), 2)
