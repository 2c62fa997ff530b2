"""Credentials of a caller of the control plane: its token, and certificates of both sides."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from lora_server.errors import ConfigError, ServerUnavailableError, UnauthenticatedError
from lora_server.wire import proofs

AUTHORIZATION = "authorization"  # of a call's metadata, as of an HTTP request's headers
CODE_KEY = "lora-error-code"  # of a call's trailing metadata
TOKEN, TOKEN_FILE = "LORA_SERVER_TOKEN", "LORA_SERVER_TOKEN_FILE"
TLS_CA, TLS_CERT, TLS_KEY, TLS_NAME = (f"LORA_SERVER_TLS_{one}" for one in ("CA", "CERT", "KEY", "NAME"))
TOKEN_TEXT = re.compile(r"ls_([0-9a-f]{12})_([A-Za-z0-9_-]{43})", re.ASCII)  # id and secret


@dataclass(frozen=True)
class Credentials:
    """Files are read when they are needed, so that they may be renewed: a token's with each call, certificates' with
    each channel. `tls_ca` verifies servers' certificates: with it calls use TLS."""

    token: str = field(default="", repr=False)
    token_file: Path | None = None
    tls_ca: Path | None = None
    tls_cert: Path | None = None  # of this caller, where the server asks for one
    tls_key: Path | None = None
    tls_name: str = ""  # that the server's certificate has to have; its address's, where none is given
    node_secret: str = field(default="", repr=False)  # of a process of the server itself

    @classmethod
    def of(cls, environment: Mapping[str, str], token: str = "") -> Credentials:
        """Read credentials from environment variables; a given `token` takes precedence."""

        def path(key: str) -> Path | None:
            return Path(environment[key]) if environment.get(key) else None

        own, name = token or environment.get(TOKEN, ""), environment.get(TLS_NAME, "")
        return cls(own, None if own else path(TOKEN_FILE), path(TLS_CA), path(TLS_CERT), path(TLS_KEY), name)

    def authorization(self, call: str, message: bytes = b"") -> str:
        """Return the header for a call, Service/Method; empty without credentials. Raises ConfigError.

        Without TLS it proves the token and does not contain it.
        """
        return str(self.sign(call, message))

    def sign(self, call: str, message: bytes = b"") -> str | proofs.SignedCall:
        """Return the header of `authorization`; for a signed call, with the key that proves the server's answer."""
        if self.node_secret:
            return proofs.sign_call(proofs.NODE, self.node_secret, call, message)
        token = self.token or (
            _read(self.token_file, TOKEN_FILE).decode("ascii", "replace").strip() if self.token_file else ""
        )
        if not (token.isascii() and token.isprintable()):
            source = TOKEN if self.token else f"{TOKEN_FILE} {self.token_file}"
            raise ConfigError(f"{source}: got control or non-ASCII characters, expected one token, ls_ID_SECRET")
        parts = TOKEN_TEXT.fullmatch(token)
        if parts is not None and self.tls_ca is None:
            return proofs.sign_call(parts[1], parts[2], call, message)
        return f"Bearer {token}" if token else ""

    @property
    def has_any(self) -> bool:
        """Return whether there are credentials to show."""
        return bool(self.token or self.token_file or self.node_secret)

    def options(self) -> tuple[tuple[str, str], ...]:
        """Return the options that a channel needs for these credentials."""
        return (("grpc.ssl_target_name_override", self.tls_name),) if self.tls_name and self.tls_ca else ()

    def channel(self) -> grpc.ChannelCredentials | None:
        """Return gRPC's TLS credentials, None without TLS. Raises ConfigError."""
        if self.tls_ca is None:
            if self.tls_cert or self.tls_key:
                raise ConfigError(f"{TLS_CERT}: got one without {TLS_CA}, expected both; give the CA of the server's")
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
    """Read the credentials of this process from its environment."""
    return Credentials.of(os.environ)


class Shows(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[type-arg]
    grpc.StreamStreamClientInterceptor,  # type: ignore[type-arg]
):
    """An interceptor that adds the header to every call, and checks the server's proof of answers to signed calls."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """Add the header and check the answer; raises ServerUnavailableError for an answer without the server's proof.

        The answer of a future that is not done yet is not checked, so futures may only be used for announcements.
        """
        message = request if isinstance(request, bytes) else request.SerializeToString()
        shown = self._credentials.sign(_call(client_call_details), message)
        answer = continuation(_with_header(client_call_details, str(shown)), request)
        if isinstance(shown, proofs.SignedCall) and answer.done():
            _check_answer(shown, answer)
        return answer

    def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        """Add the header to a stream; its answers are not checked."""
        shown = self._credentials.authorization(_call(client_call_details))
        return continuation(_with_header(client_call_details, shown), request_iterator)


def _call(details: Any) -> str:
    return str(details.method).rpartition(".")[2]


def _check_answer(call: proofs.SignedCall, answer: Any) -> None:
    """Raise ServerUnavailableError for an answer without the server's proof. gRPC's own errors pass, and so does the
    refusal of an invalid token: a server that does not know the token cannot prove anything by it."""
    metadata = dict(answer.trailing_metadata() or ())
    if answer.exception() is None:
        said = proofs.reply(answer.result())
    elif (code := metadata.get(CODE_KEY, UnauthenticatedError.code)) != UnauthenticatedError.code:
        said = proofs.refusal(str(code), answer.details() or "")
    else:
        return
    if not call.is_proven(str(metadata.get(proofs.ANSWER_KEY, "")), said):
        raise ServerUnavailableError(
            f"{call.call}: the peer does not prove that it knows the caller's token ({call.header.id}): "
            "another process may have the server's port, or the server is older than this client"
        )


def _with_header(details: Any, shown: str) -> Any:
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


@dataclass
class _Details(grpc.ClientCallDetails):
    method: str
    timeout: float | None
    metadata: Any
    credentials: Any
    wait_for_ready: bool | None
    compression: Any
