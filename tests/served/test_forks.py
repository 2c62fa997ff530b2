"""Forked processes: whose children they are, how their end is known, what becomes of them."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import psutil
import pytest
from structlog.testing import capture_logs

from lora_server.config import ProcessConfig
from lora_server.daemon import processes
from lora_server.daemon.forks import ForkServer
from lora_server.daemon.processes import Child
from lora_server.demo import children
from lora_server.errors import ServerUnavailableError
from lora_server.timings import Timings
from tests.support.forked_child import Who
from tests.support.processes import ROOT
from tests.support.serving import HANG_SECONDS, all_gone, until

CHILD = "tests.support.forked_child"


@pytest.fixture
def server(request):
    """One that has nothing of the pytest process: it starts as a fresh interpreter."""
    made = ForkServer([CHILD], fork_seconds=getattr(request, "param", Timings.fork))
    with capture_logs():
        yield made
    made.close()


@pytest.fixture
def started():
    """Children, ended with the test."""
    kept = []
    yield kept
    for one in kept:
        one.kill()
        one.wait(HANG_SECONDS)
        one.stdin.close()
        one.stdout.close()


@pytest.fixture
def start(server, started):
    def run():
        started.append(server.start(CHILD))
        return started[-1]

    return run


def ask(child) -> Who:
    child.stdin.write(b"{}\n")
    child.stdin.flush()
    return msgspec.json.decode(child.stdout.readline(), type=Who)


def tell(child, code):
    child.stdin.write(str(code).encode())
    child.stdin.close()


def test_a_child_is_this_processs_own(start):
    killed, child = start(), start()
    ask(killed)
    killed.terminate()
    assert killed.wait(HANG_SECONDS) == -signal.SIGTERM, "who was killed is known by the signal"
    who = ask(child)
    assert (who.pid, who.parent, who.group) == (child.pid, os.getpid(), child.pid)
    assert child.poll() is None
    with pytest.raises(TimeoutError, match=f"process {child.pid} did not end within 0 s"):
        child.wait(0)
    tell(child, 7)
    assert (child.wait(HANG_SECONDS), child.poll(), child.returncode) == (7, 7, 7)
    child.kill()  # whoever has its number now is not meant


def test_many_threads_have_many_children(start):
    with ThreadPoolExecutor(8) as pool:
        children = list(pool.map(lambda _: start(), range(24)))
    family = [ask(child) for child in children]
    assert [who.pid for who in family] == [child.pid for child in children]
    assert len({who.dice for who in family}) == 24, "each has random numbers of its own"
    with ThreadPoolExecutor(8) as pool:
        for code, child in enumerate(children):
            tell(child, code)
        assert list(pool.map(lambda child: child.wait(HANG_SECONDS), children)) == list(range(24))


def test_children_outlive_their_server_and_another_comes(server, start):
    first = start()
    server._server.kill()
    server._server.wait(HANG_SECONDS)
    second = start()
    assert [ask(one).parent for one in (first, second)] == [os.getpid()] * 2
    tell(first, 3)
    assert first.wait(HANG_SECONDS) == 3, "its parent knows how it ended"


@pytest.mark.parametrize("server", [2.0], indirect=True)
def test_a_server_that_is_stuck_is_replaced(server, start):
    start()
    stuck = psutil.Process(server._server.pid)
    stuck.suspend()
    with pytest.raises(ServerUnavailableError, match=f"{CHILD} was not forked .timed out."):
        start()
    all_gone([stuck])
    assert ask(start()).parent == os.getpid()


def test_a_server_goes_with_its_node_and_starts_no_more(server, start):
    child, waits = start(), start()
    gone = psutil.Process(server._server.pid)
    server.close()
    all_gone([gone])
    with pytest.raises(ServerUnavailableError, match="closed"):
        server.start(CHILD)
    assert ask(child).pid == child.pid
    waits.stdin.close()
    assert waits.wait(HANG_SECONDS) == 0, "one that waits for its node ends with it"


def test_who_is_killed_comes_back(server):
    config = ProcessConfig.model_construct(threads=1)
    child = Child("a child", CHILD, server, config, pytest.fail, threading.Event())
    child.start()
    try:
        until(lambda: child._current.process, "a child")
        first = child._current.process.pid
        os.kill(first, signal.SIGKILL)
        until(lambda: child._current.process.pid != first and child._current.process.poll() is None, "its successor")
        assert child.restarts == 1
    finally:
        processes.stop([child])


def test_a_child_that_cannot_be_forked_is_tried_again(server):
    tried = []

    class Broken(ForkServer):
        def start(self, module):
            tried.append(module)
            raise ServerUnavailableError("no process is left")

    failed = threading.Event()
    config = ProcessConfig.model_construct(threads=1, timings=Timings(restart_pause=0.0))
    child = Child("a child", CHILD, Broken([]), config, lambda reason: failed.set(), threading.Event())
    child.start()
    assert failed.wait(HANG_SECONDS) and tried == [CHILD] * processes.MAX_FAILED_STARTS
    processes.stop([child])


def fork_off(before):
    """What a fresh process says that has its server forked off, after it did something."""
    code = f"import threading\nfrom lora_server.daemon import forks\n{before}\nforks.ForkServer([]).fork_off()"
    how = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": HANG_SECONDS, "check": False}
    return subprocess.run([sys.executable, "-c", code], **how)


def test_threads_before_the_fork_are_named_and_a_device_that_an_import_opened_is_refused():
    assert "threads run" not in fork_off("").stdout
    said = fork_off("threading.Thread(target=threading.Event().wait, daemon=True).start()")
    assert "threads run before the fork" in said.stdout and said.returncode == 0
    said = fork_off("forks.GPUS = '/dev/zero'\nopened = open('/dev/zero')")
    assert said.returncode == 1
    assert "ConfigError: a GPU is in use before a shard starts: got /dev/zero" in said.stderr


def test_one_without_stdin_has_its_pipes(started):
    """Descriptors 0 and 1 are free in it: none of the pipes may land there."""
    code = f"""
import os
os.close(0), os.close(1)
from lora_server.daemon.forks import ForkServer
server = ForkServer([{CHILD!r}])
server.fork_off()
child = server.start({CHILD!r})
child.stdin.write(b"{{}}\\n"), child.stdin.flush()
said = child.stdout.readline()
child.stdin.write(b"5"), child.stdin.close()
os.write(2, said + str(child.wait(60)).encode())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=HANG_SECONDS, check=True)
    who, code = done.stderr.splitlines()
    assert msgspec.json.decode(who, type=Who).parent and code == b"5"


def run(how, *command):
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = how([sys.executable, "-m", *command], **pipes)
    said, errors = process.communicate(timeout=HANG_SECONDS)
    return type(process).__name__, (process.returncode, said, errors)


@pytest.mark.parametrize("arguments", [("--help",), ("serve",), ("nonsense",), ("status", "--server", "127.0.0.1:1")])
def test_a_forked_command_says_what_a_fresh_one_says(arguments):
    def fresh(command, **how):
        return subprocess.Popen(children.own(command), **how)

    command = ("lora_server", *arguments)
    kind, forked = run(children.start, *command)
    assert (kind, forked) == ("ForkedPopen", run(fresh, *command)[1])
