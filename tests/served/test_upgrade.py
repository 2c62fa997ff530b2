"""Another version without downtime, by the recipe of docs/operations.md: a second server, to which engines move."""

import subprocess

import pytest

from lora_server.demo.launch import running_server
from tests.support.doc_commands import blocks
from tests.support.fleet import Fleet, now
from tests.support.serving import ANYWHERE, HANG_SECONDS, ask, listed, status, stop, until

OWNED = "tests/served/test_registry_served.py"  # which runs the same blocks of the page


def known(address):
    """(version, handle, pinned) by name."""
    return {name: (one.version, one.handle, one.pinned) for name, one in listed(address).items()}


@pytest.mark.long
def test_engines_move_to_a_second_server_and_no_request_fails(load, tmp_path):
    """With what the first was told by name, from a backup in another directory; in another layout."""
    backup, _ = (one for one in blocks("docs/operations.md") if one.why == OWNED)
    common = ["--base-model", str(load.base), *ANYWHERE]
    for folder in ("old", "new"):
        (tmp_path / folder).mkdir()
    first = [*common, "--layout", "ep2-pp1", "--data-dir", str(tmp_path / "data")]
    second = [*common, "--layout", "ep1-pp2", "--data-dir", str(tmp_path / "backup")]
    with running_server(tmp_path / "old/log", first) as old:
        for name, path in load.paths.items():
            ask(old.address, "Add", name=name, uri=str(path), wait_seconds=HANG_SECONDS)
        ask(old.address, "Pin", name="qv", wait_seconds=HANG_SECONDS)
        with Fleet(load, old.address, tmp_path / "old", ("shm", "tcp")) as leaving:
            for command in backup.commands:
                subprocess.run(command, shell=True, cwd=tmp_path, check=True, timeout=HANG_SECONDS)
            with (
                running_server(tmp_path / "new/log", second) as new,
                Fleet(load, new.address, tmp_path / "new", ("shm", "tcp")) as arriving,
            ):
                assert known(new.address) == known(old.address) and len(known(new.address)) == len(load.paths)
                leaving.all_right_again(now())  # both serve, and a router may send to either
                for engine in leaving.engines:
                    engine.finish()
                until(lambda: not status(old.address).clients, "its engines left")
                assert stop(old) == 0
                arriving.all_right_again(now())
                assert set(leaving.outcomes()) == set(arriving.check()) == {"right"}
