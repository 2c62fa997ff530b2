"""Patching SGLang: all that is wrapped, once per process."""

from __future__ import annotations

import sglang
from sglang.srt.managers.scheduler import Scheduler

from client_connector.serving.wrapping import is_wrapped, wrap
from client_connector.sglang.contract import CONTRACT, SUPPORTED
from client_connector.sglang.hooks import arguments, experts, frontend, scheduler, worker


def install() -> None:
    """Wrap everything; raises ConfigError for an SGLang that is not supported. Idempotent."""
    if is_wrapped(Scheduler.run_batch):
        return
    SUPPORTED.check_version(sglang.__version__)
    SUPPORTED.check(sglang.__version__, CONTRACT)
    for part in (arguments, frontend, scheduler, worker, experts):
        part.install(wrap)
