"""The end of each part of a step, by events in its CUDA graph; by this process's clock where the GPU is a CPU."""

from __future__ import annotations

import time

import numpy as np
import torch

from lora_server.device.client.link import KernelLink


class Stamps:
    """Moments within a step, each taken when all that was launched before has ended."""

    def __init__(self, link: KernelLink) -> None:
        self._link, self._on_gpu = link, link.device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._seconds: list[float] = []

    def take(self) -> None:
        """Stamp the next moment of a step; when captured in a graph, each replay stamps it again."""
        self._link.queue.follow_engine()  # a queue joins a capture before its end can be waited for there
        self._link.queue.lead_engine()
        if self._on_gpu:
            self._events.append(torch.cuda.Event(enable_timing=True, external=True))
            self._events[-1].record()
        else:
            self._seconds.append(time.perf_counter())

    def spans_us(self) -> list[float]:
        """Return the time between successive moments of the last step. Ends a step that is in no graph."""
        if self._on_gpu:
            pairs = zip(self._events[:-1], self._events[1:], strict=True)
            return [1e3 * float(before.elapsed_time(after)) for before, after in pairs]
        spans, self._seconds = np.diff(self._seconds), []
        return [1e6 * float(span) for span in spans]
