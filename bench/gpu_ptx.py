"""Checks in the PTX of kernels that the wrappers of ptx.cuh, system.cuh and e4m3.cuh became the right instructions.

Tests run kernels in an emulator, which has wrappers of its own: only the compiler's output shows the instructions.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from kernels_cuda.build import SOURCE

FILES = ("ptx.cuh", "system.cuh", "e4m3.cuh")
COPIES = ("copy_init", "copy_begin", "copy_wait")
BARRIER = ("sync_block", "add_release", "load_acquire", "store_release", "now_ns")  # of a grid
STEP = (*BARRIER, *COPIES, "load_l2", "sync_warp", "mma", "stop")
SYSTEM = ("fence_system", "add_acq_rel", "store_release_system", "store_system", "load_system", "load_acquire_system")
SERVE = (*BARRIER, *COPIES, *SYSTEM, "copy_acquire", "load_l2", "sync_warp", "mma", "pack", "pause")
LINK_PUT = ("load_l2", "sync_block", "fence_system", "add_acq_rel", "store_release_system", "now_ns")
PUT = ("load_l2", "sync_block", "fence_system", "add_one", "store_release_system")
TO_CODES = ("two_codes", "divide", "multiply")
OF_HOPPER = {"two_codes", "two_halves"}  # there alone by an instruction; of the GPUs that kernels are built for
USES = {  # wrappers, of the kernels whose names begin so: the longest such beginning counts
    "lora_step_": (*STEP, "pack"),
    "shrink_": STEP,
    "expand_": (*STEP, "pack"),
    "route": ("sync_block",),
    "put_": PUT,
    "put_e4m3_": (*PUT, *TO_CODES),
    "serve_": SERVE,
    "serve_e4m3_": (*SERVE, *TO_CODES, "two_halves"),
    "link_put_": LINK_PUT,
    "link_put_e4m3_": (*LINK_PUT, *TO_CODES),
    "link_send": ("load_l2", "sync_block", "fence_system"),
    "link_wait": ("load_l2", "load_acquire_system", "load_system", "pause", "now_ns"),
    "link_add_": ("load_l2", "pack"),
    "link_add_e4m3_": ("load_l2", "pack", "two_halves", "multiply"),
}


class Wrapper(NamedTuple):
    file: str
    name: str
    text: str
    branch: bool | None  # of an #if: True before its #else, False behind it, None outside

    @property
    def templates(self) -> list[str]:
        """The PTX that it emits, with %0, %1, ... for operands."""
        literals = re.findall(r'\basm(?: volatile)?\(\s*((?:"(?:[^"\\]|\\.)*"\s*)+)', self.text)
        return ["".join(re.findall(r'"((?:[^"\\]|\\.)*)"', one)).replace(r"\n", " ") for one in literals]


def read_wrappers(file: str, text: str) -> list[Wrapper]:
    """Parse a file's wrapper functions; of e4m3.cuh only those for GPUs that have instructions for it."""
    found, text_of_one, branch = [], "", None
    for line in re.sub(r" *//.*", "", text).splitlines():
        if line.startswith("#if"):
            branch = True
        elif line.startswith(("#else", "#endif")):
            branch = False if line.startswith("#else") else None
        elif text_of_one or re.match(r"(template <.*> )?DEVICE ", line):
            text_of_one = f"{text_of_one} {line.strip()}".strip()
            if text_of_one.count("{") == text_of_one.count("}") and text_of_one.endswith((";", "}")):
                name = re.search(r"(\w+)(?:<\w+>)?\(", text_of_one)
                if name and "{" in text_of_one and (branch or file != "e4m3.cuh"):
                    found.append(Wrapper(file, name[1], text_of_one, branch))
                text_of_one = ""
    return found


@cache
def wrappers() -> list[Wrapper]:
    return [one for file in FILES for one in read_wrappers(file, (SOURCE / file).read_text())]


def kernels(ptx: str) -> dict[str, str]:
    """Cut PTX into the text of each kernel, from its name on."""
    return {found[1]: found[0] for found in re.finditer(r"\.entry (\w+)\(.*?^}", ptx, re.MULTILINE | re.DOTALL)}


def used_by(kernel: str, bulk_copy: bool) -> list[str]:
    names = USES[max((begin for begin in USES if kernel.startswith(begin)), key=len)]
    return [name for name in names if bulk_copy or name not in OF_HOPPER]


def complaints(kernel: str, ptx: str, bulk_copy: bool, warps: int, launched: int) -> list[str]:
    """List what is wrong with a kernel that has `warps` computing warps and is launched with `launched` threads."""
    said = " ".join(ptx.split())
    wrong = [f"no {name}()" for name in used_by(kernel, bulk_copy) if not _has(said, name, bulk_copy)]
    bounds = re.search(r"\.maxntid (\d+)", said)
    if not bounds or int(bounds[1]) != launched:
        wrong.append(f"launch bounds of {bounds[1] if bounds else 'no'} threads, expected {launched}")
    threads = {int(number) for number in re.findall(r"\bbar\.sync 1, (\d+)", said)} - {32 * warps}
    return wrong + [f"a barrier of {number} threads, expected {32 * warps}" for number in sorted(threads)]


def _has(said: str, name: str, bulk_copy: bool) -> bool:
    """Tell whether all instructions of one of the wrapper's definitions are in the text."""
    its = [one for one in wrappers() if one.name == name and (one.file != "ptx.cuh" or one.branch in (None, bulk_copy))]
    return any(all(_pattern(template).search(said) for template in one.templates) for one in its)


@cache
def _pattern(template: str) -> re.Pattern[str]:
    text = re.escape(" ".join(template.replace("%%", "%").split()))
    return re.compile(re.sub(r"%\d+", r"[-%\\w.+]+", text))
