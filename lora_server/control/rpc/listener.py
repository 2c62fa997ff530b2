"""The listening gRPC server. Streams cost it no thread, and calls of one kind never wait for those of another.

Every method, unary or not, is served as a stream of bytes: so a call that stays silent ends at a deadline, and a
message that does not parse is refused here, not in gRPC, which leaks it.
"""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, NoReturn, Self, TypeAlias, TypeVar

import grpc
import structlog
from google.protobuf.message import DecodeError, Message

from lora_server.access.identity import Identity
from lora_server.control.rpc.calls import Calls
from lora_server.errors import LoraServerError, ProtocolError, ServerBusyError, ServerUnavailableError
from lora_server.logs import bind_tenant
from lora_server.timings import Timings
from lora_server.wire.credentials import AUTHORIZATION
from lora_server.wire.rpc import CODE_KEY, KEEPALIVE, status_of

MAX_CALLS, MAX_CALLS_OF_A_CONNECTION = 8192, 256
MAX_SILENT_CALLS = 1024  # of one host, that have not sent their message yet
START_SECONDS = 30.0
CLOSE_SECONDS = 2.0  # beside those of the calls
OPTIONS = (
    *KEEPALIVE,
    # without so_reuseport=0 a second server on the same port would start, and clients land on either
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", MAX_CALLS_OF_A_CONNECTION),
)
log = structlog.get_logger()
_T = TypeVar("_T")
_M = TypeVar("_M", bound=Message)
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Write: TypeAlias = Callable[[Message], Coroutine[Any, Any, None]]
_EOF: object = grpc.aio.EOF  # type: ignore[attr-defined]


