"""What a demo, a test, a bench or a node has started and made goes with it, however it ends."""

import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lora_server.daemon import run_directory as module
from lora_server.daemon.run_directory import LOCK, PREFIX, hold, leave, remove_stale, run_directory
from lora_server.demo import children
from tests.support import processes
from tests.support.processes import end
from tests.support.serving import HANG_SECONDS, all_gone, descendants, keepers, name_of, until

STUBBORN = """
import signal, subprocess, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
"""
GRANDCHILD = f"{STUBBORN}\nprint('up', flush=True)\nsignal.pause()"
CHILD = f"""{STUBBORN}
subprocess.Popen([sys.executable, "-c", {GRANDCHILD!r}])
signal.pause()
"""
PARENT = f"""
import subprocess, sys
from lora_server.demo import children
subprocess.Popen(children.own([sys.executable, "-c", {CHILD!r}]))
sys.stdin.read()
"""


def start(*command, **options):
    return subprocess.Popen(children.own([sys.executable, *command]), stdout=subprocess.PIPE, text=True, **options)


def shards(parent):
    return [one for one in descendants(parent) if name_of(one).startswith("lora-shard-")]


def test_the_command_is_the_child():
    ask = "import os, sys, psutil; print(os.getpid(), os.getpgrp(), len(psutil.Process().children())); sys.exit(7)"
    child = start("-c", ask)
    answer, _ = child.communicate(timeout=HANG_SECONDS)
    assert (answer, child.returncode) == (f"{child.pid} {child.pid} 0\n", 7)
    until(lambda: not keepers(os.getpid()), "no keeper stays without its command", HANG_SECONDS)


def test_it_outlives_the_thread_that_started_it():
    with ThreadPoolExecutor(1) as pool:
        child = pool.submit(start, "-c", "print(input())", stdin=subprocess.PIPE).result(HANG_SECONDS)
    assert child.communicate("alive\n", timeout=HANG_SECONDS)[0] == "alive\n"


def test_nothing_starts_for_a_parent_that_has_ended():
    command = children.own([sys.executable, "-c", "print('up')"])
    command[4] = "1"
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "its parent ended before it began\n")


def test_stubborn_children_end_with_their_parent():
    parent = start("-c", PARENT, stdin=subprocess.PIPE)
    assert parent.stdout.readline() == "up\n"
    family = [*descendants(parent.pid), *keepers(parent.pid)]
    assert len(family) == 3
    end(parent)
    all_gone(family)


def test_what_a_killed_child_leaves_ends_too():
    child = start("-c", CHILD)
    assert child.stdout.readline() == "up\n"
    family = descendants(child.pid)
    child.kill()
    all_gone(family)
    end(child)


def test_a_shard_that_is_stuck_ends_without_its_parent():
    """The watching thread alone, for a shard whose loop does not hear that it shall stop."""
    stuck = "from types import SimpleNamespace as Stuck\nfrom lora_server.daemon import child_main\n"
    stuck += "child_main._watch_parent(Stuck(stop=lambda: print('asked to stop', flush=True)), 0.1)"
    child = start("-c", stuck, stdin=subprocess.PIPE)
    said, _ = child.communicate(timeout=HANG_SECONDS)
    assert (child.returncode, said) == (1, "asked to stop\n")


@pytest.mark.long
@pytest.mark.parametrize("ends", ["killed", "asked to end"])
def test_nothing_is_left_of_a_demo(ends):
    """Not even of children that are stopped, where it is killed; nor of its directories, where it is asked to end."""
    with tempfile.TemporaryDirectory() as scratch:  # pytest's own is too long for a socket
        environment = os.environ | {"TMPDIR": scratch}
        demo = start("-m", "lora_server", "demo", "--layout", "ep2-pp1", stderr=subprocess.PIPE, env=environment)
        try:
            until(lambda: demo.poll() is not None or len(shards(demo.pid)) == 2, "it has its shards", HANG_SECONDS)
            assert demo.poll() is None, demo.stderr.read()
            family = [*descendants(demo.pid), *keepers(demo.pid)]
            assert len(family) >= 6, "a server, its fork server and controller, two shards, a keeper"
            assert list(Path(scratch).glob("lora-*")), "its own, and its server's"
            if ends == "killed":
                for process in descendants(demo.pid):
                    process.suspend()
                demo.kill()
            else:
                demo.terminate()
                _, errors = demo.communicate(timeout=HANG_SECONDS)
                assert (demo.returncode, "Traceback" in errors) == (128 + signal.SIGTERM, False), errors
            all_gone(family)
            assert ends == "killed" or not list(Path(scratch).glob("lora-*"))
        finally:
            end(demo)


NODE = """
import signal, sys
from pathlib import Path
from lora_server.daemon.run_directory import run_directory
with run_directory(Path(sys.argv[1])) as directory:
    (directory / "shard-0.sock").touch()
    print(directory, flush=True)
    signal.pause()
"""
SHARD = """
import signal, sys
from pathlib import Path
from lora_server.daemon.run_directory import hold
held = hold(Path(sys.argv[1]))
print("held", flush=True)
signal.pause()
"""


@pytest.fixture
def short():
    """A data directory whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory)


def test_the_directory_of_a_killed_node_and_its_shards_is_removed_at_the_next_start(short):
    node = processes.start(NODE, short)
    directory = Path(processes.line_of(node))
    shard = processes.start(SHARD, directory)
    assert processes.line_of(shard) == "held"
    end(node)
    with run_directory(short) as other:
        assert directory.is_dir() and other.is_dir(), "a shard lives in it"
    end(shard)
    with run_directory(short) as other:
        assert not directory.exists() and [*short.iterdir()] == [other]
    assert not other.exists()


def test_the_last_shard_of_a_killed_node_removes_it(short):
    directory, node = module._made(short)
    first, second = hold(directory), hold(directory)
    module.os.close(node)
    leave(directory, first)
    assert directory.is_dir(), "the other one is there"
    module.os.close(first)
    leave(directory, second)
    assert not directory.exists()
    module.os.close(second)


def test_directories_of_others_are_left_alone(short):
    (short / f"{PREFIX}old").mkdir()  # of a version without the lock
    mine = short / f"{PREFIX}mine"
    mine.mkdir()
    (mine / LOCK).write_text("another-host")
    (short / "kept" / "x").mkdir(parents=True)
    (short / "kept" / LOCK).write_text(module.socket.gethostname())
    (short / f"{PREFIX}link").symlink_to(short / "kept")
    remove_stale(short)
    assert {one.name for one in short.iterdir()} == {f"{PREFIX}old", f"{PREFIX}mine", f"{PREFIX}link", "kept"}
