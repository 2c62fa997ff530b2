"""Checks of the installation: a command's packages are installed, and our top-level names are this distribution's.

This module imports only the standard library, so that it can report what is missing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from lora_server.errors import ConfigError

OURS = "lora-server"
NAMES = ("lora_server", "client_connector", "kernels_cuda", "provisioning")
# extra -> the modules that it brings and a command imports; a test holds it against the sources and pyproject.toml
EXTRAS = {
    "server": (
        *("anyio", "cryptography", "grpc_health", "grpc_reflection", "packaging", "prometheus_client", "pydantic"),
        *("pydantic_settings", "re2", "rich", "sqlalchemy", "starlette", "typer", "uvicorn", "yaml"),
    ),
    "provision": ("matplotlib", "prometheus_client", "rich", "scipy", "typer", "yaml"),
    "ray": ("ray",),
    "demo": ("peft", "safetensors", "tokenizers", "transformers"),
}


def start(extra: str) -> None:
    """Exit with one line and code 2 if the command cannot run as installed. A console script calls this first."""
    try:
        require(extra)
        check_names()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def require(extra: str) -> None:
    """Raise a ConfigError that names the extra if any of its modules is missing; imports none of them."""
    missing = [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{', '.join(missing)} not installed: pip install '.[{extra}]' in a checkout of {OURS}")


def check_names(path: Sequence[str] | None = None) -> None:
    """Raise ConfigError if another distribution has one of our top-level names, or something hides our package.

    Two distributions with one name write into one folder and break each other; pip does not refuse that.
    """
    for distribution in importlib.metadata.distributions(path=list(sys.path if path is None else path)):
        files = f"\n{distribution.read_text('RECORD') or ''}"
        taken = [name for name in NAMES if f"\n{name}/" in files or f"\n{name}.py," in files]
        if taken and (other := distribution.name.lower().replace("_", "-")) != OURS:
            raise ConfigError(
                f"package {', '.join(taken)}: got one of {other} {distribution.version} as well, expected {OURS}'s "
                f"alone, since they overwrite each other; uninstall both, then give each an environment of its own"
            )
    home = Path(__file__).parent.parent
    for name in NAMES:
        found = importlib.util.find_spec(name)
        origin = None if found is None or found.origin is None else Path(found.origin)
        if origin is None or origin.parent.parent != home:
            raise ConfigError(
                f"package {name}: got {origin or 'none'}, expected the one in {home}; "
                "something earlier on sys.path (PYTHONPATH, the working directory) hides it"
            )
