"""The scripts for Slurm as jobs of a real one, whose hosts are addresses of this machine."""

import re

import psutil
import pytest

from client_connector.transformers import attach
from lora_server.demo.launch import free_ports
from tests.support.serving import HANG_SECONDS, answers, complete, flags, reached, shard_pids, until
from tests.support.slurm import running_slurm
from tests.support.sources import ROOT

pytestmark = pytest.mark.long
FOLDER = ROOT / "deploy/slurm"
HOSTS = 3


@pytest.fixture(scope="module")
def slurm():
    with running_slurm(HOSTS) as it:
        yield it


@pytest.fixture
def submit(slurm, load, tmp_path):
    """Submit a script and wait for its server; returns where engines join. Jobs end with the test."""

    def submit(script, *options, nodes=()):
        port = free_ports(2)
        server = flags(load, "--layout", "ep1-pp2", *nodes)
        slurm.run("sbatch", *into(tmp_path, port), *options, str(FOLDER / script), *server)

        def said():
            texts = (one.read_text() for one in tmp_path.glob("lora-server-*"))
            return re.findall(r"engines join (\S+),", "".join(texts))

        until(said, "the job says where engines join")
        until(lambda: complete(said()[0]), "it serves")
        return said()[0]

    yield submit
    slurm.run("scancel", "--user=root")
    until(lambda: not slurm.run("squeue", "-h"), "the jobs have ended")


def into(folder, port):
    return f"--output={folder}/%x-%a", f"--chdir={folder}", f"--export=ALL,PORT={port}"


def host_of(pid):
    return psutil.Process(pid).environ()["SLURMD_NODENAME"]


def test_the_tasks_of_a_job_are_the_nodes_of_a_server(submit, slurm, load):
    address = submit("serve.sbatch", "--nodes=2")
    assert [host_of(pid) for pid in shard_pids(address)] == ["n0", "n1"]
    with attach(load.model, address, timeout_seconds=HANG_SECONDS) as lora:
        assert answers(lora, load, "qv")
        slurm.kill_host("n1")
        until(lambda: not complete(address), "node 0 has noticed")
        until(lambda: "down" in slurm.states()["n1"], "so has Slurm, which lets the job go on without it")
        assert reached(address).shards[0].state == "up"
    slurm.start_host("n1")


def test_a_spare_of_an_array_takes_the_rank_of_a_host_that_died(submit, slurm, load):
    address = submit("elastic.sbatch", f"--array=0-{HOSTS - 1}", nodes=("--nodes", "2"))
    with attach(load.model, address, timeout_seconds=HANG_SECONDS) as lora:
        assert answers(lora, load, "qv")
        first, second = shard_pids(address)
        host = host_of(second)
        slurm.kill_host(host)
        until(lambda: shard_pids(address)[1:] not in ([], [second]), "the spare has the rank")
        assert shard_pids(address)[0] == first and host_of(shard_pids(address)[1]) != host
        assert answers(lora, load, "fused")
        slurm.start_host(host)
        running = "squeue", "-h", "--states=RUNNING", "-o", "%N"
        until(lambda: host in slurm.run(*running).split(), "Slurm runs its task again: a spare")


def test_refused_settings_end_a_task_of_an_array(slurm, load, tmp_path):
    script = str(FOLDER / "elastic.sbatch")
    number = slurm.run(
        "sbatch", "--parsable", "--array=0", *into(tmp_path, free_ports(2)), script, *flags(load, "--layout", "none")
    ).strip()
    jobs = "squeue", "-h", "--states=all", f"--jobs={number}", "-o", "%T %i"
    until(lambda: "FAILED" in slurm.run(*jobs), "it has failed")
