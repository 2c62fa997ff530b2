"""Run directories: the next start removes what a killed node left, and nothing else."""

import tempfile
from pathlib import Path

import pytest

from lora_server.daemon import run_directory as module
from lora_server.daemon.run_directory import LOCK, PREFIX, hold, leave, remove_stale, run_directory
from tests.support.processes import end, line_of, start

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
    node = start(NODE, short)
    directory = Path(line_of(node))
    shard = start(SHARD, directory)
    assert line_of(shard) == "held"
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
