"""Calling the control plane: one way to open a channel, deadlines on every call, our own errors out of gRPC's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import grpc

from lora_server import logs, telemetry
from lora_server.address import ControllerList
from lora_server.errors import (
    AdapterError,
    AdapterExistsError,
    AdmissionError,
    ConfigError,
    GeometryMismatchError,
    LeaseError,
    LimitError,
    LoraServerError,
    PermissionDeniedError,
    ProtocolError,
    ServerBusyError,
    ServerUnavailableError,
    StepTimeoutError,
    UnauthenticatedError,
    UnknownAdapterError,
    WorldError,
    rebuild,
)
from lora_server.wire.bounds import REPLY_BYTES
from lora_server.wire.credentials import CODE_KEY, TLS_CA, TLS_CERT, TLS_NAME, Credentials, Shows, of_environment
from lora_server.wire.leader import LeaderChannel

REQUEST_KEY = "lora-request-id"
# streams between shards and the controller: a host that vanished is noticed within seconds
KEEPALIVE = (
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),  # that a server lets pass
)
# the minimum is what one attempt to connect may take, on a busy host, too; it delays no retry
_PATIENCE = (("grpc.min_reconnect_backoff_ms", 5000), *KEEPALIVE)
# with a standby: also a leader that was stopped, whose kernel still acknowledges, is left within seconds
_PATIENCE_WITH_LEADERS = (
    ("grpc.min_reconnect_backoff_ms", 2500),
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    *KEEPALIVE[2:],
)
# Calls fail at once between two attempts to connect, though the server may be back: retry soon, not after gRPC's usual
# backoff of up to two minutes.
_RECONNECT = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 200))
_LARGE = (("grpc.max_receive_message_length", REPLY_BYTES),)
_T = TypeVar("_T")

# what gRPC says of a connection that did not come about, and what that means
_MIXED_UP = (
    ("http1.x server", "an HTTP server answers there; give the port of --listen, not that of --http"),
    ("missing selected ALPN", "an HTTPS server answers there; give the port of --listen, not that of --http"),
    ("WRONG_VERSION_NUMBER", f"it has no TLS there; unset {TLS_CA}, or give the address of a server with --tls-cert"),
    ("CERTIFICATE_VERIFY_FAILED", f"{TLS_CA} did not sign its certificate, or that is not good now; give its --tls-ca"),
    ("Hostname Verification", f"its certificate is of another name; give the address that is in it, or set {TLS_NAME}"),
    (
        "Socket closed",
        f"it ended the connection: if it has TLS, set {TLS_CA}, and {TLS_CERT} if it asks for one; if not, it is "
        "starting or stopping",
    ),
    ("hostname lookup", "its name is not known here; give an address, or check the name"),
)

_STATUS: tuple[tuple[type[LoraServerError], grpc.StatusCode], ...] = (
    (UnknownAdapterError, grpc.StatusCode.NOT_FOUND),
    (AdapterExistsError, grpc.StatusCode.ALREADY_EXISTS),
    (PermissionDeniedError, grpc.StatusCode.PERMISSION_DENIED),
    (UnauthenticatedError, grpc.StatusCode.UNAUTHENTICATED),
    (AdapterError, grpc.StatusCode.INVALID_ARGUMENT),
    (LimitError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (AdmissionError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (ConfigError, grpc.StatusCode.INVALID_ARGUMENT),
    (GeometryMismatchError, grpc.StatusCode.FAILED_PRECONDITION),
    (LeaseError, grpc.StatusCode.FAILED_PRECONDITION),
    (WorldError, grpc.StatusCode.FAILED_PRECONDITION),
    (StepTimeoutError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (ProtocolError, grpc.StatusCode.INVALID_ARGUMENT),
    (ServerBusyError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (ServerUnavailableError, grpc.StatusCode.UNAVAILABLE),
)


def open_channel(address: str, credentials: Credentials | None = None, apart: bool = False) -> grpc.Channel:
    """Open a channel to the control plane at HOST:PORT, or to the one of several (A:PORT,B:PORT) that leads; the caller
    closes it. Without credentials it takes those of the environment. `apart`: on a connection of its own. Raises
    ConfigError."""
    try:
        ControllerList.parse(address)
    except ConfigError as error:
        raise ConfigError(f"address of the server: {error}") from None
    credentials = of_environment() if credentials is None else credentials
    options = (*_RECONNECT, *_LARGE, *credentials.options(), ("grpc.use_local_subchannel_pool", int(apart)))
    if "," in address:
        own = (*_PATIENCE_WITH_LEADERS, *options)
        return cast(grpc.Channel, LeaderChannel(address, lambda one: _open(one, credentials, own)))
    return _open(address, credentials, (*_PATIENCE, *options))


def _open(address: str, credentials: Credentials, options: tuple[tuple[str, object], ...]) -> grpc.Channel:
    tls = credentials.channel()
    if tls is None:
        channel = grpc.insecure_channel(address, options=options)
    else:
        channel = grpc.secure_channel(address, tls, options=options)
    return grpc.intercept_channel(channel, Shows(credentials)) if credentials.has_any else channel


def status_of(error: LoraServerError) -> grpc.StatusCode:
    """Return the gRPC status of an error of ours; its `code` travels as metadata."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def call(method: Callable[..., _T], request: Any, *, server: str, seconds: float) -> _T:
    """Make a unary call. Raises the server's error, or ServerUnavailableError, with the call's id."""
    request_id = logs.request_id()
    metadata = ((REQUEST_KEY, request_id), *telemetry.headers().items())
    try:
        return method(request, timeout=seconds, metadata=metadata)
    except ValueError as error:  # the channel was closed
        raise ServerUnavailableError(f"server {server}: this session was left ({error})") from None
    except grpc.RpcError as error:
        raised = translate(cast(grpc.Call, error), server, seconds)
        raised.request = request_id
        raise raised from None


