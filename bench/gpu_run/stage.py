"""The common parts of all stages' processes: flags, the check for a GPU, and how they end.

    python -m bench.gpu_run.NAME --record FILE [--rehearse] [flags of its own]

Exit status 0: passed. 1: failed. 3: it cannot run here, and the record says why.
A rehearsal does all that needs no GPU (imports, arguments, `check`) and stops where the GPU would be used.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from bench.gpu_run.record import Record, read

EXIT_FAILED, EXIT_UNABLE = 1, 3
NO_GPU = "no NVIDIA GPU here"
REHEARSED = "a rehearsal stops before the GPU"


class Unable(Exception):
    """This stage cannot run here; the message says what is missing."""


def parser(about: str | None) -> argparse.ArgumentParser:
    """The flags of every stage; a stage may add its own, with defaults."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--record", type=Path, required=True, help="where what it finds goes, line by line")
    made.add_argument("--rehearse", action="store_true", help="stop before the GPU")
    made.add_argument("--carried", type=Path, default=Path("bench/out/gpu"), help="what bench.fetch_gpu made")
    return made


def need_gpu(rehearse: bool, modules: Sequence[str] = (), tools: Sequence[str] = ()) -> None:
    """Raises Unable without a GPU, in a rehearsal, and without modules or tools that come with a GPU's host."""
    import torch

    absent = [f"no {module} here" for module in modules if not installed(module)]
    absent += [f"no {tool} on the PATH" for tool in tools if shutil.which(tool) is None]
    if not torch.cuda.is_available():
        raise Unable("; ".join([NO_GPU, *absent]))
    if absent:
        raise Unable("; ".join(absent))
    if rehearse:
        raise Unable(REHEARSED)


def play(
    work: Callable[[Record, argparse.Namespace], bool], record: Record, arguments: argparse.Namespace, **instead: object
) -> None:
    """`work` with other flags, in a rehearsal. Raises RuntimeError if not all is as it should be."""
    if not work(record, argparse.Namespace(**{**vars(arguments), **instead})):
        raise RuntimeError(
            f"not as expected: {[line for line in read(record.path) if not line.get('good', True)]}"[:500]
        )


def play_emulated(
    work: Callable[[Record, argparse.Namespace], bool], record: Record, arguments: argparse.Namespace, **instead: object
) -> None:
    """Do what `play` does with kernels compiled for this CPU; without a compiler, record that it is absent."""
    if shutil.which("g++") is None:
        record.add("absent", what="no g++, which compiles the kernels for this CPU")
        return
    play(work, record, arguments, **instead)


def installed(module: str) -> bool:
    """Whether it could be imported, without doing so."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent
        return False


def leave(code: int) -> NoReturn:
    """Without destructors: a CUDA context in an error state, or a thread that hangs, must not keep it alive."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(
    work: Callable[[Record, argparse.Namespace], bool],
    arguments: argparse.Namespace,
    *,
    modules: Sequence[str] = (),
    tools: Sequence[str] = (),
    check: Callable[[Record, argparse.Namespace], None] = lambda *_: None,
    gpu: bool = True,
) -> NoReturn:
    """`check` without a GPU, then `work` with one: whether all is as it should be. `gpu=False`: work needs none."""
    record = Record(arguments.record)
    try:
        check(record, arguments)
        if gpu:
            need_gpu(arguments.rehearse, modules, tools)
        good = work(record, arguments)
    except Unable as reason:
        record.add("unable", reason=str(reason))
        print(reason, file=sys.stderr)
        leave(EXIT_UNABLE)
    except Exception as problem:
        record.add("broke", reason=f"{type(problem).__name__}: {problem}"[:1000])
        import traceback

        traceback.print_exc()
        leave(EXIT_FAILED)
    leave(0 if good else EXIT_FAILED)
