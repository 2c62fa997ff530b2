"""Checks of a node before it starts anything; `doctor --config` runs them too, and those of its shards."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from lora_server import spec as specs
from lora_server.access import exposure, tls
from lora_server.adapters import find_adapters
from lora_server.config import ServeConfig
from lora_server.control.adapters.allowed import Allowed
from lora_server.control.adapters.resolver import check_template
from lora_server.control.members.agreement import Agreement
from lora_server.daemon.run_directory import check_data_lock
from lora_server.errors import ConfigError
from lora_server.placement import share
from lora_server.spec import ModelSpec

MIN_TOKEN = 16

Checks = dict[str, Callable[[], str]]  # by name: says what was found, raises ConfigError


def check_start(config: ServeConfig) -> ModelSpec:
    """Raise ConfigError for what can be seen before the imports that take seconds."""
    for check in checks(config).values():
        check()
    return specs.load(config.base_model)


def checks(config: ServeConfig) -> Checks:
    """Each takes milliseconds, and changes nothing."""

    def model() -> str:
        spec = specs.load(config.base_model)
        return f"{spec.name}, {Agreement.of(config, spec).layout}"

    def sources() -> str:
        allowed = Allowed.of(config)
        if config.resolve:
            check_template(config.resolve)
        return ", ".join((*allowed.roots, *allowed.sources)) or "none"

    def adapters() -> str:
        return f"{len(find_adapters(config.adapters))} in {config.adapters}" if config.adapters is not None else "none"

    def certificate() -> str:
        left = tls.check(config)
        return "none" if left is None else f"good for {left / 86400:.0f} days"

    def token() -> str:
        node_secret(config)
        return "none" if config.join_token_file is None else str(config.join_token_file)

    return {
        "model": model,
        "adapters": adapters,
        "sources": sources,
        "certificate": certificate,
        "join token": token,
    }


def later_checks(config: ServeConfig) -> Checks:
    """Return the checks that a start makes after its imports, some in its children. Creates --registry's tables."""

    def exposed() -> str:
        exposure.check(config)
        return "--insecure" if config.insecure else "as it should be"

    def data() -> str:
        if config.data_dir is None:
            return "temporary"
        check_data_lock(config.data_dir, config.node_rank)
        return str(config.data_dir)

    def registry() -> str:
        from lora_server.registry.database import Database

        if not config.registry or config.node_rank:
            return "a file"
        Database(config.registry, config.timings).close()
        return "reached"

    def memory() -> str:
        from lora_server.daemon import backends

        local = share(config.replicated.num_shards, config.nodes, max(0, config.node_rank))  # no node has more than 0
        return backends.check(config, max(1, len(local)))

    return {"open ports": exposed, "data directory": data, "registry": registry, "device and pools": memory}


def node_secret(config: ServeConfig) -> str:
    """Return the secret that shards show to the controller: the nodes' join token, or rank 0's random one."""
    if config.join_token_file is None:
        return "" if config.node_rank else secrets.token_hex(32)
    try:
        token = config.join_token_file.read_text("utf-8").strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--join-token-file {config.join_token_file}: cannot be read: {error}") from error
    if len(token) < MIN_TOKEN:
        raise ConfigError(
            f"--join-token-file {config.join_token_file}: got {len(token)} characters, expected {MIN_TOKEN} at least; "
            "make one with: openssl rand -hex 32"
        )
    return token
