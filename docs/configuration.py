"""Writes docs/configuration.md from the settings and flags of the code: `python -m docs.configuration`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_args

import typer
from pydantic.fields import FieldInfo

from client_connector import transformers
from client_connector.connect import TRANSPORTS, WIRES
from client_connector.serving.settings import BASE_MODEL, ENVIRONMENT, ERROR, Settings
from client_connector.serving.tenants import TENANT_HEADER
from client_connector.sglang.tenants import TENANTS
from lora_server import cli as server
from lora_server.config import ServeConfig
from lora_server.config.groups import GROUPS
from lora_server.flags import default_of, metavar_of
from lora_server.wire.credentials import TLS_CA, TLS_CERT, TLS_KEY, TLS_NAME, TOKEN, TOKEN_FILE
from provisioning import cli as provision

PAGE = Path(__file__).with_suffix(".md")
MEANINGS = {  # of what has no description in the code
    "address": (
        "HOST:PORT",
        "The server's `--listen`, with a standby both, `A:7400,B:7400`; without it the plugin is not active",
    ),
    "server": ("HOST:PORT", "The server's `--listen`"),
    "transport": (", ".join(TRANSPORTS), "auto: shared memory on this host, else TCP; or one of them by name"),
    "wire": (", ".join(WIRES), "The `--wire` that the server must have"),
    "slo_class": ("a class", "The SLO class of the engine's requests and steps, one of the server's `--classes`"),
    "on_failure": (f"{ERROR}, {BASE_MODEL}", "What a request becomes whose step failed"),
    "timeout_seconds": ("seconds", "Deadline of a step, and of a join"),
    "world_seconds": ("seconds", "Over nvshmem: how long a starting worker waits for its world to be complete"),
    "model": ("model", "A transformers model in eval mode, float32, bfloat16 or float16"),
    "token": ("token", "The token to show; without it, see [Callers](#callers)"),
    "tokenizer": ("tokenizer", "For activated LoRAs with a legacy invocation string"),
}
CALLERS = [
    (f"`{TOKEN_FILE}`", "File with the token, read again for each call"),
    (f"`{TOKEN}`", "The token itself; it overrides the file"),
    (f"`{TLS_CA}`", "CA that signed the server's certificate; it turns TLS on"),
    (f"`{TLS_CERT}`, `{TLS_KEY}`", "The caller's certificate and key, where the server has `--tls-client-ca`"),
    (f"`{TLS_NAME}`", "Name in the server's certificate, if it differs from the address"),
    (
        f"`{TENANT_HEADER}`",
        "The header in which a gateway names the tenant of a request to an engine ([vLLM](vllm.md#tenants))",
    ),
    (
        f"`{TENANTS}`",
        "SGLang: with `true` callers show a token, and get their tenant's adapters ([SGLang](sglang.md#tenants))",
    ),
]
HEAD = ("Flag", "Default", "Meaning", "Value")
LIMITS = {"ge": "at least", "gt": "above", "le": "at most"}
Row = tuple[str, ...]


def page() -> str:
    """Render the whole page."""
    parts = [
        "# Configuration",
        "Written by `python -m docs.configuration` from the code; do not edit it. A test fails when it is stale.",
        "## lora-server serve",
        "Every setting is a flag (`--device-pool`), an environment variable (`LORA_SERVER_DEVICE_POOL`) and a key of\n"
        "the `--config` file (YAML, `device-pool` or `device_pool`). Flags override variables; variables override it.\n"
        "Unknown flags and keys are refused. All nodes of a server need the same base model, `layout`, `dtype`,\n"
        "`coordination`, `max-step-rows` and `wire`; a shard that differs is refused. `serve --help` shows the flags\n"
        "that most servers need, `serve --help-all` shows these:",
        *(part for group, names in GROUPS.items() for part in (f"### {group}", serve_table(names))),
        "For tests and experiments, `timings` in the `--config` file, or `LORA_SERVER_TIMINGS` as JSON, replaces\n"
        "durations of `lora_server/timings.py`, in seconds: `LORA_SERVER_TIMINGS='{\"shard_silence\": 1}'`. vLLM's\n"
        "connector reads the same variable. Timings are no flags, and may change with any release.",
        "## vLLM",
        "Environment of vLLM, or `--additional-config '{\"lora_server\": {...}}'` with these keys, which win;\n"
        '`{"lora_server": "HOST:PORT"}` gives the address alone. See [vLLM](vllm.md).',
        table(("Environment", "Default", "Meaning", "Value", "Key"), vllm_rows()),
        "## Callers",
        "How engines and commands such as `lora-server status` prove their identity, and verify the server. These are\n"
        "never flags: other users of the host can read flags. See [Security](security.md).",
        table(("Environment", "Meaning"), CALLERS),
        "## transformers",
        "`client_connector.transformers.attach(model, server, ...)`:",
        table(("Argument", "Default", "Meaning", "Value"), attach_rows()),
    ]
    for name, app in (("lora-server", server.app), ("provision", provision.app)):
        for path, command in commands(typer.main.get_command(app), name):
            if command.callback is not None and path not in ("lora-server", "lora-server serve"):
                shown = list(rows(command))
                parts += [f"## {path}", first_line(command)]
                parts += [table(HEAD, shown)] if shown else []
    parts.append("Words: [Glossary](glossary.md)")
    return "\n\n".join(part for part in parts if part) + "\n"


def serve_table(names: Iterable[str]) -> str:
    """Render the settings of one group."""
    return table(HEAD, map(serve_row, names))


def serve_row(name: str) -> Row:
    """Take the default out of the description where it stands there."""
    field = ServeConfig.model_fields[name]
    meaning, _, said = (field.description or "").partition(" Default: ")
    default = default_of(field).removeprefix("default: ") or said.rstrip(".")
    return f"`--{name.replace('_', '-')}`", default, meaning, value_of(field)


def value_of(field: FieldInfo) -> str:
    """Say what a value may be, such as: N, at least 1, at most 64."""
    given = [(key, getattr(one, key)) for one in field.metadata for key in LIMITS if hasattr(one, key)]
    name = "true, false" if field.annotation is bool else metavar_of(field).replace("|", ", ")
    return ", ".join([name, *(f"{LIMITS[key]} {limit:g}" for key, limit in given)])


def vllm_rows() -> Iterator[Row]:
    """List what a user may set; the engine knows the rest."""
    for field in fields(Settings):
        if field.name in ENVIRONMENT:
            value, meaning = MEANINGS[field.name]
            default = None if field.default is MISSING else field.default
            yield f"`{ENVIRONMENT[field.name]}`", plain(default), meaning, value, f"`{field.name}`"


def attach_rows() -> Iterator[Row]:
    """List the parameters of attach()."""
    for name, parameter in inspect.signature(transformers.attach).parameters.items():
        default = "required" if parameter.default is parameter.empty else plain(parameter.default)
        yield f"`{name}`", default, MEANINGS[name][1], MEANINGS[name][0]


def commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """List a command and all below it, as they are typed."""
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, f"{path} {name}")


def first_line(command: Any) -> str:
    """Take the line that --help begins with."""
    return (command.help or "").strip().splitlines()[0] if command.help else ""


def rows(command: Any) -> Iterator[Row]:
    """List flags and arguments; those that only print and exit are left out."""
    for name, one in inspect.signature(inspect.unwrap(command.callback), eval_str=True).parameters.items():
        kind, *found = get_args(one.annotation) or (one.annotation,)
        option = next((info for info in found if isinstance(info, typer.models.OptionInfo)), None)
        if name == "version" or kind is typer.Context:
            continue
        if option is None:
            yield f"`{name.upper()}`", "required", "", "argument"
            continue
        # in Annotated the first name of an option stands where its default would
        named = [one for one in (option.default, *(option.param_decls or ())) if str(one).startswith("--")]
        text, default = said(option.help or "", one.default)
        variable = f" (`{option.envvar}`)" if option.envvar else ""
        yield f"`{named[0] if named else '--' + name.replace('_', '-')}`", default, f"{text}{variable}", name_of(kind)


def said(text: str, default: Any) -> tuple[str, str]:
    """Split the default from the help that names it."""
    before, bracket, after = text.rpartition(" (")
    if bracket and after.startswith(("default: ", "required")):
        return f"{before.rstrip('.')}.", after.rstrip(").").removeprefix("default: ")
    return text, "required" if default is inspect.Parameter.empty else plain(default)


def plain(value: Any) -> str:
    """Write a default as it is typed."""
    if value is None or isinstance(value, bool):
        return "none" if value is None else str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def name_of(kind: Any) -> str:
    """Name a flag's type, None aside."""
    found = next(one for one in (get_args(kind) or (kind,)) if one is not type(None)).__name__
    return "path" if found == "Path" else str(found)


def table(head: Row, body: Iterable[Row]) -> str:
    """Render a table of Markdown."""
    lines = [head, ("---",) * len(head), *body]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page())
