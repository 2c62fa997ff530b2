"""Checks of the sources' text for what the emulator does not run: instructions (it replaces them) and launch bounds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bench import gpu_build, gpu_ptx
from kernels_cuda.build import SOURCE, read_source
from lora_server.device.protocol.source import FILES, SERVES
from tests.support.gpu import emulated

INSTRUCTIONS = gpu_ptx.FILES
TABLE = Path(__file__).parents[2] / "device" / "instructions.txt"


def read(file: str) -> str:
    """A source as it is."""
    return FILES.get(file) or (SOURCE / file).read_text()


def look_at_instructions(instead: Mapping[str, str] | None = None) -> None:
    """Raises AssertionError unless each wrapper is that of the table."""
    texts = {file: read(file) for file in INSTRUCTIONS} | dict(instead or {})
    found = [f"{file} {one.text}" for file in INSTRUCTIONS for one in gpu_ptx.read_wrappers(file, texts[file])]
    assert found == TABLE.read_text().splitlines()


def look_at_launch_bounds(instead: Mapping[str, str] | None = None) -> None:
    """Raises AssertionError unless those of each kernel are the threads of the largest block that a host launches."""
    for job in gpu_build.JOBS:
        others = {name: path.read_text() for name, path in gpu_build.OTHERS.items()}
        text = read_source(job.name, FILES | others | dict(instead or {}))
        bounds = emulated.launch_bounds(text, job.variant.warps)
        assert bounds.keys() >= job.kernels, job
        threads = 32 * (job.variant.warps + (job.name in SERVES))
        assert set(bounds.values()) == {threads}, f"{job}: {bounds}, expected {threads}"
