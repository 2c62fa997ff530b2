"""The product's transports as the planner models them: the link of the rows, what drives it, what overlaps.

A phase is what a shard does in one go; phases of different clients overlap, so Eq. 6 takes the longest phase. The
shard's kernel of `gpu` and a host's loop store answers while they compute, so compute and send are one phase there.
NVSHMEM's puts do not block and TCP sends from a thread of its own: all three stages overlap, as the paper has it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from provisioning.inputs import InputError
from provisioning.model.hardware import Efficiency, GpuSpec

Stage = Literal["receive", "compute", "send"]
APART: tuple[tuple[Stage, ...], ...] = (("receive",), ("compute",), ("send",))
JOINED: tuple[tuple[Stage, ...], ...] = (("receive",), ("compute", "send"))
HOST_US = 190.0  # of an exchange: a shard's loop and its client, on a CPU
CONVERSION_US = 1.1e-3  # of a byte of exact rows to e4m3 and back, on CPUs
TCP_GBPS = 25.0  # of one host's stream
TCP_ROUND_TRIP_US = 50.0  # between hosts of one network, assumed


@dataclass(frozen=True, kw_only=True)
class Transport:
    """`host_us` is what hosts add to an exchange; `one_host` says that engines and shards share a machine.

    `round_trip_us` is a message's way to the server and back, where Table 4's constants and `host_us` do not have it.
    """

    name: str
    phases: tuple[tuple[Stage, ...], ...]
    link: Literal["nic", "nvlink", "pcie", "stream"]
    one_host: bool
    host_us: float = 0.0
    round_trip_us: float = 0.0

    def link_gbps(self, gpu: GpuSpec, nic_gbps: float, host_gb_per_s: float) -> float:
        """Return the bandwidth of one GPU in one direction."""
        rates = {
            "nic": nic_gbps,
            "nvlink": gpu.peer_gb_per_s * 8,
            "pcie": host_gb_per_s * 8,
            "stream": min(nic_gbps, TCP_GBPS),
        }
        return rates[self.link]

    def conversion_us(self, hbm_bytes_per_us: float) -> float:
        """Return the time of a byte of exact rows to e4m3 and back: on hosts, or of three bytes of HBM."""
        return CONVERSION_US if self.host_us else 3 / hbm_bytes_per_us

    def efficiency(self, round_trip_us: float | None = None) -> Efficiency:
        """Return the constants of a layer's two exchanges: those of Table 4, what a host adds, and the round trips."""
        fitted = replace(
            Efficiency(), round_trips_us=2 * (self.round_trip_us if round_trip_us is None else round_trip_us)
        )
        if self.name == "nvshmem":
            return fitted
        source = f"{fitted.source}, assumed for {self.name}"
        if self.host_us:
            source += f"; a host's {self.host_us:g} us an exchange as in bench/results/step_costs-cpu-2026-11.md"
        return replace(fitted, host_us=2 * self.host_us, source=source)


TRANSPORTS = {
    found.name: found
    for found in (
        Transport(name="nvshmem", phases=APART, link="nic", one_host=False),
        Transport(name="gpu", phases=JOINED, link="nvlink", one_host=True),
        Transport(name="cuda_ipc", phases=JOINED, link="nvlink", one_host=True, host_us=HOST_US),
        Transport(name="shm", phases=JOINED, link="pcie", one_host=True, host_us=HOST_US),
        Transport(
            name="tcp",
            phases=APART,
            link="stream",
            one_host=False,
            host_us=HOST_US,
            round_trip_us=TCP_ROUND_TRIP_US,
        ),
    )
}


def transport_named(name: str) -> Transport:
    """Raises InputError for a name that the product does not have."""
    if name not in TRANSPORTS:
        raise InputError(f"--transport: got {name!r}, expected one of {', '.join(TRANSPORTS)}")
    return TRANSPORTS[name]