class PendingCall(Generic[_T]):
    """A unary call under way; another thread may cancel it."""

    def __init__(self, method: Any, request: Any, *, server: str, seconds: float) -> None:
        """Raises ServerUnavailableError if the channel was closed."""
        self._server, self._seconds = server, seconds
        try:
            self._call = method.future(request, timeout=seconds, metadata=tuple(telemetry.headers().items()))
        except ValueError as error:
            raise ServerUnavailableError(f"server {server}: this session was left ({error})") from None

    def cancel(self) -> None:
        """End the call; `result` returns None, unless the answer is there already."""
        self._call.cancel()

    def result(self) -> _T | None:
        """Wait for the answer; None if the call was cancelled. Raises the server's error, or ServerUnavailableError."""
        try:
            answer: _T = self._call.result()
            return answer
        except grpc.FutureCancelledError:
            return None
        except grpc.RpcError as error:
            raise translate(cast(grpc.Call, error), self._server, self._seconds) from None


def translate(error: grpc.Call, server: str, seconds: float = 0.0) -> LoraServerError:
    """Return the server's error from gRPC's."""
    for key, value in error.trailing_metadata() or ():
        if key == CODE_KEY:
            return rebuild(str(value), error.details() or "")
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return ServerUnavailableError(f"server {server}: {_why_unreached(error.details() or '')}")
    if error.code() is grpc.StatusCode.CANCELLED:
        return ServerUnavailableError(f"server {server}: the call was cancelled ({error.details()})")
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return ServerUnavailableError(f"server {server}: no answer within {seconds:g} s")
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:  # gRPC's own limit
        return ServerBusyError(f"server {server}: it takes no more calls now ({error.details()}); try again soon")
    return LoraServerError(f"server {server}: {error.code().name}: {error.details()}")


def _why_unreached(details: str) -> str:
    """Say why there is no connection, from gRPC's words, and what to do."""
    began = "failed to connect" in details or "resolving" in details  # others broke later
    found = next((why for sign, why in _MIXED_UP if began and sign in details), "")
    reason = details.rpartition("to remote host: ")[2]  # of all that gRPC says
    return found or f"cannot be reached ({reason}); is it running?"
