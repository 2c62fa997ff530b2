"""What tests.support.forked forks is what would have been started: its words, its exit code, its group, and its end."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from lora_server.demo import children
from tests.support.processes import end, line_of, start
from tests.support.serving import HANG_SECONDS, all_gone, descendants, until

pytestmark = pytest.mark.usefixtures("forked")
PARENT = """
import subprocess, sys
from lora_server.demo import children
from tests.support.forked import ForkedPopen, Forks
with Forks().instead_of(children):
    command = [sys.executable, "-m", "lora_server", "status", "--watch", "--json", "--server", "127.0.0.1:1"]
    child = children.start(command, stdout=subprocess.PIPE)
    assert isinstance(child, ForkedPopen), child
    assert child.stdout.readline()
    print(child.pid, flush=True)
    sys.stdin.read()
"""


def run(how, *command):
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = how([sys.executable, "-m", *command], **pipes)
    said, errors = process.communicate(timeout=HANG_SECONDS)
    return type(process).__name__, (process.returncode, said, errors)


@pytest.mark.parametrize("arguments", [("--help",), ("serve",), ("nonsense",), ("status", "--server", "127.0.0.1:1")])
def test_it_says_what_a_fresh_one_says(arguments):
    def fresh(command, **how):
        return subprocess.Popen(children.own(command), **how)

    command = ("lora_server", *arguments)
    kind, forked = run(children.start, *command)
    assert (kind, forked) == ("ForkedPopen", run(fresh, *command)[1])


def test_it_is_a_child_in_a_group_of_its_own_with_its_environment(monkeypatch):
    """An engine waits for its job on stdin; without one it ends as a fresh one does."""
    monkeypatch.setenv("LORA_SERVER_OF_THIS_TEST", "1")
    command = [sys.executable, "-m", "lora_server.demo.engine"]
    with children.start(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        it = psutil.Process(child.pid)
        until(lambda: it.name().startswith("python"), "it is no fork server any more")
        assert (it.ppid(), os.getpgid(child.pid)) == (os.getpid(), child.pid)
        errors = child.communicate(timeout=HANG_SECONDS)[1]
    assert child.returncode == 1 and b"msgspec.DecodeError: Input data was truncated" in errors
    with children.start(command, stdin=subprocess.PIPE) as child:
        child.terminate()
    assert child.returncode == -signal.SIGTERM


@pytest.mark.parametrize("name", ["PYTHONPATH", "HF_HOME"])
def test_an_environment_that_imports_may_read_starts_afresh(monkeypatch, name):
    monkeypatch.setenv(name, "/elsewhere:" + os.environ.get(name, ""))
    kind, (code, *_) = run(children.start, "lora_server", "--version")
    assert (kind, code) == ("Popen", 0)


def test_nothing_is_left_of_a_parent_that_is_killed():
    """Neither of its fork server nor of what that forked, a command that goes on for ever."""
    parent = start(PARENT)
    try:
        child = int(line_of(parent, HANG_SECONDS))
        family = descendants(parent.pid)
        assert child in [one.pid for one in family] and len(family) == 2, "and a fork server"
    finally:
        end(parent)
    all_gone(family)
