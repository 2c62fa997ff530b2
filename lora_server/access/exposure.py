"""Refuses to serve without tokens or TLS at an address that other hosts reach, unless --insecure allows it."""

from __future__ import annotations

from collections.abc import Collection

import structlog

from lora_server.address import Address, ControllerList
from lora_server.config import ServeConfig
from lora_server.errors import ConfigError

log = structlog.get_logger()


def check(config: ServeConfig) -> None:
    """Raise ConfigError for what is open to other hosts; with --insecure only log it."""
    open_to = {flag: str(address) for flag, address in _open(config).items() if not address.is_loopback()}
    lacking = _lacking(config, open_to)
    if not lacking:
        return
    where = ", ".join(f"{flag} {address}" for flag, address in open_to.items())
    missing = list(dict.fromkeys(lacking.values()))
    if not config.insecure:
        raise ConfigError(
            f"{where}: got {' and '.join(missing)} where other hosts reach it, expected {' and '.join(lacking)}; on a "
            "network that you trust, --insecure starts it as it is"
        )
    log.warning("--insecure: any host that reaches these ports may do everything", missing=missing, **open_to)


def _open(config: ServeConfig) -> dict[str, Address | ControllerList]:
    """Return the addresses by flag at which other hosts may reach this node."""
    if config.node_rank and config.controller is not None:
        return {"--controller": config.controller, "--http": config.http}
    more = {"--advertise": Address(config.advertise, 0)} if config.advertise else {}
    if config.events_address is not None:
        more["--events"] = config.events_address
    return {"--listen": config.listen, "--http": config.http, **more}


def _lacking(config: ServeConfig, open_to: Collection[str]) -> dict[str, str]:
    """Return the flags that are missing, and what each leaves open. Tokens are a matter of the controller's node."""
    lacking = {}
    if open_to and not config.node_rank and not config.require_tokens:
        lacking["--require-tokens"] = "no tokens"
    if "--controller" in open_to and config.tls_ca is None:
        lacking["--tls-ca"] = "no TLS"
    if set(open_to) - {"--controller"} and config.tls_cert is None:
        lacking["--tls-cert, --tls-key, --tls-ca"] = "no TLS"
    return lacking
