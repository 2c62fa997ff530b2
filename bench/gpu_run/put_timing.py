"""The measurements of the stage `put`: one put, a round trip through a LoRA step, and GEMMs that a put runs beside.

Host times are perf_counter's, in us: from before the launch until the host sees the word.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from bench.kernels import draws, ours
from bench.kernels.models import Model
from kernels_cuda.cuda import kernels
from kernels_cuda.routing import router
from lora_server.device.client import put as transport_put
from lora_server.device.client.put import Put, PutPlace

DEADLINE_SECONDS = 5.0
ADAPTERS = 16
MOST_ERROR = 5e-3  # of a sampled row's norm, bf16


def step(
    x: torch.Tensor, order: torch.Tensor, target: torch.Tensor, word: torch.Tensor, value: int, finished: Any
) -> Put:
    """Make a put like those of cuda_ipc to a mirror: target[i] = x[order[i]], then `value` goes to the word."""
    return Put(x=x, to=target.data_ptr(), place=PutPlace(0, word.data_ptr(), value, finished), rows_M=order)


class TimedPut:
    """Puts of the same rows to the same target; the host polls the word."""

    def __init__(
        self, device: torch.device, stream: torch.cuda.Stream, count: int, row_bytes: int, rows: Any = None
    ) -> None:
        """`rows`, a tensor [count, width], instead of random bf16 ones: what is there when the put runs."""
        self.stream, self.value = stream, 0
        self.rows = torch.randn(count, row_bytes // 2, device=device).bfloat16() if rows is None else rows
        order = torch.arange(count, device=device) if rows is not None else torch.randperm(count, device=device)
        self.order = order.int()
        self.target = torch.empty_like(self.rows)
        self._finished = torch.zeros(1, dtype=torch.int32, device=device)
        self._word = torch.zeros(8, dtype=torch.int64, pin_memory=True)
        self._seen = self._word.numpy()
        transport_put.try_out(stream, device)
        torch.cuda.synchronize(device)

    def launch(self, stream: torch.cuda.Stream | None = None) -> None:
        """Returns at once."""
        self.value += 1
        one = step(self.rows, self.order, self.target, self._word, self.value, self._finished)
        transport_put.launch(one, stream or self.stream)

    def wait(self) -> None:
        """Wait until the host sees the word; raise TimeoutError."""
        deadline = time.perf_counter() + DEADLINE_SECONDS
        while self._seen[0] != self.value:
            if time.perf_counter() > deadline:
                raise TimeoutError(f"put: the word is {self._seen[0]}, expected {self.value} in {DEADLINE_SECONDS} s")

    def once_us(self) -> float:
        """Launch and wait."""
        began = time.perf_counter_ns()
        self.launch()
        self.wait()
        return (time.perf_counter_ns() - began) / 1e3


class Gemm:
    """Products of square bf16 matrices, one after another on a stream of their own."""

    def __init__(self, device: torch.device, width: int, count: int) -> None:
        self.count, self.stream = count, torch.cuda.Stream(device)
        self.a, self.b = (torch.randn(width, width, device=device).bfloat16() for _ in range(2))
        self.out = torch.empty_like(self.a)
        self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)

    def launch(self) -> None:
        """Returns at once."""
        with torch.cuda.stream(self.stream):
            self.begin.record()
            for _ in range(self.count):
                torch.mm(self.a, self.b, out=self.out)
            self.end.record()

    def once_us(self) -> float:
        """Launch all GEMMs and time them by the GPU's clock."""
        self.launch()
        self.end.synchronize()
        return float(self.begin.elapsed_time(self.end)) * 1e3

    def beside_us(self, put: TimedPut) -> tuple[float, float]:
        """(all of them, the put): the put is launched once the first of them runs."""
        self.launch()
        while not self.begin.query():
            continue
        put_us = put.once_us()
        self.end.synchronize()
        return self.begin.elapsed_time(self.end) * 1e3, put_us


class RoundTrip:
    """A client's stream, a server's stream, and the step of one cell between them."""

    def __init__(self, device: torch.device, model: Model, tokens: int) -> None:
        (site,) = (site for site in model.sites if not site.combine)
        client, self.server = torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device)
        self.device, self.kernels = device, kernels(device)
        self.request = TimedPut(device, client, tokens, site.in_width * 2)
        self.adapters = ours.Adapters(model, site, torch.Generator(device).manual_seed(1), num_adapters=ADAPTERS)
        drawn = draws.draw(model, tokens, 0)
        drawn = drawn._replace(adapters_T=drawn.adapters_T % ADAPTERS)
        self.draw = ours.device_draw(model, self.adapters, drawn, self.request.target)
        self.workspace = ours.workspace_for(model, site, tokens, device)
        ours.route(self.draw, router(device))
        self.response = TimedPut(device, self.server, len(self.draw.out), site.out_width * 2, rows=self.draw.out)
        self._step()
        torch.cuda.synchronize(device)

    def _step(self) -> None:
        ours.launch(self.draw, self.kernels, self.workspace)

    def by_host_us(self) -> float:
        """The host polls the request's word, launches the step and its put, and polls that one's."""
        began = time.perf_counter_ns()
        self.request.launch()
        self.request.wait()
        with torch.cuda.stream(self.server):
            self._step()
        self.response.launch()
        self.response.wait()
        return (time.perf_counter_ns() - began) / 1e3

    def on_one_stream_us(self) -> float:
        """Put, step and put, launched at once: what the host's part in between costs is missing."""
        began = time.perf_counter_ns()
        self.request.launch(self.server)
        with torch.cuda.stream(self.server):
            self._step()
        self.response.launch()
        self.response.wait()
        self.request.wait()
        return (time.perf_counter_ns() - began) / 1e3

    def step_us(self) -> float:
        """The step, by the host's clock, with a synchronisation."""
        began = time.perf_counter_ns()
        with torch.cuda.stream(self.server):
            self._step()
        self.server.synchronize()
        return (time.perf_counter_ns() - began) / 1e3

    def error(self) -> float:
        """Measure the error of the rows that came back, against float64."""
        self.by_host_us()
        arrived = torch.equal(self.response.target, self.draw.out)
        return ours.sampled_error(self.draw, self.adapters, 8, 0) if arrived else float("inf")
