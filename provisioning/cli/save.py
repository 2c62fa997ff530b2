"""Files that a command writes."""

from __future__ import annotations

from pathlib import Path

import typer


def save(path: Path, content: str | bytes, flag: str) -> None:
    """Write a file and say so on stderr; raises InputError that names the flag."""
    from provisioning.inputs import InputError

    try:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise InputError(f"{flag}: {path} cannot be written: {error.strerror}") from None
    typer.echo(f"{flag[2:]}: {path}", err=True)
