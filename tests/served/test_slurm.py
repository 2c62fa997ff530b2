"""The Slurm script, run by bash with stand-ins of srun and scontrol: its tasks are two nodes on this host, and serve.

Slurm itself is not here: that it starts the tasks, gives them these variables and ends them stays unproven.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from client_connector.transformers import attach
from lora_server.demo import children
from lora_server.demo.launch import free_ports
from tests.support.serving import HANG_SECONDS, all_gone, answers, complete, descendants, flags, until
from tests.support.sources import ROOT

SCRIPT = ROOT / "deploy/slurm/serve.sbatch"
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for rank in 0 1; do SLURM_PROCID=$rank SLURMD_NODENAME=node$rank "$@" & done
wait
"""
SCONTROL = """#!/bin/bash
case "$*" in
"show hostnames node[0-1]") printf 'node0\\nnode1\\n' ;;
"--oneliner show node node0") echo "NodeName=node0 Arch=x86_64 NodeAddr=127.0.0.1 NodeHostName=node0 Port=0" ;;
"--oneliner show node node1") echo "NodeName=node1 Arch=x86_64 NodeAddr=127.0.0.2 NodeHostName=node1 Port=0" ;;
*) echo "no such call: $*" >&2; exit 1 ;;
esac
"""
ALLOCATED = {"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_NNODES": "2"}


@pytest.fixture
def job(load, tmp_path):
    """The script as a job of two nodes: the process, and where it is to serve."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    port = free_ports(2)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = children.own(["bash", str(SCRIPT), *flags(load, "--layout", "ep1-pp2")])
    given = os.environ | ALLOCATED | {"PATH": path, "PORT": str(port)}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env=given, stdout=log, stderr=log)
    yield process, f"127.0.0.1:{port}", tmp_path / "log"
    tasks = descendants(process.pid)
    children.stop(process)  # and what it started, which Slurm would end
    all_gone(tasks)


def test_the_tasks_of_a_job_are_the_nodes_of_a_server(job, load):
    process, address, log = job

    def ready():
        assert process.poll() is None, log.read_text()
        return complete(address)

    until(ready, "both nodes serve")
    assert [shard.node for shard in complete(address).shards] == [0, 1]
    assert f"engines join {address}" in log.read_text()
    with attach(load.model, address, timeout_seconds=HANG_SECONDS) as lora:
        assert answers(lora, load, "qv")
