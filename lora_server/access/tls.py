"""TLS of the control plane and of HTTP, with one certificate, which is read again when its files change.

A certificate is checked as the server's own processes would check it: dates, key, signature and name. A bad certificate
is an error at the start; later it is ignored, and the one before stays in use.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import structlog
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from lora_server.clock import SYSTEM, Clock
from lora_server.config import ProcessConfig, ServeConfig
from lora_server.errors import ConfigError
from lora_server.transport.tls import ShardCertificate
from lora_server.wire.credentials import Credentials

log = structlog.get_logger()


def own_credentials(config: ProcessConfig) -> Credentials:
    """Return the credentials of a server's own processes at its controller."""
    return node_credentials(config, config.secret)


def node_credentials(config: ServeConfig, secret: str) -> Credentials:
    """Return the credentials of a node that has this secret."""
    return Credentials(
        tls_ca=config.tls_ca,
        tls_cert=config.tls_cert,
        tls_key=config.tls_key,
        tls_name=config.tls_name,
        node_secret=secret,
    )


class _Shown(NamedTuple):
    """Key and certificates of handshakes; `ends` is when the first of them expires, in seconds since 1970."""

    key: bytes
    chain: bytes
    client_ca: bytes | None
    context: ssl.SSLContext
    ends: float

    @property
    def configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.key, self.chain)], self.client_ca)


class ServerCertificate:
    """The certificate of gRPC and HTTP; each handshake checks whether its files are newer. Thread-safe."""

    def __init__(self, config: ServeConfig, clock: Clock = SYSTEM) -> None:
        """Raises ConfigError for files that cannot serve."""
        assert config.tls_cert is not None and config.tls_key is not None
        self._config, self._clock, self._lock = config, clock, threading.Lock()
        self._files = [one for one in (config.tls_key, config.tls_cert, config.tls_client_ca) if one is not None]
        self._stamps = self._stamp()
        self._shown = _read(config, clock)
        self._refused, self._next_look = "", 0.0  # why the newest files are not shown, and when to try them again

    @property
    def seconds_left(self) -> float:
        """Return the seconds until the certificate in use expires; negative afterwards."""
        return self._shown.ends - self._clock.time()

    def grpc(self) -> grpc.ServerCredentials:
        """Return credentials for the gRPC server."""
        first = told = self._shown

        def changed() -> Any:  # None: what was told is still shown
            nonlocal told
            newest = self._newest()
            if newest is told:
                return None
            told = newest
            return newest.configuration

        return grpc.dynamic_ssl_server_credentials(first.configuration, changed, first.client_ca is not None)

    def http(self) -> ssl.SSLContext:
        """Return a context for the HTTP server, which requests no certificate of its clients."""
        made = _server_context(self._config, self._shown.key, self._shown.chain)

        def renew(handshake: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
            handshake.context = self._newest().context

        made.sni_callback = renew
        return made

    def _newest(self) -> _Shown:
        with self._lock:
            stamps = self._stamp()
            if stamps != self._stamps or (self._refused and self._clock.now() >= self._next_look):
                self._stamps = stamps
                self._renew()
            return self._shown

    def _renew(self) -> None:
        files = [str(file) for file in self._files]
        try:
            self._shown = _read(self._config, self._clock)
        except ConfigError as error:
            if str(error) != self._refused:
                log.error("the new certificate is not used; the old one stays in use", files=files, reason=str(error))
            self._refused = str(error)
            self._next_look = self._clock.now() + self._config.timings.certificate_look
        else:
            self._refused = ""
            log.info("certificates were renewed", files=files, seconds_left=int(self.seconds_left))

    def _stamp(self) -> list[tuple[int, int]]:
        return [_stamp(file) for file in self._files]


def certificate_of(config: ServeConfig) -> ServerCertificate | None:
    """Return the server's certificate, None without TLS. Raises ConfigError."""
    return ServerCertificate(config) if config.tls_cert is not None else None


def check(config: ServeConfig) -> float | None:
    """Check the configured certificates; return the seconds until the server's expires. Raises ConfigError."""
    if config.tls_ca is not None:
        _client_context(config)
    certificate = certificate_of(config)
    return None if certificate is None else certificate.seconds_left


def load_pem(context: ssl.SSLContext, pem: bytes) -> None:
    """Give a context a certificate and its key, which ssl takes from files alone. Raises ssl.SSLError, OSError."""
    with open(os.memfd_create("certificate"), "wb") as file:  # noqa: PTH123
        file.write(pem)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}", password="")


