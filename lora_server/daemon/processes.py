"""Shard processes of one node: started fresh (never forked), watched, restarted, stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import msgspec
import structlog

from lora_server.daemon.shard_main import EXIT_NO_CONTROLLER, EXIT_REFUSED, ShardSettings
from lora_server.placement import Layout

STOP_SECONDS = 5.0
CRASH_SECONDS = 5.0
MAX_CRASHES = 5
log = structlog.get_logger()


class ShardProcesses:
    """`on_fatal(reason)` is called, once, when a shard cannot be kept alive."""

    def __init__(self, settings: list[ShardSettings], on_fatal: Callable[[str], None]) -> None:
        self._on_fatal = on_fatal
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._threads = [
            threading.Thread(target=self._keep_alive, args=(one,), name=f"shard-{one.shard}", daemon=True)
            for one in settings
        ]
        for thread in self._threads:
            thread.start()

    def _keep_alive(self, settings: ShardSettings) -> None:
        crashes = 0
        while not self._stopping.is_set():
            started = time.monotonic()
            code = self._run_once(settings)
            if self._stopping.is_set():
                return
            crashes = crashes + 1 if time.monotonic() - started < CRASH_SECONDS else 1
            where = _name(settings)
            log.error(f"{where} died: {_reason(code)}; restarting it", shard=settings.shard)
            if code == EXIT_REFUSED or (code == EXIT_NO_CONTROLLER and settings.node):
                why = (
                    "cannot start, or was refused" if code == EXIT_REFUSED else "lost, or cannot reach, the controller"
                )
                self._on_fatal(f"{where} {why} (controller {settings.controller}); see the log above")
                return
            if crashes >= MAX_CRASHES:
                self._on_fatal(f"{where} died {crashes} times within {CRASH_SECONDS:g} s of its start")
                return

    def _run_once(self, settings: ShardSettings) -> int:
        environment = os.environ | {"OMP_NUM_THREADS": str(settings.threads), "MKL_NUM_THREADS": str(settings.threads)}
        command = [sys.executable, "-m", "lora_server.daemon.shard_main"]
        with self._lock:
            if self._stopping.is_set():
                return 0
            # a group of its own: Ctrl-C goes to the parent, which stops its shards in order
            process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, process_group=0)
            self._running[settings.shard] = process
        assert process.stdin is not None
        try:
            process.stdin.write(msgspec.json.encode(settings) + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            log.debug("shard died before it read its settings", shard=settings.shard)
        return process.wait()

    def close(self) -> None:
        """Stop all: SIGTERM, then SIGKILL what is left after STOP_SECONDS."""
        with self._lock:
            self._stopping.set()
            running = list(self._running.values())
        for process in running:
            process.terminate()
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
        deadline = time.monotonic() + STOP_SECONDS
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.warning("shard did not stop in time; killing it", pid=process.pid)
                process.kill()
                process.wait()
        for thread in self._threads:
            thread.join()


def _name(settings: ShardSettings) -> str:
    layout = Layout.parse(settings.layout)
    return f"shard {settings.shard} (stage {layout.stage(settings.shard)}, ep_rank {layout.ep_rank(settings.shard)})"


def _reason(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
