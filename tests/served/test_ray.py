"""`serve --launcher ray` in a real Ray cluster, whose hosts are addresses of this machine."""

import os
import subprocess
import sys

import psutil
import pytest

from client_connector.transformers import attach
from lora_server.demo import children
from lora_server.demo.launch import free_ports
from tests.support.serving import HANG_SECONDS, all_gone, answers, complete, descendants, flags, shard_pids, until
from tests.support.workload import workload

pytest.importorskip("ray", reason="needs ray: pip install 'lora-server[ray]'")
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]
# Ray gives a host up that was silent for so long; by itself it takes half a minute
CHECKS = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
OF_RAY = CHECKS | {"worker_niceness": 0}  # as deploy/README.md says
HOSTS = "127.0.0.2", "127.0.0.3", "127.0.0.4"
ALONE = {"RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture(scope="module")
def cluster():
    """A head that runs no actor, and two hosts."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        for name, value in ALONE.items():
            patch.setenv(name, value)
        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": OF_RAY}
        it = Cluster(initialize_head=True, head_node_args=head)
        try:
            it.hosts = [it.add_node(num_cpus=2, node_ip_address=host) for host in HOSTS[:2]]
            yield it
        finally:
            it.shutdown()


class Launched:
    """The command, and the server that it started."""

    def __init__(self, cluster, load, log, port, nodes=2):
        self.log, self.port = log, port
        command = [sys.executable, "-m", "lora_server", "serve", *flags(load, "--layout", f"ep1-pp{nodes}")]
        command += ["--nodes", str(nodes), "--launcher", "ray"]
        command += ["--listen", f"127.0.0.1:{port}", "--http", "127.0.0.1:0"]
        own = os.environ | {"RAY_ADDRESS": cluster.address} | ALONE
        with log.open("ab") as stream:
            self.process = subprocess.Popen(children.own(command), env=own, stdout=stream, stderr=stream)

    def wait_started(self):
        def started():
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            return "nodes started on Ray" in self.log.read_text()

        until(started, "Ray has started the actors", 3 * HANG_SECONDS)

    def wait_ready(self):
        """Return where node 0 listens: on one of the hosts."""
        self.wait_started()
        addresses = [f"{host}:{self.port}" for host in HOSTS]
        until(lambda: any(complete(one) for one in addresses), "it serves")
        (address,) = (one for one in addresses if complete(one))
        return address


def processes_of(host):
    """What Ray started on a host, actors and nodes of servers among it."""
    daemons = [psutil.Process(one[0].process.pid) for one in host.all_processes.values()]
    return daemons + [child for one in daemons for child in descendants(one.pid)]


def test_nodes_of_a_server_are_actors_on_hosts_of_their_own(cluster, tmp_path):
    load, port = workload("mixtral"), free_ports()
    launched = Launched(cluster, load, tmp_path / "log", port)
    address = launched.wait_ready()
    with attach(load.model, address, timeout_seconds=HANG_SECONDS) as lora:
        assert answers(lora, load, "qv")
        first, second = shard_pids(address)
        (host,) = (one for one in cluster.hosts if one.node_ip_address != address.partition(":")[0])
        lost = processes_of(host)
        assert second in {one.pid for one in lost} and first not in {one.pid for one in lost}

        other = Launched(cluster, load, tmp_path / "log of another", port, nodes=3)  # by mistake
        assert other.process.wait(HANG_SECONDS) == 2, other.log.read_text()
        assert "got settings that are not those of the server" in other.log.read_text()
        assert shard_pids(address) == [first, second]

        cluster.add_node(num_cpus=2, node_ip_address=HOSTS[2])
        for process in lost:  # the whole host
            process.kill()
        until(lambda: shard_pids(address)[1:] not in ([], [second]), "Ray started its node on another host")
        assert shard_pids(address)[0] == first
        assert answers(lora, load, "fused")

        # a launcher that is killed leaves the server; the same command takes it over, and stops it
        launched.process.kill()
        launched.process.wait(HANG_SECONDS)
        again = Launched(cluster, load, tmp_path / "log of the next", port)
        again.wait_started()
        assert shard_pids(address)[0] == first
        assert answers(lora, load, "qv")
    serving = [psutil.Process(pid) for pid in shard_pids(address)]
    again.process.terminate()
    assert again.process.wait(HANG_SECONDS) == 0
    all_gone(serving)
