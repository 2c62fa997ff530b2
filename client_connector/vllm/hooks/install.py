"""Patching vLLM: what is wrapped, once per process. Engines that are not ours pass through unchanged."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from client_connector.serving.lookup import require_server
from client_connector.serving.wrapping import end_with_one_line, is_wrapped, wrap
from client_connector.vllm.contract import CONTRACT, SUPPORTED
from client_connector.vllm.logs import join_vllms
from client_connector.vllm.settings import ACTIVE, configured
from lora_server.errors import LoraServerError


def watch() -> None:
    """Look for an address when an engine is configured; all that is done without one."""
    from vllm.engine.arg_utils import EngineArgs

    def make(original: Any) -> Callable[..., Any]:
        def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return _configured(original, self, *args, **kwargs)
            except LoraServerError as error:
                end_with_one_line(error)
                raise

        return create_engine_config

    wrap(EngineArgs, "create_engine_config", make)


def _configured(original: Any, engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Configure an engine, ours if it has an address. Raises LoraServerError where ours cannot start."""
    found = configured(engine.additional_config, os.environ)
    if found is None:
        return original(engine, *args, **kwargs)
    install()
    from client_connector.vllm.hooks.frontend import check_parallel, configure

    require_server(found)
    configure(engine, found)
    vllm_config = original(engine, *args, **kwargs)
    check_parallel(vllm_config)
    return vllm_config


def install() -> None:
    """Wrap everything; raises ConfigError for a vLLM that is not supported. Idempotent."""
    import vllm

    SUPPORTED.check_version(vllm.__version__)
    os.environ[ACTIVE] = "1"  # for the processes that an engine starts
    if _installed():
        return
    SUPPORTED.check(vllm.__version__, CONTRACT)
    join_vllms()
    from client_connector.vllm.hooks import engine, frontend, moe, worker

    for part in (frontend, engine, worker, moe):
        part.install(wrap)


def _installed() -> bool:
    from vllm.v1.core.sched.scheduler import Scheduler

    return is_wrapped(Scheduler.schedule)
