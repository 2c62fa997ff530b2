"""Writes our lines to vLLM's own log: its format, its stream, its level (VLLM_LOGGING_LEVEL)."""

from __future__ import annotations

import logging
from typing import Any, NoReturn

import structlog
from structlog.processors import CallsiteParameter, CallsiteParameterAdder

NAME = "vllm.lora_server"  # vLLM gives the logger "vllm", and so all below it, a handler


def join_vllms() -> None:
    """Configure structlog to write like vLLM in this process, unless its application has configured it."""
    if structlog.is_configured():
        return
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.contextvars.merge_contextvars,
            structlog.processors.format_exc_info,
            CallsiteParameterAdder([CallsiteParameter.PATHNAME, CallsiteParameter.LINENO], ["lora_server.logs"]),
            _hand_over,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET),
        logger_factory=lambda *_: logging.getLogger(NAME),
    )


def _hand_over(logger: logging.Logger, method: str, said: Any) -> NoReturn:
    path, line, event = said.pop("pathname"), said.pop("lineno"), said.pop("event")
    trace = f"\n{said.pop('exception')}" if "exception" in said else ""
    text = " ".join([event, *(f"{name}={_shown(value)}" for name, value in said.items())]) + trace
    level = logging.getLevelNamesMapping()[method.upper()]
    logger.handle(logger.makeRecord(logger.name, level, path, line, text, (), None))
    raise structlog.DropEvent


def _shown(value: object) -> str:
    return value if isinstance(value, str) and value and " " not in value else repr(value)
