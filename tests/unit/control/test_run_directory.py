"""What a node that was killed altogether leaves is removed by the next one that starts, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lora_server.daemon import run_directory as module
from lora_server.daemon.run_directory import LOCK, PREFIX, hold, leave, remove_stale, run_directory

NODE = """
import sys
from pathlib import Path
from lora_server.daemon.run_directory import hold, run_directory
if sys.argv[1] == "node":
    with run_directory(Path(sys.argv[2])) as directory:
        (directory / "shard-0.sock").touch()
        print(directory, flush=True)
        sys.stdin.read()
else:
    held = hold(Path(sys.argv[2]))
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def start():
    processes = []

    def start(what, path):
        process = subprocess.Popen(
            [sys.executable, "-c", NODE, what, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        return process, process.stdout.readline().strip()

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def kill(process):
    process.kill()
    process.wait(30)


@pytest.fixture
def short():
    """A data directory whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory)


def test_what_was_killed_altogether_is_removed_at_the_next_start(start, short):
    node, said = start("node", short)
    directory = Path(said)
    shard, _ = start("shard", directory)
    kill(node)
    with run_directory(short) as other:
        assert directory.is_dir() and other.is_dir(), "a shard lives in it"
    kill(shard)
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


def test_what_may_be_somebodys_is_left_alone(short):
    (short / f"{PREFIX}old").mkdir()  # of a version without the lock
    mine = short / f"{PREFIX}mine"
    mine.mkdir()
    (mine / LOCK).write_text("another-host")
    (short / "kept" / "x").mkdir(parents=True)
    (short / "kept" / LOCK).write_text(module.socket.gethostname())
    (short / f"{PREFIX}link").symlink_to(short / "kept")
    remove_stale(short)
    assert {one.name for one in short.iterdir()} == {f"{PREFIX}old", f"{PREFIX}mine", f"{PREFIX}link", "kept"}
