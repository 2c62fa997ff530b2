"""TLS of the control plane and of HTTP, with the same certificate; it is read again when its files change."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import grpc
import structlog

from lora_server.config import ProcessConfig, ServeConfig
from lora_server.errors import ConfigError
from lora_server.wire.credentials import Credentials

log = structlog.get_logger()


def own_credentials(config: ProcessConfig) -> Credentials:
    """What a server's processes show to its controller."""
    return Credentials(
        tls_ca=config.tls_ca,
        tls_cert=config.tls_cert,
        tls_key=config.tls_key,
        tls_name=config.tls_name,
        node_secret=config.secret,
    )


def server_credentials(config: ServeConfig) -> grpc.ServerCredentials | None:
    """Of the gRPC server; None without TLS. Raises ConfigError."""
    if config.tls_cert is None:
        return None
    files = _Files(config)
    first = files.read()
    _context(config)  # says what is wrong with them
    return grpc.dynamic_ssl_server_credentials(first, files.changed, config.tls_client_ca is not None)


def context(config: ServeConfig) -> ssl.SSLContext:
    """Of the HTTP server, which asks nobody for a certificate. Raises ConfigError."""
    files, made = _Files(config), _context(config)
    newest = made

    def renew(handshake: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        """At each handshake, as `_Files.changed`."""
        nonlocal newest
        if files.changed() is not None:
            try:
                newest = _context(config)
            except ConfigError as error:
                log.error("certificates cannot be read again: those before are shown", reason=str(error))
        handshake.context = newest

    made.sni_callback = renew
    return made


def _context(config: ServeConfig) -> ssl.SSLContext:
    assert config.tls_cert is not None
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        made.load_cert_chain(config.tls_cert, config.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--tls-cert {config.tls_cert}, --tls-key {config.tls_key}: got what does not fit together, or cannot be "
            f"read ({error}), expected a certificate and its key, in PEM"
        ) from error
    return made


class _Files:
    """What the gRPC server is served with."""

    def __init__(self, config: ServeConfig) -> None:
        self._files = [file for file in (config.tls_key, config.tls_cert, config.tls_client_ca) if file is not None]
        self._stamps = self._stamp()

    def read(self) -> grpc.ServerCertificateConfiguration:
        """Raises ConfigError."""
        try:
            key, chain, *ca = (file.read_bytes() for file in self._files)
        except OSError as error:
            raise ConfigError(f"--tls-cert, --tls-key, --tls-client-ca: {error.filename}: {error.strerror}") from error
        return grpc.ssl_server_certificate_configuration([(key, chain)], ca[0] if ca else None)

    def changed(self) -> Any:
        """At each handshake: what is new, where something is; what cannot be used changes nothing."""
        stamps = self._stamp()
        if stamps == self._stamps:
            return None
        self._stamps = stamps
        try:
            made = self.read()
        except ConfigError as error:
            log.error("certificates cannot be read again: those before are shown", reason=str(error))
            return None
        log.info("certificates were renewed", files=[str(file) for file in self._files])
        return made

    def _stamp(self) -> list[tuple[int, int]]:
        return [_stamp(file) for file in self._files]


def _stamp(file: Path) -> tuple[int, int]:
    try:
        found = file.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_ino
