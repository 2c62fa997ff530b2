"""Stands in for SGLang's CUDA kernels, of which there is no build for CPUs: every name can be imported, none called."""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Missing:
    """A kernel, or a constant, that is not there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Missing:
        return _missing(self._name, name)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Raise NotImplementedError."""
        raise NotImplementedError(f"{self._name}: a CUDA kernel; this environment has none")


class StandIn(ModuleType):
    """A module of the package, with any name in it."""

    def __getattr__(self, name: str) -> Missing:
        return _missing(self.__name__, name)


class Modules(MetaPathFinder, Loader):
    """Finds any module below the package."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """See MetaPathFinder."""
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(f"{__name__}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """See Loader."""
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """See Loader."""


def _missing(owner: str, name: str) -> Missing:
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing(f"{owner}.{name}")


__path__: list[str] = []  # a package, though a single file
sys.meta_path.append(Modules())
sys.modules[__name__].__class__ = StandIn
