"""Tenants' SLO classes: adapters with a TTFT, a TPOT and a target of their own, and which of them a plan fails.

All classes share batches, so a step has to meet the TPOT of each. A file is YAML:

    gold:
      slo: ttft_p99=100ms,tpot_avg=40ms
      adapters: [law, "medical-*"]

Adapters that no class names are in `others`, with --slo.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lora_server import slo
from lora_server.slo import OTHERS, Slo, SloClasses
from provisioning.arrays import Floats, Ints
from provisioning.inputs import InputError, named
from provisioning.workload.workload import Workload


@dataclass(frozen=True, eq=False, kw_only=True)
class SloClass:
    """`members` are indices of adapters, `patterns` what named them."""

    name: str
    slo: Slo
    members: Ints
    patterns: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ClassOutcome:
    """Outcome of a plan for a class: `fails` names tpot, ttft (both by the model) or admission (simulated)."""

    name: str
    adapters: int
    slo: Slo
    fails: tuple[str, ...]
    share_within_ttft: float | None
    worst: tuple[tuple[str, float], ...]


def read(file: Path, workload: Workload, others: Slo) -> tuple[SloClass, ...]:
    """Read a file in which each adapter is in one class; raises InputError that begins with --classes."""
    said = named("--classes", SloClasses.read, file)
    names = [workload.name(index) for index in range(workload.num_adapters)]
    class_of: dict[int, str] = {}
    found = []
    for one in said.classes:
        where = f"--classes: {file}: {one.name}"
        if not one.adapters:
            raise InputError(f"{where}: adapters: got none, expected a list of names or patterns")
        members = [index for pattern in one.adapters for index in _matching(pattern, names, where)]
        for index in members:
            if class_of.setdefault(index, one.name) != one.name:
                raise InputError(
                    f"--classes: {file}: {names[index]!r} is in {class_of[index]} and {one.name}; name it in one"
                )
        found.append(SloClass(name=one.name, slo=one.slo, members=np.unique(members), patterns=one.adapters))
    rest = np.setdiff1d(np.arange(len(names)), list(class_of))
    return (*found, SloClass(name=OTHERS, slo=others, members=rest)) if rest.size else tuple(found)


def served_as(classes: tuple[SloClass, ...]) -> dict[str, dict[str, Any]]:
    """Return the classes as `lora-server serve` reads them; adapters that none names need no class there."""
    named = (slo.NamedSlo(one.name, one.slo, one.patterns) for one in classes if one.name != OTHERS)
    return SloClasses(tuple(named)).as_dict()


def _matching(pattern: str, names: list[str], where: str) -> list[int]:
    match = re.compile(fnmatch.translate(pattern)).match
    found = [index for index, name in enumerate(names) if match(name)]
    if not found:
        raise InputError(f"{where}: no adapter is called {pattern!r}; they are called such as {names[0]!r}")
    return found


def ttft_s(classes: tuple[SloClass, ...], num_adapters: int) -> Floats:
    """Return the TTFT SLO of each adapter."""
    each_N: Floats = np.zeros(num_adapters)
    for one in classes:
        each_N[one.members] = one.slo.ttft_us * 1e-6
    return each_N


def served(
    classes: tuple[SloClass, ...], workload: Workload, step_us: float, load_us: float, in_time_2N: Floats | None
) -> Iterator[ClassOutcome]:
    """Judge each class; `in_time_2N` counts simulated requests and those within their class's TTFT, or is None."""
    for one in classes:
        fails = ["tpot"] if step_us > one.slo.tpot_us else []
        fails += ["ttft"] if step_us + load_us >= one.slo.ttft_us else []
        share, worst = None, list[tuple[str, float]]()
        if in_time_2N is not None and in_time_2N[0, one.members].sum():
            calls_N, met_N = in_time_2N[:, one.members]
            share = float(met_N.sum() / calls_N.sum())
            fails += ["admission"] if share < one.slo.share and "ttft" not in fails else []
            each_N = np.where(calls_N >= 20, met_N / np.maximum(calls_N, 1), 1.0)
            order = np.argsort(each_N, kind="stable")[:3]
            worst = [(workload.name(one.members[at]), float(each_N[at])) for at in order if each_N[at] < one.slo.share]
        yield ClassOutcome(
            name=one.name,
            adapters=one.members.size,
            slo=one.slo,
            fails=tuple(fails),
            share_within_ttft=share,
            worst=tuple(worst),
        )