class Threads:
    """What runs the calls of one kind: some at once, some more may wait, the rest is refused."""

    def __init__(self, name: str, running: int, waiting: int) -> None:
        self._name, self._most, self._here = name, running + waiting, 0
        self._pool = ThreadPoolExecutor(running, thread_name_prefix=name)

    async def run(self, call: Callable[..., _T], *args: Any) -> _T:
        """On the event loop's thread. Raises ServerBusyError."""
        if self._here >= self._most:
            raise ServerBusyError(
                f"{self._here} calls of this kind ({self._name}) run or wait, as many as may; try again soon"
            )
        self._here += 1
        context = contextvars.copy_context()
        future = asyncio.get_running_loop().run_in_executor(self._pool, lambda: context.run(call, *args))
        future.add_done_callback(self._ended)  # not when this call ends: its client may give up before
        return await future

    def _ended(self, future: asyncio.Future[Any]) -> None:
        self._here -= 1
        if not future.cancelled():
            future.exception()  # whoever gave up does not ask for it

    def close(self) -> None:
        """What waits is not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Unary(NamedTuple):
    """A method that answers one message with one, on these threads."""

    request: type[Message]
    answer: Callable[[Any, Identity], Message]
    threads: Threads


class Stream(NamedTuple):
    """A method that reads messages and writes others, for as long as both like."""

    request: type[Message]
    serve: Callable[[Any, AsyncIterator[Any], Write], Awaitable[None]]


Service: TypeAlias = dict[str, "Unary | Stream"]  # by name of the method
Admit: TypeAlias = Callable[[str, str], Identity]  # Service/Method, and what was shown; raises why not


class Listener:
    """Serves from its constructor on, until `close`. Raises RuntimeError where it cannot listen at `address`."""

    def __init__(
        self,
        address: str,
        services: dict[str, Service],
        admit: Admit,
        reflected: Sequence[str] = (),
        tls: grpc.ServerCredentials | None = None,
        first_message_seconds: float = Timings.first_message,
        max_silent_calls: int = MAX_SILENT_CALLS,
    ) -> None:
        """`reflected`: services that whoever asks may learn of."""
        self._admit, self._tls = admit, tls
        self._first_message_seconds, self._max_silent_calls = first_message_seconds, max_silent_calls
        self._silent: Counter[str] = Counter()  # by host
        self.calls = Calls()
        self._guard, self._ended = threading.Lock(), False
        started: Future[int] = Future()
        args = address, services, reflected, started
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(*args)), name="grpc", daemon=True)
        self._thread.start()
        self.port = started.result(START_SECONDS)

    async def _serve(
        self, address: str, services: dict[str, Service], reflected: Sequence[str], started: Future[int]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._closing: asyncio.Future[float] = self._loop.create_future()
        try:
            server, port = await self._start(address, services, reflected)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(port)
        await server.stop(await self._closing)
        with self._guard:
            self._ended = True
        await asyncio.sleep(0)  # what was begun starts, so that it can be cancelled

    async def _start(
        self, address: str, services: dict[str, Service], reflected: Sequence[str]
    ) -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server(options=OPTIONS, maximum_concurrent_rpcs=MAX_CALLS, interceptors=[self.calls])
        for service, of_service in services.items():
            short = service.rpartition(".")[2]
            handlers = {name: self._handler(f"{short}/{name}", method) for name, method in of_service.items()}
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        if reflected:
            from grpc_reflection.v1alpha import reflection

            reflection.enable_server_reflection([*reflected, reflection.SERVICE_NAME], server)
        tls = self._tls
        port = server.add_insecure_port(address) if tls is None else server.add_secure_port(address, tls)
        await server.start()
        return server, port

    def _handler(self, call: str, method: Unary | Stream) -> grpc.RpcMethodHandler[Any, Any]:
        async def handle(_: object, context: Context) -> None:
            try:
                who = self._admit(call, _shown(context))
                bind_tenant(who.tenant)
                if isinstance(method, Unary):
                    request = await self._first(context, method.request)
                    reply = await method.threads.run(method.answer, request, who)
                    await context.write(reply.SerializeToString())
                else:
                    await self._stream(method, context)
            except LoraServerError as error:
                await _abort(context, error)
            except Exception as error:
                log.exception("a call failed, and should not have")
                await _abort(context, LoraServerError(f"the server failed: {error!r:.200}; see its log"))

        return grpc.stream_stream_rpc_method_handler(handle)

    async def _stream(self, method: Stream, context: Context) -> None:
        async def write(message: Message) -> None:
            await context.write(message.SerializeToString())

        async def rest() -> AsyncIterator[Message]:
            while (data := await context.read()) is not _EOF:
                yield _parse(method.request, data)

        await method.serve(await self._first(context, method.request), rest(), write)

    async def _first(self, context: Context, kind: type[_M]) -> _M:
        """The message that a call begins with; raises ProtocolError, ServerBusyError."""
        host = context.peer().rpartition(":")[0]
        if self._silent[host] >= self._max_silent_calls:
            raise ServerBusyError(f"{self._silent[host]} calls of {host} are silent, as many as may be; end some")
        self._silent[host] += 1
        try:
            data = await asyncio.wait_for(context.read(), self._first_message_seconds)
        except TimeoutError:
            raise ProtocolError(f"no message within {self._first_message_seconds:g} s; expected one at once") from None
        finally:
            self._silent[host] -= 1
            if not self._silent[host]:
                del self._silent[host]
        if data is _EOF:
            raise ProtocolError(f"the call ended without a message; expected one {kind.DESCRIPTOR.name}")
        return _parse(kind, data)

    def run(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Begin it on the event loop. Raises ServerUnavailableError once that has ended."""
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


def _parse(kind: type[_M], data: bytes) -> _M:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise ProtocolError(f"{len(data)} bytes: got no {kind.DESCRIPTOR.name} ({error}); expected one") from None


async def _abort(context: Context, error: LoraServerError) -> NoReturn:
    await context.abort(status_of(error), str(error), ((CODE_KEY, error.code),))
    raise AssertionError("abort raises")


class Mailbox:
    """Messages from the event loop to a thread, which iterates over them until it is closed."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def put(self, message: Message) -> None:
        """From any thread."""
        self._messages.put(message)

    def close(self) -> None:
        """After all that was put."""
        self._messages.put(None)

    def __iter__(self) -> Iterator[Any]:
        while (message := self._messages.get()) is not None:
            yield message

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
