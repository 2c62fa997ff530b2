"""`provision watch --serve --act` beside a server that engines use: it shows metrics, and resizes the server."""

import signal
import subprocess
import sys
import urllib.request

import pytest

from lora_server.demo import children
from lora_server.demo.launch import free_ports, running_server
from tests.support.fleet import Fleet
from tests.support.provision import provision, typed
from tests.support.serving import HANG_SECONDS, flags, status, stop, until


@pytest.fixture
def plan(load, tmp_path):
    asked = typed(slo="ttft_p95=250ms,tpot_avg=100ms", model=load.base, adapters=6, gpu="hopper-96", instances=2)
    asked += [*typed(batch_size=64, out=tmp_path / "plan.yaml"), "--no-simulate"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["provision", *asked])
        assert provision(*asked).exit_code == 0
    return tmp_path / "plan.yaml"


def test_a_server_is_brought_to_the_gpus_that_it_is_to_have(load, tmp_path, plan):
    port = free_ports()
    with (
        running_server(tmp_path / "log", flags(load, "--layout", "ep1-pp1")) as server,
        Fleet(load, server.address, tmp_path, ("shm",)) as fleet,
    ):
        own = typed(server=server.http, plan=plan, serve=port, seconds=1, listen=server.address, min_gpus=2)
        command = [sys.executable, "-m", "provisioning", "watch", *own, "--act"]

        def metrics():
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=HANG_SECONDS) as answer:
                return answer.read().decode()

        with children.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                until(lambda: len(status(server.address).shards) == 2, "the server has two shards")
                until(lambda: 'provision_gpus{what="serving"} 2.0' in metrics(), "and a look has seen them")
                assert 'provision_resizes_total{outcome="done"} 1.0' in metrics()
                assert 'provision_gpus{what="needed"} 1.0' in metrics() and "provision_margin 1.0" in metrics()
                process.send_signal(signal.SIGTERM)
                said, errors = process.communicate(timeout=HANG_SECONDS)
            finally:
                process.kill()
        assert process.returncode == 0, errors
        assert '"event": "resize"' in said and "failure" not in said
        fleet.check_all_right()
        assert stop(server) == 0


@pytest.mark.parametrize(
    ("more", "error"),
    [
        (("--serve", "9400"), "--serve: got no --plan, expected the server's plan.yaml"),
        (("--serve", "9400", "--plan", "{plan}", "--min-gpus", "9", "--max-gpus", "8"), "--min-gpus: got 9"),
        (("--serve", "99999", "--plan", "{plan}"), "--serve: got 99999"),
    ],
)
def test_what_cannot_be_followed_is_refused_at_once(plan, more, error):
    found = provision("watch", *(one.format(plan=plan) for one in more))
    assert found.exit_code == 2 and error in found.stderr, found.output
