"""Patching SGLang: what is wrapped, once per process."""

from __future__ import annotations

import multiprocessing

import sglang
from sglang.srt.managers.scheduler import Scheduler

from client_connector.serving.wrapping import is_wrapped, wrap
from client_connector.sglang.contract import CONTRACT, SUPPORTED
from client_connector.sglang.hooks import experts, scheduler, worker


def install() -> None:
    """Wrap everything; raises ConfigError for an SGLang that is not supported. Idempotent."""
    if is_wrapped(Scheduler.run_batch):
        return
    SUPPORTED.check_version(sglang.__version__)
    SUPPORTED.check(sglang.__version__, CONTRACT)
    for part in (scheduler, worker, experts):
        part.install(wrap)
    if multiprocessing.parent_process() is None:  # the processes that SGLang starts have no front end
        from client_connector.sglang.hooks import arguments, frontend

        arguments.install(wrap)
        frontend.install(wrap)
