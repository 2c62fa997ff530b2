"""A Slurm cluster of the tests' own: munge, a controller, and hosts that are addresses of this machine."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lora_server.demo import children
from lora_server.demo.launch import free_ports
from tests.support.serving import HANG_SECONDS, all_gone, until

NEEDED = "slurmctld", "slurmd", "sbatch", "munged"
SBIN = "/usr/sbin:/sbin"
SILENCE_SECONDS = 5  # after which a host is down
CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthInfo=socket={directory}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmdTimeout={silence}
ReturnToService=2
KillWait=5
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


class Slurm:
    """`hosts` are the processes of slurmd, by name: n0, n1, ... at 127.0.0.10 and up."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.hosts: dict[str, subprocess.Popen[bytes]] = {}
        self._daemons: list[subprocess.Popen[bytes]] = []
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:{SBIN}"
        self.environment = os.environ | {"SLURM_CONF": str(directory / "slurm.conf"), "PATH": path}

    def start(self, hosts: int) -> None:
        """Start all of it; returns once every host is idle."""
        directory, name, port = self.directory, socket.gethostname(), free_ports(hosts + 1)
        nodes = "\n".join(
            f"NodeName=n{i} NodeHostname={name} NodeAddr=127.0.0.{10 + i} Port={port + 1 + i} CPUs=1"
            for i in range(hosts)
        )
        filled = CONFIGURATION.format(host=name, port=port, directory=directory, nodes=nodes, silence=SILENCE_SECONDS)
        (directory / "slurm.conf").write_text(filled)
        (directory / "state").mkdir()
        (directory / "munge.key").write_bytes(os.urandom(1024))
        (directory / "munge.key").chmod(0o600)
        files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "seed-file": "munge.seed"}
        self._start("munged", "-F", "--force", *(f"--{name}={directory / file}" for name, file in files.items()))
        until((directory / "munge.socket").exists, "munge listens")
        self._start("slurmctld", "-D")
        for index in range(hosts):
            self.start_host(f"n{index}")
        until(lambda: self.states() == dict.fromkeys(self.hosts, "idle"), "Slurm's hosts are up")

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        with (self.directory / f"log of {command[0]}").open("ab") as log:
            process = subprocess.Popen(children.own(command), env=self.environment, stdout=log, stderr=log)
        self._daemons.append(process)
        return process

    def start_host(self, name: str) -> None:
        self.hosts[name] = self._start("slurmd", "-D", "-N", name)

    def close(self) -> None:
        """Kill the hosts with all that they run, and stop the rest."""
        for name in list(self.hosts):
            self.kill_host(name)
        for process in reversed(self._daemons):
            children.stop(process, HANG_SECONDS)

    def run(self, *command: str, **more: str) -> str:
        """What a command of Slurm says."""
        done = subprocess.run(
            command, env=self.environment | more, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
        )
        assert not done.returncode, done.stderr
        return done.stdout.strip()

    def states(self) -> dict[str, str]:
        """Each host's, as sinfo has it."""
        with contextlib.suppress(AssertionError):
            lines = self.run("sinfo", "-h", "-N", "-o", "%N %T").splitlines()
            return dict(line.split() for line in lines)
        return {}

    def kill_host(self, name: str) -> None:
        """Kill all that runs on a host at once: first what would tell the controller that the rest died."""
        tasks = [one for one in psutil.process_iter() if _host_of(one) == name]
        steps = {step.pid: step for task in tasks for step in task.parents() if step.name() == "slurmstepd"}
        daemon = psutil.Process(self.hosts.pop(name).pid)
        victims = [daemon, *steps.values(), *tasks]
        for process in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        all_gone(victims)


def _host_of(process: psutil.Process) -> str:
    try:
        return process.environ().get("SLURMD_NODENAME", "")
    except psutil.Error:
        return ""


@contextlib.contextmanager
def running_slurm(hosts: int) -> Iterator[Slurm]:
    """Run a Slurm cluster until the block or this process ends. Skips the test without its packages, or root."""
    missing = [name for name in NEEDED if not shutil.which(name, path=f"{os.environ['PATH']}:{SBIN}")]
    if missing or os.geteuid():
        pytest.skip(f"{', '.join(missing) or 'root'} is not here: make launchers, as root")
    directory = Path(tempfile.mkdtemp(prefix="lora-slurm-", dir="/tmp"))
    directory.chmod(0o755)  # munge wants its socket where all may look
    slurm = Slurm(directory)
    try:
        slurm.start(hosts)
        yield slurm
    finally:
        slurm.close()
        shutil.rmtree(directory, ignore_errors=True)
