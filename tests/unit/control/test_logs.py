"""Log lines: repeats that a client could cause are counted, and each line is one write."""

import json
import socket
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_server.logs import Repeats
from tests.support.serving import HANG_SECONDS


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 4)), max_size=200))
def test_every_line_is_written_or_counted(calls):
    now, lines, written = [0.0], [], {}
    repeats = Repeats(lambda event, **fields: lines.append((event, fields)), 10.0, lambda: now[0])
    for key, pause in calls:
        now[0] += pause
        repeats(key, f"event-{key}", number=now[0])
    now[0] += 100
    repeats.flush()
    for event, fields in lines:
        name = event.removesuffix(" (again)")
        written[name] = written.get(name, 0) + fields.get("times", 1)
    asked = {}
    for key, _ in calls:
        asked[f"event-{key}"] = asked.get(f"event-{key}", 0) + 1
    assert written == asked
    assert len(lines) <= 4 * (2 + now[0] / 10.0)


def test_a_traceback_is_written_and_not_kept():
    lines = []
    repeats = Repeats(lambda event, **fields: lines.append((event, fields)), 10.0, lambda: 0.0)
    repeats("key", "failed", exc_info=ValueError("one"))
    repeats("key", "failed", exc_info=ValueError("two"))
    assert "exc_info" in lines[0][1] and not any("exc_info" in one.fields for one in repeats._muted.values())


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
