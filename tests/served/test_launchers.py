"""Nodes that torchrun and ssh start, by the commands of deploy/README.md, on addresses of this machine."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lora_server.demo import children
from lora_server.demo.launch import free_ports
from tests.support.doc_commands import blocks
from tests.support.serving import HANG_SECONDS, complete, serves, shard_pids, until
from tests.support.sources import ROOT

pytestmark = pytest.mark.long
PAGE = "deploy/README.md"
BIN = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
HERE = {"10.0.0.1": "127.0.0.21", "10.0.0.2": "127.0.0.22"}  # the page's hosts, at addresses of this machine


def commands(word):
    """The commands of the page's block that has a word, on this machine's addresses."""
    (block,) = (one for one in blocks(PAGE) if word in one.text)
    found = block.commands
    for theirs, ours in HERE.items():
        found = [one.replace(theirs, ours) for one in found]
    return found


@pytest.fixture
def typed(load, tmp_path):
    """Types commands in a folder with the page's names, each as on a host of its own. They end with the test."""
    running = []
    (tmp_path / "Mixtral-8x7B").symlink_to(load.base)
    (tmp_path / "adapters").symlink_to(load.adapters)
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")

    def type_in(command, **more):
        with (tmp_path / f"log{len(running)}").open("wb") as log:
            own = os.environ | {"PATH": BIN} | more
            how = {"cwd": tmp_path, "env": own, "stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            running.append(subprocess.Popen(children.own(["bash", "-c", f"exec {command}"]), **how))
        return running[-1]

    yield type_in
    for one in reversed(running):
        children.stop(one, HANG_SECONDS)


def served(address, load, nodes):
    until(lambda: complete(address), "it serves")
    assert {shard.node for shard in complete(address).shards} == set(range(nodes))
    assert serves(address, load, "qv")


def test_torchrun_starts_the_nodes(typed, load):
    port, master = free_ports(), free_ports()
    for command in commands("torchrun --"):
        typed(command, PORT=str(port), PET_MASTER_PORT=str(master), LORA_SERVER_HTTP="127.0.0.1:0")
    served(f"{HERE['10.0.0.1']}:{port}", load, 2)


@pytest.fixture
def ssh(tmp_path):
    """Run an sshd at every address of this machine; returns the ssh that may log in."""
    server = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if server is None:
        pytest.skip("sshd is not here: make launchers")
    folder, port = tmp_path / "ssh", free_ports()
    folder.mkdir(0o700)
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    own = " ".join(f'"{name}={value}"' for name, value in _for_the_far_side().items())
    options = {
        "Port": port, "ListenAddress": "0.0.0.0", "HostKey": folder / "host", "PidFile": "none", "StrictModes": "no",
        "AuthorizedKeysFile": folder / "user.pub", "UsePAM": "no", "PasswordAuthentication": "no", "SetEnv": own,
    }  # fmt: skip
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd's, for a process without rights
    (folder / "config").write_text("".join(f"{name} {value}\n" for name, value in options.items()))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(children.own([server, "-D", "-e", "-f", str(folder / "config")]), stderr=log)
    until(lambda: listens(port), "sshd listens")
    yield (
        f"ssh -F none -p {port} -i {folder / 'user'} -o BatchMode=yes -o StrictHostKeyChecking=accept-new "
        f"-o UserKnownHostsFile={folder / 'known'}"
    )
    children.stop(process, HANG_SECONDS)


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _for_the_far_side():
    kept = ("PYTHONPATH", "OMP_NUM_THREADS")
    return {"PATH": BIN} | {name: os.environ[name] for name in kept if name in os.environ}


def test_a_node_that_ends_ends_the_script(typed, ssh):
    (command,) = commands("deploy/ssh/serve.sh")
    assert typed(f"{command} --layout none", PORT=str(free_ports(2)), SSH=ssh).wait(HANG_SECONDS) == 2


def test_ssh_starts_the_nodes_and_stops_them_with_the_script(typed, ssh, load, tmp_path):
    port = free_ports(2)
    (command,) = commands("deploy/ssh/serve.sh")
    script = typed(command, PORT=str(port), SSH=ssh)
    address = f"{HERE['10.0.0.1']}:{port}"
    served(address, load, 2)
    pids = shard_pids(address)
    script.terminate()
    script.wait(HANG_SECONDS)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the nodes have stopped")
