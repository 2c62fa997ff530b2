"""Traces of requests, if an OpenTelemetry collector is configured; otherwise nothing is imported, at no cost.

There is a span per join, acquire, generation, load and change; none per step, since there are thousands a second.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import structlog
from typing_extensions import override

from lora_server.errors import ConfigError
from lora_server.logs import Repeats

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")  # read by the SDK itself
FLUSH_SECONDS = 2.0
NOTHING: Mapping[str, str] = {}
log = structlog.get_logger()


class Traces:
    """The tracer provider of this process, if it is configured."""

    def __init__(self) -> None:
        self.provider: TracerProvider | None = None
        self.lock = threading.Lock()


_TRACES = Traces()


class _Complaints(logging.Handler):
    """Writes the SDK's records to our log, at a limited rate."""

    def __init__(self) -> None:
        super().__init__()
        self._complain = Repeats(log.warning)

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self._complain("traces", "traces", reason=record.getMessage())


def configure(service: str, endpoint: str = "", **about: str) -> None:
    """Send spans to the collector at `endpoint`, or where the SDK's environment says; once per process.

    Raises ConfigError where the extra is not installed.
    """
    with _TRACES.lock:
        if _TRACES.provider is not None:
            return
        try:
            sdk, export = _sdk("resources"), _sdk("trace.export")
            exporter = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
            trace = _sdk("trace")
        except ImportError as error:
            raise ConfigError(
                f"traces to {endpoint or 'a collector'}: {error.name} is not installed; "
                "pip install '.[telemetry]' in a checkout of lora-server"
            ) from None
        logger = logging.getLogger("opentelemetry")
        logger.addHandler(_Complaints())
        logger.propagate = False
        resource = sdk.Resource({"service.name": service, **about}).merge(sdk.OTELResourceDetector().detect())
        url = f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None
        provider = trace.TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(export.BatchSpanProcessor(exporter.OTLPSpanExporter(endpoint=url)))
        _TRACES.provider = provider
        atexit.register(shutdown)


def _sdk(module: str) -> Any:
    return importlib.import_module(f"opentelemetry.sdk.{module}")


def configure_from(environment: Mapping[str, str], service: str) -> None:
    """Configure traces if the environment names a collector; if the extra is not installed, only log that."""
    if _TRACES.provider is None and any(environment.get(name) for name in ENDPOINTS):
        try:
            configure(service)
        except ConfigError as error:
            log.info("no traces of LoRA", reason=str(error))


def shutdown() -> None:
    """Send the remaining spans, within FLUSH_SECONDS, and stop tracing."""
    with _TRACES.lock:
        provider, _TRACES.provider = _TRACES.provider, None
    if provider is not None:
        ending = threading.Thread(target=provider.shutdown, name="traces-end", daemon=True)
        ending.start()
        ending.join(FLUSH_SECONDS)


@contextlib.contextmanager
def span(name: str, parent: Mapping[str, str] | None = None, **attributes: str | float) -> Iterator[None]:
    """Record the block as a span, below `parent` (headers) or the enclosing span; an exception marks it as failed."""
    provider = _TRACES.provider
    if provider is None:
        yield
        return
    tracer = provider.get_tracer("lora_server")
    with tracer.start_as_current_span(name, context=_context(parent), attributes=_ours(attributes)):
        yield


@contextlib.contextmanager
def begun(
    name: str, parent: Mapping[str, str] | None = None, **attributes: str | float
) -> Iterator[Callable[[BaseException | None], object]]:
    """Begin a span, below `parent`, with the block; it ends, in any thread, with a call of what is yielded: with the
    error if it failed."""
    provider = _TRACES.provider
    if provider is None:
        yield lambda error: None
        return
    from opentelemetry.trace import Status, StatusCode, use_span

    span = provider.get_tracer("lora_server").start_span(name, context=_context(parent), attributes=_ours(attributes))

    def end(error: BaseException | None) -> None:
        if error is not None:
            span.record_exception(error)
            span.set_status(Status(StatusCode.ERROR, str(error)))
        span.end()

    with use_span(span):
        yield end


def record(name: str, began: float, parent: Mapping[str, str] | None = None, **attributes: str | float) -> None:
    """Record a span that began at `began` (time.monotonic()) and ends now."""
    provider = _TRACES.provider
    if provider is None:
        return
    end = time.time_ns()
    start = end - int((time.monotonic() - began) * 1e9)
    tracer = provider.get_tracer("lora_server")
    tracer.start_span(name, context=_context(parent), attributes=_ours(attributes), start_time=start).end(end)


def _ours(attributes: Mapping[str, str | float]) -> dict[str, str | float]:
    return {f"lora.{name}": value for name, value in attributes.items()}


def headers() -> Mapping[str, str]:
    """Return headers that pass the current span on to another process, or to a later `record`."""
    if _TRACES.provider is None:
        return NOTHING
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier


def _context(parent: Mapping[str, str] | None) -> Context | None:
    if not parent:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(parent)
