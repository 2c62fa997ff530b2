"""What a caller of the control plane shows, and by what it knows the server: a token, certificates."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from lora_server.errors import ConfigError

AUTHORIZATION = "authorization"  # of a call's metadata, as of an HTTP request's headers
TOKEN, TOKEN_FILE = "LORA_SERVER_TOKEN", "LORA_SERVER_TOKEN_FILE"
TLS_CA, TLS_CERT, TLS_KEY, TLS_NAME = (f"LORA_SERVER_TLS_{one}" for one in ("CA", "CERT", "KEY", "NAME"))


@dataclass(frozen=True)
class Credentials:
    """Files are read when they are needed, so that they may be renewed: a token's with each call, certificates' with
    each channel. `tls_ca` is who signs servers' certificates: with it calls are TLS's."""

    token: str = field(default="", repr=False)
    token_file: Path | None = None
    tls_ca: Path | None = None
    tls_cert: Path | None = None  # of this caller, where the server asks for one
    tls_key: Path | None = None
    tls_name: str = ""  # that the server's certificate has to have; its address's, where none is given
    node_secret: str = field(default="", repr=False)  # of a process of the server itself

    @classmethod
    def of(cls, environment: Mapping[str, str], token: str = "") -> Credentials:
        """What it says; a token that is given wins."""

        def path(key: str) -> Path | None:
            return Path(environment[key]) if environment.get(key) else None

        own, name = token or environment.get(TOKEN, ""), environment.get(TLS_NAME, "")
        return cls(own, None if own else path(TOKEN_FILE), path(TLS_CA), path(TLS_CERT), path(TLS_KEY), name)

    def authorization(self) -> str:
        """The header's text; empty where nothing is shown. Raises ConfigError."""
        if self.node_secret:
            return f"Node {self.node_secret}"
        token = self.token or (
            _read(self.token_file, TOKEN_FILE).decode("ascii", "replace").strip() if self.token_file else ""
        )
        return f"Bearer {token}" if token else ""

    @property
    def has_any(self) -> bool:
        """Whether something is shown."""
        return bool(self.token or self.token_file or self.node_secret)

    def options(self) -> tuple[tuple[str, str], ...]:
        """Of a channel."""
        return (("grpc.ssl_target_name_override", self.tls_name),) if self.tls_name and self.tls_ca else ()

    def channel(self) -> grpc.ChannelCredentials | None:
        """None without TLS. Raises ConfigError."""
        if self.tls_ca is None:
            if self.tls_cert or self.tls_key:
                raise ConfigError(f"{TLS_CERT}: got one without {TLS_CA}, expected both; give who signed the server's")
            return None
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError(f"{TLS_CERT} and {TLS_KEY}: got one of them, expected both or neither")
        own = (
            (_read(self.tls_key, TLS_KEY), _read(self.tls_cert, TLS_CERT))
            if self.tls_key and self.tls_cert
            else (None, None)
        )
        return grpc.ssl_channel_credentials(_read(self.tls_ca, TLS_CA), *own)


def _read(file: Path, what: str) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{what}: {file} cannot be read ({error.strerror}); expected a file of this user's"
        ) from error


def of_environment() -> Credentials:
    """Of this process."""
    return Credentials.of(os.environ)


class Shows(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[type-arg]
    grpc.StreamStreamClientInterceptor,  # type: ignore[type-arg]
):
    """Puts the header into every call."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    def _with_header(self, details: Any) -> Any:
        shown = self._credentials.authorization()
        if not shown:
            return details
        return _Details(
            method=details.method,
            timeout=details.timeout,
            metadata=[*(details.metadata or ()), (AUTHORIZATION, shown)],
            credentials=details.credentials,
            wait_for_ready=details.wait_for_ready,
            compression=details.compression,
        )

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """See grpc."""
        return continuation(self._with_header(client_call_details), request)

    def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        """See grpc."""
        return continuation(self._with_header(client_call_details), request_iterator)


@dataclass
class _Details(grpc.ClientCallDetails):
    method: str
    timeout: float | None
    metadata: Any
    credentials: Any
    wait_for_ready: bool | None
    compression: Any
