"""The listening gRPC server. Streams cost it no thread, and calls of one kind never wait for those of another.

Every method, unary or not, is served as a stream of bytes: so a call that stays silent ends at a deadline, and a
message that does not parse is refused here, not in gRPC, which leaks it.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, NamedTuple, NoReturn, TypeAlias, TypeVar

import grpc
import structlog
from google.protobuf.message import DecodeError, Message

from lora_server.access.gate import Gate
from lora_server.access.identity import Identity
from lora_server.control import caller
from lora_server.control.connections import MAX_OF_A_HOST, ConnectionLimit, Peer
from lora_server.control.rpc.calls import Calls, Refusals, cut, expected
from lora_server.control.rpc.silence import SilentCalls
from lora_server.errors import LoraServerError, ProtocolError, ServerBusyError, ServerUnavailableError
from lora_server.logs import bind_tenant
from lora_server.timings import DEFAULTS, Timings
from lora_server.wire import bounds, proofs
from lora_server.wire.credentials import AUTHORIZATION, CODE_KEY
from lora_server.wire.proofs import ANSWER_KEY, check_message
from lora_server.wire.rpc import KEEPALIVE, status_of

MAX_CALLS, MAX_CALLS_OF_A_CONNECTION = 8192, 256
MAX_SILENT_CALLS = 1024  # calls that have not sent their first message yet
START_SECONDS = 30.0
CLOSE_SECONDS = 2.0  # on top of the time that running calls get
OPTIONS = (
    *KEEPALIVE,
    ("grpc.max_concurrent_streams", MAX_CALLS_OF_A_CONNECTION),
    ("grpc.max_receive_message_length", bounds.REQUEST_BYTES),
)
log = structlog.get_logger()
_T = TypeVar("_T")
_M = TypeVar("_M", bound=Message)
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Write: TypeAlias = Callable[[Message | bytes], Coroutine[Any, Any, None]]  # bytes: an encoded message
_EOF: object = grpc.aio.EOF  # type: ignore[attr-defined]


class Threads:
    """A thread pool for calls of one kind: `running` at once, `waiting` more in line; further calls are refused."""

    def __init__(self, name: str, running: int, waiting: int) -> None:
        self._name, self._most, self._here = name, running + waiting, 0
        self._free = asyncio.Semaphore(running)  # threads; the pool never queues
        self._pool = ThreadPoolExecutor(running, thread_name_prefix=name)

    async def run(self, call: Callable[..., _T], *args: Any) -> _T:
        """Run a call on a thread of the pool and return its result. Call it on the event loop's thread.

        A cancelled call that waits gives up its place at once; one that runs keeps its thread until it ends. Raises
        ServerBusyError.
        """
        if self._here >= self._most:
            raise ServerBusyError(
                f"{self._here} calls of this kind ({self._name}) run or wait, as many as may; try again soon"
            )
        self._here += 1
        try:
            await self._free.acquire()
        except asyncio.CancelledError:
            self._here -= 1
            raise
        left, context = threading.Event(), contextvars.copy_context()
        context.run(caller.bind, left)
        future = asyncio.get_running_loop().run_in_executor(self._pool, context.run, call, *args)
        future.add_done_callback(self._ended)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            left.set()
            raise

    def _ended(self, future: asyncio.Future[Any]) -> None:
        self._here -= 1
        self._free.release()
        if not future.cancelled():
            future.exception()  # a caller that gave up does not ask for it

    @property
    def idle(self) -> bool:
        """Return whether no call runs or waits."""
        return not self._here

    def close(self) -> None:
        """Shut the pool down without waiting for running calls. Call it once the event loop has ended, or when idle."""
        self._pool.shutdown(wait=False)


class ThreadGroups:
    """One thread pool per group of calls, such as a tenant's, so that no group waits for another."""

    def __init__(self, name: str, running: int, waiting: int, group: Callable[[Message, Identity], Hashable]) -> None:
        """`group` returns a call's group."""
        self._limits, self._group = (name, running, waiting), group
        self._groups: dict[Hashable, Threads] = {}

    async def run(self, call: Callable[[Any, Identity], _T], request: Message, who: Identity) -> _T:
        """Run a call on its group's threads, as Threads.run does."""
        group = self._group(request, who)
        for idle in [key for key, threads in self._groups.items() if threads.idle and key != group]:
            self._groups.pop(idle).close()
        if group not in self._groups:
            self._groups[group] = Threads(*self._limits)
        return await self._groups[group].run(call, request, who)

    def close(self) -> None:
        """Close the pools of all groups, as Threads.close does."""
        for threads in self._groups.values():
            threads.close()


