"""Modules that a config selects: the tensors of an adapter must not contradict it.

PEFT ignores a tensor of a module that its config does not select. We never drop a tensor, so what is
excluded explicitly but has a tensor is refused. A tensor that target_modules only does not list is
used, with a warning: other trainers than PEFT do not keep that list with care.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lora_server.adapters.patterns import Regex, compiled, suffixes
from lora_server.adapters.refusal import clip, refusal, shown


@dataclass(frozen=True)
class Selection:
    """Holds target_modules (where it is a list), exclude_modules and layers_to_transform."""

    config: str
    listed: frozenset[str]
    excluded: frozenset[str]
    excluded_regex: Regex | None
    layers: frozenset[int] | None

    def check(self, key: str, module: str, layer: int) -> None:
        """Raise AdapterFormatError if the config excludes the module or the layer of a tensor."""
        field, expected = f"{self.config}: exclude_modules", "no tensor for it, or it not to be excluded"
        if (self.excluded and not self.excluded.isdisjoint(suffixes(module))) or (
            self.excluded_regex and self.excluded_regex.fullmatch(module)
        ):
            raise refusal(key, got=f"a tensor for an excluded module ({field})", expected=expected)
        if self.layers is not None and layer not in self.layers:
            wanted = f"one of layers_to_transform {sorted(self.layers)}"
            raise refusal(key, got=f"layer {layer}", expected=wanted, do=f"correct {self.config}")

    def warnings(self, modules: Iterable[str]) -> tuple[str, ...]:
        """Return one line about the modules that have tensors but are not in target_modules."""
        unlisted = [module for module in modules if self.listed and self.listed.isdisjoint(suffixes(module))]
        if not unlisted:
            return ()
        return (clip(f"{self.config}: target_modules does not list {len(unlisted)} modules, used: {unlisted[0]}"),)


def parse_selection(config: Mapping[str, Any], name: str) -> Selection:
    """Parse a config's fields; raises AdapterFormatError for wrong types."""
    targets, excluded = config.get("target_modules") or (), config.get("exclude_modules") or ()
    for field, value in (("target_modules", targets), ("exclude_modules", excluded)):
        if not isinstance(value, str) and not _is_list_of(str, value):
            raise refusal(f"{name}: {field}", got=shown(value), expected="a list of names or one regular expression")
    layers = config.get("layers_to_transform")
    layers = [layers] if type(layers) is int else layers or ()
    if not _is_list_of(int, layers):
        raise refusal(f"{name}: layers_to_transform", got=shown(layers), expected="a layer or a list of layers")
    regex = excluded if isinstance(excluded, str) and excluded else None
    return Selection(
        config=name,
        listed=frozenset(() if isinstance(targets, str) else targets),
        excluded=frozenset(() if isinstance(excluded, str) else excluded),
        excluded_regex=compiled(f"{name}: exclude_modules", regex, regex) if regex else None,
        layers=frozenset(layers) or None,
    )


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list | tuple) and all(type(item) is kind for item in value)
