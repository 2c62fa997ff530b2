"""Merges an adapter into base weights, offline."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lora_server.cli.call import SERVER_VARIABLE, JsonOption, ask, one_line_errors, print_json
from lora_server.errors import ConfigError

if TYPE_CHECKING:
    from lora_server.merged import MergedRecord

BREAK_EVEN, MIB = 0.5, 1 << 20
# beyond so many times the error without a merge `merge` warns; the delta ratio up to which it is less (docs/merge.md)
MOST_ERROR = {"base_model": (2.0, 0.57), "others": (1.4, 0.92)}
NAMES = {"base_model": "the base model", "others": "another adapter"}
BaseOption = Annotated[Path, typer.Option(help="Directory of the base model, in safetensors.")]
AdapterOption = Annotated[
    str, typer.Option(help="PEFT directory of the adapter, or with --server its name there (--name: its name).")
]
OutOption = Annotated[Path, typer.Option(help="Directory to write; it must not exist.")]
NameOption = Annotated[
    str, typer.Option(help="The adapter's name at the server. (default: the directory's name, as --adapters has it)")
]
ServerOption = Annotated[
    str, typer.Option(envvar=SERVER_VARIABLE, help="The server's --listen, to look the adapter up. (default: none)")
]
ShareOption = Annotated[
    float | None,
    typer.Option(min=0.0, max=1.0, help="Share of all adapter rows that are this adapter's. (default: not checked)"),
]


@one_line_errors()
def merge(
    base_model: BaseOption,
    adapter: AdapterOption,
    out: OutOption,
    name: NameOption = "",
    server: ServerOption = "",
    hot_share: ShareOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a base model with one adapter merged into its weights.

    \b
    lora-server merge --base-model ./Mixtral-8x7B --adapter ./adapters/law \\
        --out ./Mixtral-8x7B+law

    An engine that serves the result answers that adapter without the server, and every other one exactly, with it. It
    pays where more than half of all adapter rows are this adapter's. A merge that was interrupted continues when it is
    started again.
    """
    from lora_server import logs
    from lora_server.adapters import validate_adapter
    from lora_server.merge import Merge
    from lora_server.spec import load

    logs.configure()  # to stderr: stdout is for the result
    directory, own, expected = _source(adapter, name, server)
    opened, version = validate_adapter(directory, load(base_model))
    with opened:
        if expected not in ("", version):
            raise ConfigError(
                f"adapter {own!r}: got version {version[:12]} in {directory}, expected {expected[:12]}, which "
                f"{server} serves; its files were changed: lora-server adapters update {own} {directory}"
            )
        task = Merge(base_model, opened, version, own, out)
        with _bar(task.total_bytes) as report:
            record = task.run(report)
    if as_json:
        print_json({"out": str(out), **vars(record)})
    else:
        _show(record, out)
    _warn(record, hot_share)


def _warn(record: MergedRecord, hot_share: float | None) -> None:
    """Say on stderr where the merge costs more than it saves, or rounds more than expected."""
    from lora_server import terminal

    texts = []
    if hot_share is not None and hot_share < BREAK_EVEN:
        texts.append(
            f"--hot-share {hot_share:g}: the server computes {2 * (1 - hot_share):.2f} entries per adapter row, and "
            f"1.00 without a merge; below 0.5 a merge costs more compute than it saves (links carry "
            f"{1 - hot_share:.2f} of the bytes)"
        )
    for kind, (most, delta) in () if record.dtype == "F32" else MOST_ERROR.items():
        error = record.errors[kind]
        if error["merged"] > most * error["unmerged"]:
            texts.append(
                f"rows of {NAMES[kind]} have {error['merged'] / error['unmerged']:.2f} times the rounding error of an "
                f"engine without a merge ({error['merged']:.1e} and {error['unmerged']:.1e}), expected at most "
                f"{most:g} times: the delta is {record.delta_ratio:.2f} of the weights, and up to {delta:g} keeps it; "
                "leave this adapter to the server, or merge it into a float32 copy of the base model"
            )
    for text in texts:
        terminal.say(terminal.open_console(stderr=True), text, "warning")


def _source(adapter: str, name: str, server: str) -> tuple[Path, str, str]:
    """Return the adapter's directory, its name, and the version that the server serves ("" without one)."""
    if Path(adapter).is_dir():
        return Path(adapter), name or Path(adapter).resolve().name, ""
    if not server:
        raise ConfigError(
            f"--adapter: got {adapter!r}, expected the directory of a PEFT adapter, or with --server the name of one"
        )
    from lora_server.wire import lora_server_pb2 as pb

    found = ask(server, "Adapters", "Get", pb.GetAdapterRequest(name=adapter, registered=True))
    directory = Path(found.uri.removeprefix("file://"))
    if not directory.is_dir():
        raise ConfigError(
            f"adapter {adapter!r}: got {found.uri}, which is no directory of this machine; fetch it, and give the "
            f"directory with --name {adapter}"
        )
    return directory, name or found.name, found.version


@contextlib.contextmanager
def _bar(total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr if that is a terminal."""
    import sys

    from lora_server import terminal

    if not sys.stderr.isatty():
        yield lambda nbytes: None
        return
    with terminal.progress(transient=True) as progress:
        task = progress.add_task("merging (MiB)", total=total / MIB)
        yield lambda nbytes: progress.advance(task, nbytes / MIB)


def _show(record: MergedRecord, out: Path) -> None:
    from lora_server import terminal
    from lora_server.merge.rounding import expected_factors

    console, by_law = terminal.open_console(), expected_factors(record.delta_ratio)
    terminal.say(
        console,
        f"{out}: {record.base_model} with {record.name} {record.version[:12]} merged, {record.dtype}; its delta is "
        f"{record.delta_ratio:.2g} of the weights",
    )
    rows = [
        (
            NAMES.get(kind, record.name),
            f"{one['unmerged']:.1e}",
            f"{one['merged']:.1e}",
            f"{one['merged'] / one['unmerged']:.2f}x",
            f"{by_law[kind]:.2f}x",
        )
        for kind, one in record.errors.items()
    ]
    columns = ("rows of", "error, not merged", "error, merged", "ratio", "expected")
    terminal.table(console, columns, rows, left=("rows of",), wrapped="rows of")