class UnaryMethod(NamedTuple):
    """A method that answers one message with one message, on these threads."""

    request: type[Message]
    answer: Callable[[Any, Identity], Message]
    threads: Threads | ThreadGroups
    proves: bool = False  # an answer means that the request proved a lease, or a shard


class StreamMethod(NamedTuple):
    """A method that reads and writes streams of messages until either side ends the call."""

    request: type[Message]
    serve: Callable[[Any, StreamCall[Any]], Awaitable[None]]


class StreamCall(NamedTuple, Generic[_M]):
    """A call of a `StreamMethod`, after its first message. Call `prove` once the caller proved that it is a shard."""

    rest: AsyncIterator[_M]
    write: Write
    prove: Callable[[], None]


Service: TypeAlias = dict[str, "UnaryMethod | StreamMethod"]  # by name of the method


class CallHandler:
    """Serves each call of a listener: authenticates its caller, bounds its message, answers or refuses it.

    On the event loop's thread alone.
    """

    def __init__(self, gate: Gate, silent: SilentCalls) -> None:
        self._gate, self.silent = gate, silent
        self.proven: set[Peer] = set()  # connections that showed a good token or lease

    def serving(self, call: str, method: UnaryMethod | StreamMethod) -> grpc.RpcMethodHandler[Any, Any]:
        """Return what gRPC calls for a method, which is named `call` to the gate."""

        async def handle(_: object, context: Context) -> None:
            shown = _shown(context)
            signed = self._gate.signed(call, shown)

            def prove(said: bytes) -> tuple[tuple[str, str], ...]:
                return () if signed is None else ((ANSWER_KEY, signed.prove(said)),)

            try:
                peer, who = Peer.of_grpc(context.peer()), self._gate.admit(call, shown)
                bind_tenant(who.tenant)
                if who.token:
                    self.proven.add(peer)
                if isinstance(method, UnaryMethod):
                    message = await self._first(context, peer, method.request)
                    check_message(shown, message)
                    request = _bounded(method.request, message)
                    reply = await method.threads.run(method.answer, request, who)
                    if method.proves:
                        self.proven.add(peer)
                    data = reply.SerializeToString(deterministic=True)
                    context.set_trailing_metadata(prove(proofs.reply(data)))
                    await context.write(data)
                else:
                    await self._stream(method, peer, context)
            except Exception as error:
                await _abort(context, expected(error), prove)

        return grpc.stream_stream_rpc_method_handler(handle)

    async def _stream(self, method: StreamMethod, peer: Peer, context: Context) -> None:
        async def write(message: Message | bytes) -> None:
            await context.write(message if isinstance(message, bytes) else message.SerializeToString())

        async def rest() -> AsyncIterator[Message]:
            while (data := await context.read()) is not _EOF:
                yield _parse(method.request, data)

        call: StreamCall[Any] = StreamCall(rest(), write, lambda: self.proven.add(peer))
        await method.serve(_bounded(method.request, await self._first(context, peer, method.request)), call)

    async def _first(self, context: Context, peer: Peer, kind: type[Message]) -> bytes:
        """Read a call's first message; raises ProtocolError, ServerBusyError."""
        data: bytes = await self.silent.first(context.read(), peer, self.proven)
        if data is _EOF:
            raise ProtocolError(f"the call ended without a message; expected one {kind.DESCRIPTOR.name}")
        return data