def _read(config: ServeConfig, clock: Clock) -> _Shown:
    assert config.tls_cert is not None and config.tls_key is not None
    files = (config.tls_key, config.tls_cert, *([config.tls_client_ca] if config.tls_client_ca is not None else []))
    try:
        key, chain, *client_ca = (file.read_bytes() for file in files)
    except OSError as error:
        raise ConfigError(
            f"--tls-cert, --tls-key, --tls-client-ca: {error.filename} cannot be read ({error.strerror}), expected "
            "files of this user's, in PEM"
        ) from error
    context = _server_context(config, key, chain)
    ends = _check_dates(config.tls_cert, chain, clock)
    if not config.node_rank:
        _check_as_client(config, key, chain)
    return _Shown(key, chain, client_ca[0] if client_ca else None, context, ends)


def _check_dates(file: Path, chain: bytes, clock: Clock) -> float:
    """Return when the first of the certificates expires, in seconds since 1970. Raises ConfigError."""
    now = datetime.fromtimestamp(clock.time(), UTC)
    try:
        found = x509.load_pem_x509_certificates(chain)
    except ValueError as error:
        raise ConfigError(f"--tls-cert {file}: {error}; expected certificates in PEM") from error
    begins = max(one.not_valid_before_utc for one in found)
    ends = min(one.not_valid_after_utc for one in found)
    if not begins <= now <= ends:
        raise ConfigError(
            f"--tls-cert {file}: got a certificate that is good from {begins:%Y-%m-%d %H:%M} to {ends:%Y-%m-%d %H:%M} "
            f"UTC, expected one that is good now, {now:%Y-%m-%d %H:%M}; renew it, or set this host's clock"
        )
    return ends.timestamp()


def _check_as_client(config: ServeConfig, key: bytes, chain: bytes) -> None:
    """Try a handshake in memory between the controller and one of its shards. Raises ConfigError."""
    name = config.tls_name or config.listen.local().host
    server, client = _server_context(config, key, chain), _client_context(config)
    try:
        if config.tls_client_ca is not None:
            server.verify_mode = ssl.CERT_REQUIRED
            server.load_verify_locations(config.tls_client_ca)
            load_pem(client, chain + b"\n" + key)
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = (
            client.wrap_bio(to_client, to_server, server_hostname=name),
            server.wrap_bio(to_server, to_client, server_side=True),
        )
        for end in ends * 2:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except (OSError, ValueError) as error:
        reason = getattr(error, "verify_message", "") or str(error)
        raise ConfigError(
            f"--tls-cert {config.tls_cert}: the server's own processes would not connect ({reason}), expected a "
            f"certificate for {name} that --tls-ca signed; give its name as --tls-name, or a certificate that has it"
        ) from error


def _server_context(config: ServeConfig, key: bytes, chain: bytes) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        load_pem(made, chain + b"\n" + key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--tls-cert {config.tls_cert}, --tls-key {config.tls_key}: got what does not fit together, or cannot be "
            f"read ({error}), expected a certificate and its key, in PEM"
        ) from error
    return made


def _client_context(config: ServeConfig) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        made.load_verify_locations(config.tls_ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--tls-ca {config.tls_ca}: cannot be read ({error}), expected PEM certificates of the authority that "
            "signed the controller's"
        ) from error
    return made


def _stamp(file: Path) -> tuple[int, int]:
    try:
        found = file.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_ino


# it lasts as long as its process, whatever other hosts' clocks say
BEGINS, ENDS = datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)


def shard_certificate(shard: int) -> ShardCertificate:
    """Create a self-signed certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"lora-server shard {shard}")])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(BEGINS).not_valid_after(ENDS)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    signed = builder.sign(key, hashes.SHA256())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return ShardCertificate(signed.public_bytes(Encoding.DER), _context(signed.public_bytes(Encoding.PEM) + private))


def _context(pem: bytes) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.num_tickets = 0  # nothing outlives a connection
    load_pem(made, pem)
    return made
