"""What the command shows of a running server: status, names for a shell, bars in a terminal."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading

import pytest
from structlog.testing import capture_logs

from client_connector.transformers import attach
from lora_server.cli.loading import follow
from lora_server.terminal import progress
from lora_server.timings import Timings
from tests.support.controllers import make_controller, registration
from tests.support.serving import HANG_SECONDS, cli, status, until
from tests.support.workload import workload

pytestmark = pytest.mark.usefixtures("forked")
COMMAND = "import sys; sys.argv[0] = 'lora-server'; from lora_server.__main__ import main; main()"


def test_status_tells_clients_transports_and_memory(server):
    load = workload("mixtral")
    first, second = load.names[:2]
    with attach(load.model, server=server.address, transport="tcp") as lora, lora.adapters([first, second]):
        until(lambda: all(len(one.stats.attached) == 1 for one in status(server.address).shards), "it is reported")
        document = json.loads(cli("status", "--server", server.address, "--json").stdout)
        (client,) = document["joined"]
        assert (client["adapters"], client["transports"]) == (sorted([first, second]), ["tcp"])
        assert client["instance"].endswith(f":{os.getpid()}") and 0 <= client["silent_seconds"] < 10
        shown = cli("status", "--server", server.address).stdout
        assert re.search(r"\n +0  cpu +[\d.]+ [KM]iB +[\d.]+ .iB of [\d.]+ .iB  1 tcp\n", shown), shown
        assert f"\nclient {client['client']}: {', '.join(client['adapters'])}\n" in shown
    for shard in document["shards"]:
        stats = shard["stats"]
        assert stats["device"] == "cpu" and stats["attached"] == [{"client": client["client"], "transport": "tcp"}]
        assert 0 < stats["weight_bytes"] < stats["free_bytes"] < stats["total_bytes"]
    until(lambda: not status(server.address).joined, "it left")


def complete(*arguments, **environment):
    """What the command says to a shell that asks for words."""
    told = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}  # what runs the tests need not be a shell
    command, own = [sys.executable, "-c", COMMAND, *arguments], os.environ | told | environment
    return subprocess.run(command, env=own, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)


def test_names_are_completed_from_the_server(server):
    shown = complete("--show-completion", "bash")
    assert (shown.returncode, "complete -o default -F _lora_server_completion lora-server" in shown.stdout) == (0, True)
    words = {
        "COMP_WORDS": "lora-server adapters remove per",
        "COMP_CWORD": "3",
        "_LORA_SERVER_COMPLETE": "complete_bash",
    }
    done = complete(**words, LORA_SERVER_ADDRESS=server.address)
    assert (done.stdout.split(), done.stderr) == (["per-expert"], "")
    silent = complete(**words, LORA_SERVER_ADDRESS="127.0.0.1:1")
    assert (silent.stdout.strip(), silent.stderr) == ("", "")


def in_a_terminal(*arguments, until_shown=None):
    """The exit code of the command, and what a terminal got; Ctrl-C is pressed once `until_shown` is true of it."""
    pid, terminal = pty.fork()
    if not pid:
        os.execve(sys.executable, [sys.executable, "-m", "lora_server", *arguments], os.environ | {"TERM": "xterm"})
    shown = b""
    while True:
        try:
            shown += os.read(terminal, 1 << 16)
            if until_shown is not None and until_shown(shown.decode(errors="replace")):
                until_shown = None
                os.write(terminal, b"\x03")
        except OSError:  # it ended
            os.close(terminal)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode()


def test_adding_shows_bars_in_a_terminal_and_nowhere_else(server):
    path = str(workload("mixtral").paths["fused"])
    code, shown = in_a_terminal("adapters", "add", "law", path, "--server", server.address)
    assert (code, "validating" in shown, "Traceback" in shown) == (0, True, False), shown
    assert shown.rstrip().split("\x1b[2K")[-1].startswith("law: rank 8, "), "the bars are gone at the end"
    piped = cli("adapters", "add", "law", path, "--server", server.address)
    assert (piped.returncode, piped.stderr, piped.stdout.count("\n")) == (0, "", 1)


def test_each_shard_has_a_bar(server):
    cli("adapters", "add", "bars", str(workload("mixtral").paths["qv"]), "--server", server.address)
    bars, ended = progress(), threading.Event()
    thread = threading.Thread(target=follow, args=(server.address, "bars", bars, ended), daemon=True)
    thread.start()

    def shown():
        return [(one.description, one.completed, one.total) for one in bars.tasks if one.visible]

    full = [("loading on shard 0", 4, 4), ("loading on shard 1", 4, 4)]
    until(lambda: shown() == full, "both shards have all four layers")
    ended.set()
    thread.join(HANG_SECONDS)


def test_status_is_watched_until_ctrl_c(server):
    def twice(shown):
        return shown.count(f"{server.address} at ") >= 2 and shown.count("ep2-pp1") >= 2

    code, shown = in_a_terminal("status", "--watch", "--server", server.address, until_shown=twice)
    assert (code, "Traceback" in shown) == (0, False), shown
    assert shown.rstrip().endswith("\x1b[?1049l"), "the screen that was there comes back"


def test_what_is_watched_may_be_away(server):
    """In a pipe: a JSON document per line, of a server that is there and of one that is not."""
    for address, ready in ((server.address, True), ("127.0.0.1:1", False)):
        command = [sys.executable, "-m", "lora_server", "status", "--watch", "--json", "--server", address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
            lines = [json.loads(watching.stdout.readline()) for _ in range(2)]
            watching.send_signal(signal.SIGINT)
            _, said = watching.communicate(timeout=HANG_SECONDS)
        assert [one["ready"] for one in lines] == [ready] * 2 and (watching.returncode, said) == (0, "")


class Slow(dict):
    """Start-up adapters of which two are handed out for now."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.halfway, self.go_on = threading.Event(), threading.Event()

    def items(self):
        for done, item in enumerate(super().items()):
            if done == 2:
                self.halfway.set()
                assert self.go_on.wait(HANG_SECONDS)
            yield item


def test_registering_many_tells_how_far_it_is(tmp_path):
    controller, found = (
        make_controller(timings=Timings(progress=0.0)),
        Slow({f"a{index}": tmp_path for index in range(3)}),
    )
    controller.arrivals.arrive(registration(0, agreement=controller.agreement.digest()), [])
    with capture_logs() as lines:
        thread = threading.Thread(target=controller.adapters.register_directory, args=(found,), daemon=True)
        thread.start()
        assert found.halfway.wait(HANG_SECONDS)
        assert controller.not_ready() == "registering adapters: 1 of 3"
        found.go_on.set()
        thread.join(HANG_SECONDS)
    assert controller.not_ready() == ""
    said = [(line["done"], line["total"]) for line in lines if line["event"] == "registering"]
    assert said == [(0, 3), (1, 3), (2, 3)]
