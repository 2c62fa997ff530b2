"""Capabilities of the machines: data-sheet numbers, and the shares of them that the paper's figures imply."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from provisioning.inputs import InputError, positive
from provisioning.model.profile import MeasuredMachine, Profile, Quantity

GIB = 2**30


@dataclass(frozen=True)
class GpuSpec:
    """One accelerator. Bandwidths in GB/s (1e9 bytes), dense bf16 in TFLOP/s."""

    name: str
    memory_bytes: float
    hbm_gb_per_s: float
    bf16_tflops: float
    peer_gb_per_s: float  # to a GPU of the same host, one direction
    source: str = "data sheet"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """GPU, its links, and the GPUs of a host. `link_gbps` is per GPU and direction, in gigabits/s as NICs are named."""

    gpu: GpuSpec
    gpus_per_node: int = 8
    link_gbps: float = 400.0
    host_link_gb_per_s: float = 50.0
    usable_memory: float = 0.92

    @property
    def link_bytes_per_us(self) -> float:
        """Bandwidth of one GPU's NIC in one direction."""
        return self.link_gbps / 8 * 1e3

    @property
    def hbm_bytes_per_us(self) -> float:
        """Bandwidth of one GPU's memory."""
        return self.gpu.hbm_gb_per_s * 1e3

    @property
    def host_bytes_per_us(self) -> float:
        """Bandwidth from the host to one GPU."""
        return self.host_link_gb_per_s * 1e3

    @property
    def flops_per_us(self) -> float:
        """Dense bf16 rate of one GPU."""
        return self.gpu.bf16_tflops * 1e6

    @property
    def adapter_memory_bytes(self) -> float:
        """Memory for adapters on one LoRA Server GPU: all but context, buffers and workspace."""
        return self.gpu.memory_bytes * self.usable_memory


# Memory is what the driver reports, a little under the name's; the last number is NVLink's, or PCIe's without it.
GPUS: dict[str, GpuSpec] = {
    gpu.name: gpu
    for gpu in (
        GpuSpec("h200", 139.8 * GIB, 4800, 989, 450),
        GpuSpec("h100", 79.6 * GIB, 3350, 989, 450),
        # The paper names no model. H20 is a Hopper with 96 GB and 4.0 TB/s, and its 148 TFLOP/s explain why
        # the base MoE of Table 4 takes half as long again at batch 256.
        GpuSpec("hopper-96", 95.6 * GIB, 4000, 148, 450, "paper 5.1: 96 GB, 4.0 TB/s; TFLOP/s assumed to be H20's"),
        GpuSpec("h20", 95.6 * GIB, 4000, 148, 450),
        GpuSpec("a100-80", 79.3 * GIB, 2039, 312, 300),
        GpuSpec("a100-40", 39.4 * GIB, 1555, 312, 300),
        GpuSpec("b200", 178.0 * GIB, 7700, 2250, 900),
        GpuSpec("b300", 268.0 * GIB, 7700, 2250, 900),
        GpuSpec("l40s", 44.5 * GIB, 864, 362, 32),
    )
}


def gpu_named(name: str, memory_gib: float | None, profile: Profile) -> GpuSpec:
    """Return the machine of a profile, or a preset, with another memory size if one is given; raises InputError."""
    gpu = GPUS.get(name.lower()) if profile.machine is None else _measured(name, profile.machine, profile.source)
    if gpu is None:
        raise InputError(f"--gpu: got {name!r}, expected one of {', '.join(GPUS)}, or what a profile is of")
    if memory_gib is None:
        return gpu
    return replace(gpu, memory_bytes=positive(memory_gib, "--gpu-memory-gib", 1e6) * GIB, source="given")


def _measured(name: str, machine: MeasuredMachine, source: str) -> GpuSpec:
    rate = machine.memory_gb_per_s  # also of a copy to another process
    return GpuSpec(name, machine.memory_gib * GIB, rate, machine.tflops, rate, source)


class StageTimes(NamedTuple):
    """Times of the three stages of a step, us."""

    receive: float
    compute: float
    send: float

    def times(self, factor: float) -> StageTimes:
        """Multiply each."""
        return StageTimes(*(factor * one for one in self))


_OVERHEAD = StageTimes(receive=55.2, compute=75.4, send=47.0)
_ACROSS = StageTimes(receive=23.4, compute=54.0, send=40.2)


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of the data sheet that are reached, and the fixed cost of every step.

    link, hbm and `overhead` are fitted to the batch-128 rows of the paper's Table 4 (EP1, EP2,
    EP4; one model), where bytes over the data sheet's bandwidth plus a constant fits within 8 us; what a
    group that spans hosts adds (`across`), to its only such row, EP8 on hosts of four GPUs. Batch 256
    is out of sample, and `table4` prints the residuals. `base_hbm` and `tensor_cores` are fitted to the
    MoE column, one batch size each. `host_us` is what hosts add where a transport has them launch or carry steps, and
    `round_trips_us` what a message takes to the server and back besides, of which Table 4's constants have their own.
    """

    link: float = 1.0
    hbm: float = 1.0
    base_hbm: float = 0.714
    tensor_cores: float = 0.8
    overhead: StageTimes = _OVERHEAD
    host_us: float = 0.0
    round_trips_us: float = 0.0
    across: StageTimes = _ACROSS
    source: str = "fitted to batch 128 of the paper's Table 4"

    def modelled(self, us: float) -> Quantity:
        """Return a time that the model gives, with these constants as its source."""
        return Quantity(us, "extrapolated", self.source)

    def with_attention(self) -> Efficiency:
        """Return the constants for four exchanges per layer in place of two: qkv and o beside gate_up and down."""
        overhead, across = self.overhead.times(2), self.across.times(2)
        host_us, trips_us = 2 * self.host_us, 2 * self.round_trips_us
        return replace(self, overhead=overhead, host_us=host_us, round_trips_us=trips_us, across=across)
