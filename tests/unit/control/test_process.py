"""What a process does with its log lines, signals and freed memory."""

import json
import signal
import socket
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_server.logs import Repeats
from tests.support.processes import python
from tests.support.serving import HANG_SECONDS


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 4)), max_size=200))
def test_every_line_is_written_or_counted(calls):
    now, lines, written = [0.0], [], Counter()
    repeats = Repeats(lambda event, **fields: lines.append((event, fields)), 10.0, lambda: now[0])
    for key, pause in calls:
        now[0] += pause
        repeats(key, f"event-{key}", number=now[0])
    now[0] += 100
    repeats.flush()
    for event, fields in lines:
        written[event.removesuffix(" (again)")] += fields.get("times", 1)
    assert written == Counter(f"event-{key}" for key, _ in calls)
    assert len(lines) <= 4 * (2 + now[0] / 10.0)


def test_a_traceback_is_written_and_not_kept():
    lines = []
    repeats = Repeats(lambda event, **fields: lines.append((event, fields)), 10.0, lambda: 0.0)
    repeats("key", "failed", exc_info=ValueError("one"))
    repeats("key", "failed", exc_info=ValueError("two"))
    assert "exc_info" in lines[0][1] and not any("exc_info" in one.fields for one in repeats._muted.values())


HANGS = """
import sys, threading
from lora_server.daemon.watchdog import LoopWatchdog
turns, begins = int(sys.argv[1]), threading.Event()
watchdog, stopping = LoopWatchdog(0.2), threading.Event()
threading.Thread(target=watchdog.run, args=(stopping,), daemon=True).start()
def hangs_here():
    stopped = watchdog.counting(stopping.is_set)
    for _ in range(turns):
        stopped()
    begins.wait(1 if not turns else None)
hangs_here()
"""


@pytest.mark.parametrize(("turns", "code"), [(0, 0), (3, 1)], ids=["before its first turn", "after it"])
def test_a_loop_that_hangs_ends_its_process_and_says_where(turns, code):
    ended = python("-c", HANGS, str(turns))
    assert ended.returncode == code, ended.stderr
    assert ("in hangs_here" in ended.stderr) == bool(code)
    assert ("the loop hangs" in ended.stdout + ended.stderr) == bool(code)


LOGS = """
import structlog
from lora_server import logs
logs.configure()
log = structlog.get_logger()
with structlog.contextvars.bound_contextvars(request="r-1"):
    logs.bind_tenant("acme")
    log.info("short", same=logs.request_id() == "r-1")
    log.error("long", text="x" * 3000)
    try:
        1 / 0
    except ZeroDivisionError:
        log.exception("with a traceback")
    logs.configure(form="console")
    log.info("for people")
"""


def test_a_line_names_its_call_and_is_one_write():
    """So that processes do not mix their lines; a datagram socket shows what each write holds."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        subprocess.run([sys.executable, "-c", LOGS], stderr=theirs, check=True, timeout=HANG_SECONDS)
        *writes, for_people = [ours.recv(1 << 16, socket.MSG_DONTWAIT) for _ in range(4)]
        with pytest.raises(BlockingIOError):
            ours.recv(1, socket.MSG_DONTWAIT)
    lines = [json.loads(write) for write in writes]
    assert [line["event"] for line in lines] == ["short", "long", "with a traceback"] and lines[0]["same"]
    assert all((line["request"], line["tenant"]) == ("r-1", "acme") for line in lines)
    assert all(write.count(b"\n") == 1 and write.endswith(b"\n") for write in (*writes, for_people))
    assert b"request=r-1" in for_people and b"tenant=acme" in for_people and b"\x1b" not in for_people


WAITS = """
import signal, sys, threading
from lora_server.daemon.signals import on_signals
stop = threading.Event()
on_signals((signal.SIGTERM,), stop.set)
print("up", flush=True)
for _ in range(int(sys.argv[1])):
    while not stop.wait(1e-6):
        pass
    stop.clear()
    print("asked", flush=True)
"""
TIMES = 3000


def test_a_signal_in_the_middle_of_a_wait_is_heard():
    """Handlers that set the event themselves hang here after some hundred signals."""
    command = [sys.executable, "-c", WAITS, str(TIMES)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "up\n"
            for _ in range(TIMES):
                process.send_signal(signal.SIGTERM)
                assert process.stdout.readline() == "asked\n"
            assert process.wait(HANG_SECONDS) == 0
        finally:
            process.kill()


KEPT = """
import psutil
from lora_server.daemon.heap import give_back_large
if {give_back}:
    give_back_large()
memory = psutil.Process().memory_info
bytearray(30 << 20)  # as large as glibc learns to keep
before, small = memory().rss, []
large = [(bytearray(b"x") * (4 << 20), small.append(bytearray(20_000))) for _ in range(16)]
del large
print(memory().rss - before >> 20)
"""


@pytest.mark.parametrize("give_back", [False, True])
def test_large_buffers_are_given_back(give_back):
    """MB that are kept of 64 with something small between them; without the call most are, else it shows nothing."""
    kept = int(python("-c", KEPT.format(give_back=give_back)).stdout)
    assert kept < 10 if give_back else kept > 30
