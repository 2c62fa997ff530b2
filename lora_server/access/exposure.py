"""What a server may leave open: on a loopback address all of it, elsewhere nothing that nobody asked for."""

from __future__ import annotations

import structlog

from lora_server.address import Address
from lora_server.config import ServeConfig
from lora_server.errors import ConfigError

log = structlog.get_logger()


def check(config: ServeConfig) -> None:
    """Raises ConfigError, unless --insecure was given; then it is said aloud."""
    open_to = {flag: str(address) for flag, address in _open(config).items() if not address.is_loopback()}
    if not open_to:
        return
    missing = _missing(config)
    if not missing:
        return
    where = ", ".join(f"{flag} {address}" for flag, address in open_to.items())
    if not config.insecure:
        raise ConfigError(
            f"{where}: got {' and '.join(missing)} where other hosts reach it, expected {_expected(config)}; on a "
            "network that you trust, --insecure starts it as it is"
        )
    log.warning("--insecure: whoever reaches these ports may do everything", missing=missing, **open_to)


def _open(config: ServeConfig) -> dict[str, Address]:
    """What is reached from elsewhere."""
    if config.node_rank and config.controller is not None:
        return {"--controller": config.controller, "--http": config.http}
    more = {"--advertise": Address(config.advertise, 0)} if config.advertise else {}
    return {"--listen": config.listen, "--http": config.http} | more


def _missing(config: ServeConfig) -> list[str]:
    if config.node_rank:  # whether tokens are required is the controller's to say
        return [] if config.tls_ca else ["no TLS"]
    return [
        *([] if config.require_tokens else ["no tokens"]),
        *([] if config.tls_cert else ["no TLS"]),
    ]


def _expected(config: ServeConfig) -> str:
    return "--tls-ca" if config.node_rank else "--require-tokens and --tls-cert, --tls-key, --tls-ca"