class Listener:
    """A gRPC server that serves from its constructor on, until `close`.

    Raises RuntimeError if it cannot listen at `address`.
    """

    def __init__(
        self,
        address: str,
        services: dict[str, Service],
        gate: Gate,
        refusals: Refusals,
        reflected: Sequence[str] = (),
        tls: grpc.ServerCredentials | None = None,
        timings: Timings = DEFAULTS,
        max_silent_calls: int = MAX_SILENT_CALLS,
        max_strangers: int = MAX_OF_A_HOST,
        held: bool = False,
    ) -> None:
        """`reflected`: services that gRPC reflection lists to anyone. `max_strangers`: limit on a host's connections
        that have not authenticated. `held`: a socket of this user that does not listen already holds the port;
        otherwise the port must be free."""
        self._timings, self._options = timings, (*OPTIONS, ("grpc.so_reuseport", int(held)))
        self._handler = CallHandler(gate, SilentCalls(timings.first_message, max_silent_calls))
        self._calls = Calls(refusals)
        self._guard, self._ended = threading.Lock(), False
        started: Future[int] = Future()
        args = address, tls, services, reflected, max_strangers, started
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(*args)), name="grpc", daemon=True)
        self._thread.start()
        self.port = started.result(START_SECONDS)

    async def _serve(
        self,
        address: str,
        tls: grpc.ServerCredentials | None,
        services: dict[str, Service],
        reflected: Sequence[str],
        max_strangers: int,
        started: Future[int],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._closing: asyncio.Future[float] = self._loop.create_future()
        try:
            server, port = await self._start(address, tls, services, reflected)
        except BaseException as error:
            started.set_exception(error)
            return
        limit = ConnectionLimit(port, max_strangers, proven=self._handler.proven)
        bounding = asyncio.ensure_future(self._bound_connections(limit))
        started.set_result(port)
        await server.stop(await self._closing)
        bounding.cancel()
        with self._guard:
            self._ended = True
        await asyncio.sleep(0)  # what was begun starts, so that it can be cancelled

    async def _bound_connections(self, limit: ConnectionLimit) -> None:
        while True:
            limit.enforce()
            await asyncio.sleep(self._timings.connection_look)

    async def _start(
        self,
        address: str,
        tls: grpc.ServerCredentials | None,
        services: dict[str, Service],
        reflected: Sequence[str],
    ) -> tuple[grpc.aio.Server, int]:
        limits = {
            "grpc.max_connection_idle_ms": self._timings.grpc_idle,
            "grpc.server_handshake_timeout_ms": self._timings.handshake,
        }
        options = [*self._options, *((name, int(1000 * seconds)) for name, seconds in limits.items())]
        server = grpc.aio.server(options=options, maximum_concurrent_rpcs=MAX_CALLS, interceptors=[self._calls])
        for service, of_service in services.items():
            short = service.rpartition(".")[2]
            handlers = {name: self._handler.serving(f"{short}/{name}", method) for name, method in of_service.items()}
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        if reflected:
            from grpc_reflection.v1alpha import reflection

            reflection.enable_server_reflection([*reflected, reflection.SERVICE_NAME], server)
        port = server.add_insecure_port(address) if tls is None else server.add_secure_port(address, tls)
        await server.start()
        return server, port

    def run(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Start a coroutine on the event loop. Raises ServerUnavailableError once the loop has ended."""
        with self._guard:
            if not self._ended:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise ServerUnavailableError("the server is stopping")

    def close(self, seconds: float) -> None:
        """Refuse new calls, give running ones `seconds`."""
        self._loop.call_soon_threadsafe(self._closing.set_result, seconds)
        self._thread.join(seconds + CLOSE_SECONDS)


def _shown(context: Context) -> str:
    return next((str(value) for key, value in context.invocation_metadata() or () if key == AUTHORIZATION), "")


def _bounded(kind: type[_M], data: bytes) -> _M:
    """Parse the message that a call begins with. Raises ProtocolError, and ConfigError beyond its bounds."""
    message = _parse(kind, data)
    bounds.check(message)
    return message


def _parse(kind: type[_M], data: bytes) -> _M:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise ProtocolError(f"{len(data)} bytes: got no {kind.DESCRIPTOR.name} ({error}); expected one") from None


async def _abort(
    context: Context, error: LoraServerError, prove: Callable[[bytes], tuple[tuple[str, str], ...]]
) -> NoReturn:
    text = cut(str(error))
    await context.abort(status_of(error), text, ((CODE_KEY, error.code), *prove(proofs.refusal(error.code, text))))
    raise AssertionError("abort raises")
