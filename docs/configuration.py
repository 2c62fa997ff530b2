"""Writes docs/configuration.md from the settings and flags of the code: `python -m docs.configuration`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from client_connector import transformers
from client_connector.serving.settings import BASE_MODEL, ENVIRONMENT, ERROR, Settings
from client_connector.vllm.tenants import TENANT_HEADER
from lora_server import cli as server
from lora_server.config import ServeConfig
from lora_server.flags import default_of
from lora_server.transport.connect import TRANSPORTS, WIRES
from lora_server.wire.credentials import TLS_CA, TLS_CERT, TLS_KEY, TLS_NAME, TOKEN, TOKEN_FILE
from provisioning import cli as provision

PAGE = Path(__file__).with_suffix(".md")
TRANSPORT = "auto: shared memory on this host, else TCP; or one of them by name"
MEANINGS = {  # of what has no description in the code
    "address": ("HOST:PORT", "The server's `--listen`; without it the plugin is not active"),
    "server": ("HOST:PORT", "The server's `--listen`"),
    "transport": (", ".join(TRANSPORTS), TRANSPORT),
    "wire": (", ".join(WIRES), "The `--wire` that the server must have"),
    "on_failure": (f"{ERROR}, {BASE_MODEL}", "What becomes of a request whose step failed"),
    "timeout_seconds": ("seconds", "The longest step, and the longest join"),
    "world_seconds": ("seconds", "Over nvshmem: how long a worker waits at its start until its world is complete"),
    "model": ("model", "A transformers model in eval mode, float32, bfloat16 or float16"),
    "token": ("token", "What the server is shown; without it, see [Callers](#callers)"),
    "tokenizer": ("tokenizer", "For activated LoRAs with a legacy invocation string"),
}
CALLERS = [
    (f"`{TOKEN_FILE}`", "File with the token, read again with each call"),
    (f"`{TOKEN}`", "The token itself, which wins"),
    (f"`{TLS_CA}`", "Who signed the server's certificate: calls are TLS's"),
    (f"`{TLS_CERT}`, `{TLS_KEY}`", "The caller's own, where the server has `--tls-client-ca`"),
    (f"`{TENANT_HEADER}`", "vLLM: the header by which a gateway says whose a request is ([vLLM](vllm.md#tenants))"),
    (f"`{TLS_NAME}`", "Name in the server's certificate, where its address is not"),
]
LIMITS = {"ge": "at least", "gt": "above", "le": "at most"}
Row = tuple[str, ...]


def page() -> str:
    """The whole page."""
    parts = [
        "# Configuration",
        "Written by `python -m docs.configuration` from the code; do not edit it. A test fails when it is stale.",
        "## lora-server serve",
        "A flag wins over its environment variable, that over the `--config` file (YAML, keys with `-` or `_`), that\n"
        "over the default. An unknown key or flag is refused. All nodes of one server need the same base model,\n"
        "`layout`, `dtype`, `coordination`, `max_step_rows` and `wire`; a shard that differs is refused and says so.",
        table(("Flag", "Environment", "YAML key", "Type", "Default", "Meaning"), serve_rows()),
        "For tests and experiments, `timings` in the `--config` file, or `LORA_SERVER_TIMINGS` as JSON, replaces\n"
        "durations of `lora_server/timings.py`, in seconds: `LORA_SERVER_TIMINGS='{\"shard_silence\": 1}'`. vLLM's\n"
        "connector reads the same variable. They are no flags, and may change with any release.",
        "## vLLM",
        "Environment of vLLM, or `--additional-config '{\"lora_server\": {...}}'` with these keys, which win;\n"
        '`{"lora_server": "HOST:PORT"}` gives the address alone. See [vLLM](vllm.md).',
        table(("Environment", "Key", "Value", "Default", "Meaning"), vllm_rows()),
        "## Callers",
        "Of engines, `lora-server status` and the like: what they show to a server, and by what they know it. Never\n"
        "flags, which others on the host may read. See [Security](security.md).",
        table(("Environment", "Meaning"), CALLERS),
        "## transformers",
        "`client_connector.transformers.attach(model, server, ...)`:",
        table(("Argument", "Value", "Default", "Meaning"), attach_rows()),
    ]
    for name, app in (("lora-server", server.app), ("provision", provision.app)):
        for path, command in commands(typer.main.get_command(app), name):
            if command.callback is not None and path not in ("lora-server", "lora-server serve"):
                parts += [
                    f"## {path}",
                    first_line(command),
                    table(("Flag", "Type", "Default", "Meaning"), rows(command)),
                ]
    return "\n\n".join(part for part in parts if part) + "\n"


def serve_rows() -> Iterator[Row]:
    """One per field of the one configuration."""
    for name, field in ServeConfig.model_fields.items():
        if not field.description:  # `timings`
            continue
        flag = f"`--{name.replace('_', '-')}`"
        shown = default_of(field).removeprefix("default: ")
        yield flag, f"`LORA_SERVER_{name.upper()}`", f"`{name}`", kind_of(field), shown, field.description or ""


def kind_of(field: FieldInfo) -> str:
    """Such as: int, at least 1, at most 64."""
    if get_origin(field.annotation) is Literal:
        return ", ".join(get_args(field.annotation))
    name = {"Address": "HOST:PORT", "Path": "path"}.get(found := next(types_in(field.annotation)).__name__, found)
    given = [(key, getattr(one, key)) for one in field.metadata for key in LIMITS if hasattr(one, key)]
    several = ["several"] if get_origin(field.annotation) is tuple else []
    return ", ".join([name, *several, *(f"{LIMITS[key]} {limit:g}" for key, limit in given)])


def types_in(annotation: Any) -> Iterator[type]:
    """Inside of Annotated and of unions, but for None."""
    for one in (annotation,) if isinstance(annotation, type) else get_args(annotation):
        if isinstance(one, type) and one is not type(None):
            yield one
        elif get_args(one):
            yield from types_in(one)


def vllm_rows() -> Iterator[Row]:
    """What a user may set; the engine says the rest."""
    for field in fields(Settings):
        if field.name in ENVIRONMENT:
            value, meaning = MEANINGS[field.name]
            default = None if field.default is MISSING else field.default
            yield f"`{ENVIRONMENT[field.name]}`", f"`{field.name}`", value, plain(default), meaning


def attach_rows() -> Iterator[Row]:
    """The parameters of attach()."""
    for name, parameter in inspect.signature(transformers.attach).parameters.items():
        default = "required" if parameter.default is parameter.empty else plain(parameter.default)
        yield f"`{name}`", MEANINGS[name][0], default, MEANINGS[name][1]


def commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """A command and all below it, as they are typed."""
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, f"{path} {name}")


def first_line(command: Any) -> str:
    """What --help begins with."""
    return (command.help or "").strip().splitlines()[0] if command.help else ""


def rows(command: Any) -> Iterator[Row]:
    """One per flag or argument; what only prints and exits is left out."""
    for name, one in inspect.signature(inspect.unwrap(command.callback), eval_str=True).parameters.items():
        kind, *found = get_args(one.annotation) or (one.annotation,)
        option = next((info for info in found if isinstance(info, typer.models.OptionInfo)), None)
        if name == "version" or kind is typer.Context:
            continue
        if option is None:
            yield f"`{name.upper()}`", "argument", "required", ""
            continue
        # in Annotated the first name of an option stands where its default would
        named = [one for one in (option.default, *(option.param_decls or ())) if str(one).startswith("--")]
        text, default = said(option.help or "", one.default)
        variable = f" (`{option.envvar}`)" if option.envvar else ""
        yield f"`{named[0] if named else '--' + name.replace('_', '-')}`", name_of(kind), default, f"{text}{variable}"


def said(text: str, default: Any) -> tuple[str, str]:
    """The help without the default that stands in it, and the default."""
    before, bracket, after = text.rpartition(" (")
    if bracket and after.startswith(("default: ", "required")):
        return f"{before.rstrip('.')}.", after.rstrip(").").removeprefix("default: ")
    return text, "required" if default is inspect.Parameter.empty else plain(default)


def plain(value: Any) -> str:
    """A default as it is typed."""
    if value is None or isinstance(value, bool):
        return "none" if value is None else str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def name_of(kind: Any) -> str:
    """Of a flag's type, None aside."""
    found = next(one for one in (get_args(kind) or (kind,)) if one is not type(None)).__name__
    return "path" if found == "Path" else str(found)


def table(head: Row, body: Iterator[Row]) -> str:
    """Markdown's."""
    lines = [head, ("---",) * len(head), *body]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page())
