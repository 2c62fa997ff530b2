"""Joins the files in `source/` into one text that NVRTC and nvcc compile alike."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from kernels_cuda import sizes

SOURCE = Path(__file__).parent / "source"
KERNELS = ("lora_step", "shrink", "expand")
DTYPES = ("bfloat16", "float16")
STANDARD = "-std=c++17"


def read_source(name: str = "lora_step.cu", instead: Mapping[str, str] | None = None) -> str:
    """Return a file with its includes in place, each once; `instead` gives other texts for some of them.

    One text without includes needs no search path, and a cache that hashes it misses no change.
    """
    texts, seen = {"sizes.cuh": sizes.HEADER} | dict(instead or {}), set[str]()

    def expand(name: str) -> str:
        seen.add(name)
        text = texts[name] if name in texts else (SOURCE / name).read_text()
        return re.sub(r'^#include "(.+)"$|^#pragma once$', replace, text, flags=re.MULTILINE)

    def replace(found: re.Match[str]) -> str:
        return expand(found[1]) if found[1] and found[1] not in seen else ""

    return expand(name)


def read_kernel(name: str) -> str:
    """Return lora_step.cu with only one of its kernels: a compiler takes seconds for each."""
    lines = read_source().splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("KERNEL(") or line.startswith(f"KERNEL({name},"))
