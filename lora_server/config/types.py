"""Types of settings that YAML, the environment and flags give as text. A bad text raises ValueError."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, PlainSerializer
from pydantic_settings import NoDecode

from lora_server.address import Address, ControllerList, parse_host
from lora_server.errors import ConfigError
from lora_server.placement import Layout
from lora_server.slo import SloClasses
from lora_server.units import Size

TCP = "tcp://"
AUTO_RANK = -1  # --node-rank auto: the controller leases the node its rank


def _reader(parse: Callable[[str], Any]) -> Callable[[Any], Any]:
    """Make a validator of `parse`, which raises ConfigError. Values that are no text are parsed already."""

    def read(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return parse(value)
        except ConfigError as error:
            raise ValueError(str(error).removeprefix("layout: ")) from None  # the flag's name stands before it

    return read


def _classes(value: Any) -> Any:
    if isinstance(value, SloClasses):
        return value
    try:
        return SloClasses.read(Path(value)) if isinstance(value, str | Path) else SloClasses.parse(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _split(text: str) -> list[str]:
    return [item for item in text.split(",") if item]


def _publishes(text: str) -> str:
    if text in ("ipc", "off"):
        return text
    if not text.startswith(TCP):
        raise ValueError(f"got {text!r}, expected ipc, off, or tcp://HOST:PORT")
    return f"{TCP}{_reader(Address.parse)(text.removeprefix(TCP))}"


def _rank(value: Any) -> Any:
    if value == "auto":
        return AUTO_RANK
    if isinstance(value, str) and not value.isdecimal():
        raise ValueError(f"got {value!r}, expected a rank from 0 on, or auto")
    return value


# NoDecode: their text in the environment is not JSON
Listens = Annotated[Address, NoDecode, BeforeValidator(_reader(Address.parse)), PlainSerializer(str)]
Controllers = Annotated[ControllerList, NoDecode, BeforeValidator(_reader(ControllerList.parse)), PlainSerializer(str)]
PoolSize = Annotated[
    Size,
    NoDecode,
    BeforeValidator(lambda value: value if isinstance(value, Size) else _reader(Size.parse)(str(value))),
    PlainSerializer(str),
]
# several flags, or one text with commas
Paths = Annotated[tuple[Path, ...], NoDecode, BeforeValidator(_reader(_split))]
Texts = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_reader(_split))]
# a file, or what it contains
Classes = Annotated[SloClasses, NoDecode, BeforeValidator(_classes), PlainSerializer(SloClasses.as_dict)]
NodeRank = Annotated[int, BeforeValidator(_rank), PlainSerializer(lambda rank: "auto" if rank == AUTO_RANK else rank)]
Host = Annotated[str, AfterValidator(lambda text: str(_reader(parse_host)(text)) if text else "")]
Publishes = Annotated[str, AfterValidator(_publishes)]  # ipc, off, or tcp://HOST:PORT
LayoutName = Annotated[str, AfterValidator(lambda text: str(_reader(Layout.parse)(text)))]
