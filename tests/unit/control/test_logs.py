"""Lines that others can cause at will: the first at once, the rest counted, none lost from the count."""

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


def test_a_call_is_named_in_its_lines_in_either_form():
    code = """
import structlog
from lora_server import logs
log = structlog.get_logger()
with structlog.contextvars.bound_contextvars(request="r-1"):
    logs.bind_tenant("acme")
    for form in ("json", "console"):
        logs.configure(form=form)
        log.info("asked", same=logs.request_id() == "r-1")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True, timeout=HANG_SECONDS
    )
    line, for_people = done.stderr.splitlines()
    assert {"request": "r-1", "tenant": "acme", "event": "asked", "same": True}.items() <= json.loads(line).items()
    assert "request=r-1" in for_people and "tenant=acme" in for_people and "\x1b" not in for_people


def test_a_line_is_one_write_so_that_processes_do_not_mix_theirs():
    """A datagram socket shows what each write holds."""
    code = """
import structlog
from lora_server import logs
logs.configure()
log = structlog.get_logger()
log.info("short")
log.error("long", text="x" * 3000)
try:
    1 / 0
except ZeroDivisionError:
    log.exception("with a traceback")
"""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        subprocess.run([sys.executable, "-c", code], stderr=theirs, check=True, timeout=HANG_SECONDS)
        writes = [ours.recv(1 << 16, socket.MSG_DONTWAIT) for _ in range(3)]
        with pytest.raises(BlockingIOError):
            ours.recv(1, socket.MSG_DONTWAIT)
    assert [json.loads(write)["event"] for write in writes] == ["short", "long", "with a traceback"]
    assert all(write.count(b"\n") == 1 and write.endswith(b"\n") for write in writes)
