"""The attributes of an engine that a connector touches: checked when it is installed, and by a test.

An upgrade that moves one is refused by name, before an engine starts.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from lora_server.errors import ConfigError


class Touched(NamedTuple):
    """A module's attribute, such as Class.method; `parameters` that we pass or read by name."""

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    instance: tuple[str, ...] = ()  # attributes that the class gives its instances, and we use

    def problems(self) -> list[str]:
        """List what the installed engine lacks of it, by name."""
        where = f"{self.module}.{self.name}"
        try:
            found: Any = importlib.import_module(self.module)
            owner = found
            for part in self.name.split("."):
                owner, found = found, _attribute(found, part)
        except (ImportError, AttributeError) as error:
            return [f"{where} is gone ({error})"]
        wrong = []
        if self.parameters:
            try:
                given_parameters = set(inspect.signature(found).parameters)
            except (TypeError, ValueError):  # it is no function of Python's any more
                given_parameters = set()
            missing = set(self.parameters) - given_parameters
            wrong += [f"{where} has no parameter {name}" for name in sorted(missing)]
        given = found if inspect.isclass(found) else owner
        return wrong + [f"{where}: instances have no {name}" for name in self.instance if not _gives(given, name)]


class Supported(NamedTuple):
    """The versions of an engine that a connector was made for, each (major, minor) or longer: from `first` on, those
    `below`."""

    engine: str
    first: tuple[int, ...]
    below: tuple[int, ...]

    def __str__(self) -> str:
        first, below = (".".join(map(str, one)) for one in (self.first, self.below))
        return f">={first},<{below}"

    def check_version(self, version: str) -> None:
        """Raise ConfigError for a version that the connector was not made for."""
        found = re.match(r"\d+(\.\d+)+", version)
        numbers = tuple(map(int, found[0].split("."))) if found else ()
        if not self.first <= numbers < self.below:
            raise ConfigError(
                f"{self.engine}: got version {version}, expected {self}; install a supported {self.engine}, "
                "or unset LORA_SERVER_ADDRESS to run this one without the LoRA server"
            )

    def check(self, version: str, contract: Sequence[Touched]) -> None:
        """Raise ConfigError that names everything that is missing."""
        broken = [problem for touched in contract for problem in touched.problems()]
        if broken:
            raise ConfigError(
                f"{self.engine} {version}: {'; '.join(broken)}; the plugin was made for {self}: install such a "
                "version, or unset LORA_SERVER_ADDRESS"
            )


def _attribute(found: Any, name: str) -> Any:
    """Return an attribute; None for a field that a class only annotates. Raises AttributeError."""
    classes = found.__mro__ if inspect.isclass(found) else ()
    if not hasattr(found, name) and any(name in vars(one).get("__annotations__", {}) for one in classes):
        return None
    return getattr(found, name)


def _gives(owner: Any, name: str) -> bool:
    """Tell whether a class has an attribute, or sets it on `self` in some method."""
    sets = re.compile(rf"self\.{name}\b[^=\n]*=")
    return any(
        name in vars(base) or name in vars(base).get("__annotations__", {}) or sets.search(_source(base))
        for base in owner.__mro__[:-1]
    )


def _source(owner: Any) -> str:
    try:
        return inspect.getsource(owner)
    except (OSError, TypeError):
        return ""
