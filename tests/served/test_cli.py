"""What the command says: errors that name the flag, a quick --help, the demo, status, and bars in a terminal."""

import json
import os
import pty
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from client_connector.transformers import attach
from lora_server.cli.loading import follow
from lora_server.demo import styles, tiny
from lora_server.demo.launch import free_ports, running_server
from lora_server.demo.run import PROMPT
from lora_server.terminal import progress
from lora_server.timings import Timings
from tests.support.certificates import Authority
from tests.support.controllers import make_controller, registration
from tests.support.serving import HANG_SECONDS, cli, status, until
from tests.support.workload import workload

MOST_SECONDS = 60.0  # of CPU, of the demo and the commands that it prints, on an idle machine; five times at most
DEMO_SECONDS = 900.0  # two minutes of one CPU; what it starts has limits of its own


def test_errors_are_one_line_and_exit_code_two(tmp_path):
    done = cli("serve", "--base-model", str(tmp_path))
    assert done.stderr.startswith("error: base model: no config.json")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    done = cli("serve", "--base-model", "mixtral-8x7b", "--adapters", str(tmp_path / "nowhere"))
    assert (done.returncode, "nowhere" in done.stderr) == (2, True)
    done = cli("demo", "--model", str(tmp_path))
    assert (done.returncode, "--adapters" in done.stderr) == (2, True), "both or neither"
    done = cli("status", "--server", "127.0.0.1:1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: server 127.0.0.1:1: cannot be reached (Connection refused); is it running?\n"
    for address in ("localhost", "http://127.0.0.1:7401"):
        done = cli("status", "--server", address)
        words = f"error: address of the server: got '{address}', expected HOST:PORT such as 127.0.0.1:7400"
        assert (done.returncode, done.stderr.startswith(words)) == (2, True), done.stderr


def test_doctor_says_what_fails_of_a_configuration(tmp_path):
    """On whatever machine this is: JSON, its exit code, and what a configuration names."""
    config = tmp_path / "node.yaml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config.write_text(f"base-model: none\nlisten: 127.0.0.1:{taken.getsockname()[1]}\nhttp: 127.0.0.1:0\n")
        done, told = cli("doctor", "--config", str(config), "--json"), cli("doctor", "--config", str(config))
    states = {one["check"]: one["state"] for one in json.loads(done.stdout)}
    assert done.returncode == told.returncode == 1 and states["port"] in ("failed", "ok")
    assert "failed: port: end it, or give another --listen" in told.stdout
    config.write_text("listens: 1\n")
    done = cli("doctor", "--config", str(config))
    assert done.returncode == 2 and "no such setting" in done.stderr


STARTS = {  # a configuration, and the checks that fail
    "one that starts": ({}, set()),
    "a GPU that is not there": ({"device": "cuda"}, set() if torch.cuda.is_available() else {"device and pools"}),
    "pools larger than memory": ({"device_pool": "900TiB"}, {"device and pools"}),
    "files that do not exist": (
        {
            "base_model": "/none/base",
            "adapters": "/none/adapters",
            "join_token_file": "/none/token",
            **{f"tls_{one}": f"/none/{one}" for one in ("cert", "key", "ca")},
        },
        {"model", "adapters", "join token", "certificate"},
    ),
    "what is open, and where adapters are": (
        {"http": "0.0.0.0:0", "resolve": "s3://adapters", "allow_source": ["nowhere"]},
        {"open ports", "sources"},
    ),
    "a database that is not there": ({"registry": "postgresql://127.0.0.1:1/none"}, {"registry"}),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if "files" in case else pytest.mark.long) for case in STARTS]
)
def test_doctor_checks_what_a_start_would(case, tmp_path):
    settings, failing = STARTS[case]
    config = tmp_path / "node.yaml"
    well = {"base_model": "mixtral-8x7b", "listen": "127.0.0.1:0", "http": "127.0.0.1:0", "data_dir": str(tmp_path)}
    config.write_text(json.dumps(well | {"timings": {"database_open": 0.5}} | settings))
    done = cli("doctor", "--config", str(config), "--json")
    states = {one["check"]: one["state"] for one in json.loads(done.stdout)}
    starts = {"model", "adapters", "sources", "certificate", "join token", "open ports", "data directory", "registry"}
    assert {one for one in states if states[one] == "failed"} & (starts | {"device and pools"}) == failing
    assert starts <= set(states) and done.returncode == ("failed" in states.values()), done.stderr


BAD_STARTS = {
    "an expired certificate": (("--tls-cert", "CERT", "--tls-key", "KEY", "--tls-ca", "CA"), "--tls-cert "),
    "a name that is none": (("--listen", "nohost.invalid:7400"), "--listen nohost.invalid:7400: cannot listen there"),
    "another host": (("--listen", "192.0.2.1:7400"), "--listen 192.0.2.1:7400: cannot listen there"),
    "more stages than layers": (("--layout", "ep1-pp9"), "--layout: got ep1-pp9, in which 5 of 9 shards would own"),
    "more shards than sites": (("--layout", "ep99-pp1"), "--layout: got ep99-pp1, in which 83 of 99 shards"),
    "no place for data": (("--data-dir", "/proc/no/where"), "--data-dir /proc/no/where: cannot be made"),
}


@pytest.fixture
def own_scratch(monkeypatch):
    """Temporary files of what this test starts: where no other test's killed server left anything to be cleaned up."""
    with tempfile.TemporaryDirectory(prefix="lora-") as own:
        monkeypatch.setenv("TMPDIR", own)
        yield Path(own)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if "name" in case else pytest.mark.long) for case in BAD_STARTS]
)
def test_what_cannot_be_had_is_one_line_and_no_traceback(case, own_scratch):
    (flags, words), base = BAD_STARTS[case], workload("llama").base
    authority = Authority(own_scratch)
    cert, key = authority.issue("expired", begins=-3, ends=-1)
    files = {"CERT": str(cert), "KEY": str(key), "CA": str(authority.ca)}
    flags = [files.get(flag, flag) for flag in flags]
    done = cli("serve", "--base-model", str(base), "--http", "127.0.0.1:0", *flags)
    assert (done.returncode, done.stderr.startswith(f"error: {words}")) == (2, True), done.stderr
    assert (done.stderr.count("\n"), "expected" in done.stderr) == (1, True)


def test_a_controller_that_is_not_there_is_said_at_once_and_ends_the_node(own_scratch):
    flags = ("--layout", "ep2-pp1", "--nodes", "2", "--node-rank", "1", "--controller", "127.0.0.1:1")
    more = ("--controller-seconds", "1", "--http", "127.0.0.1:0")
    done = cli("serve", "--base-model", str(workload("llama").base), *flags, *more)
    *lines, last = done.stderr.splitlines()
    events = [json.loads(line)["event"] for line in lines]
    assert events[:2] == ["starting", "--controller cannot be reached; trying again"]
    assert (done.returncode, "serving" in events) == (1, False)
    assert last.startswith("error: --controller 127.0.0.1:1: not reached within 1 s") and "expected" in last


def test_a_demo_without_transformers_says_what_to_install():
    code = "import sys; sys.modules['transformers'] = sys.modules['peft'] = None\n"
    code += "from lora_server.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "demo"], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert (
        done.stderr == "error: peft, transformers not installed: pip install '.[demo]' in a checkout of lora-server\n"
    )


def test_an_address_in_use_is_named(tmp_path):
    base = str(workload("llama").base)
    with running_server(tmp_path / "log", ["--base-model", base]) as server:
        taken = {"--http": server.http, "--listen": server.address}
        for flag, address in taken.items():
            (other,) = taken.keys() - {flag}
            done = cli("serve", "--base-model", base, flag, address, other, "127.0.0.1:0")
            words = f"error: {flag} {address}: cannot listen there, in use by process "
            assert (done.returncode, words in done.stderr) == (2, True), done.stderr
            host, _, port = done.stderr.rstrip().rpartition("such as ")[2].rpartition(":")
            socket.create_server((host, int(port))).close()


def test_a_data_port_that_is_taken_is_named_and_ends_the_node():
    base = free_ports(2)
    with socket.create_server(("127.0.0.1", base)):
        flags = ("--base-model", "mixtral-8x7b", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")
        done = cli("serve", *flags, "--data-port-base", str(base))
    last = done.stderr.splitlines()[-1]
    assert (done.returncode, last.startswith("error: shard 0 "), "Traceback" in done.stderr) == (2, True, False), last
    assert f"127.0.0.1:{base} for the data of shard 0 (Address already in use); expected it free" in last


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_a_mistake_of_the_configuration():
    flags = ("--base-model", "mixtral-8x7b", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--device", "cuda")
    done = cli("serve", *flags)
    last = done.stderr.splitlines()[-1]
    assert (done.returncode, "died" in done.stderr, "see the log" in last) == (2, False, False), done.stderr
    assert last.startswith("error: shard 0 ") and "torch sees no NVIDIA GPU" in last


def test_a_missing_driver_is_named():
    script = "import sys; sys.modules['psycopg'] = None\nfrom lora_server.registry.database import Database\n"
    command = [sys.executable, "-c", f"{script}Database('postgresql://user:secret@localhost/x')"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert "pip install '.[postgres]'" in told.stderr and "secret" not in told.stderr.rpartition("ConfigError")[2]


def test_help_is_quick_and_without_torch():
    """In time of the CPU, which a busy machine leaves as it is; on an idle one it is what a user waits."""
    command = [sys.executable, "-X", "importtime", "-m", "lora_server", "--help"]
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANG_SECONDS)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert "serve" in done.stdout
    assert " torch" not in done.stderr
    assert min(seconds) < 1.0  # 0.2 s; the promise is 0.5 s


@pytest.mark.long
@pytest.mark.timeout(DEMO_SECONDS + 60)
def test_demo_as_json(tmp_path):
    """Of a model and adapters of one's own, so small that one layout fits; CI runs the one without."""
    model = tiny.make_model("mixtral", num_hidden_layers=1, num_local_experts=2)
    tiny.save_model(model, tmp_path / "model")
    for seed, name in enumerate(("law", "code")):
        tiny.make_adapter(model, tmp_path / "adapters" / name, lora_rank=4, seed=seed, targets="all")
    own = ["--model", str(tmp_path / "model"), "--adapters", str(tmp_path / "adapters")]
    done = cli("demo", "--json", "--timing", *own, "--layout", "ep1-pp1", seconds=DEMO_SECONDS)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, "libraries do not write between the bars"
    document = json.loads(done.stdout)
    assert document["tokens_checked"] == document["tokens_equal"] > 0
    assert document["max_abs_logprob_diff"] <= 1e-4
    assert [row["layout"] for row in document["layouts"]] == ["ep1-pp1"]
    assert [one["adapter"] for one in document["answers"]] == [None, "code", "law"], "as token ids, without a tokenizer"
    assert all(one["server"] == one["peft"] and len(one["server"].split()) == 24 for one in document["answers"])


@pytest.mark.long
@pytest.mark.timeout(DEMO_SECONDS + 60)
def test_the_demo_answers_in_words_and_stays_in_a_terminal():
    """Base model and adapters differ so that a person sees it; the commands that it prints work as they stand."""
    said = []

    def stays(shown):
        commands = re.findall(r"\n  (\S.* --server .*?)\r?\n", shown)
        if "until Ctrl-C" not in shown or len(commands) < 4:
            return False
        for command in commands:
            done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=HANG_SECONDS)
            assert done.returncode == 0, (command, done.stderr)
            said.append(done.stdout.strip())
        return True

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code, shown = in_a_terminal("demo", until_shown=stays)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (code, "864 of 864 tokens" in shown, "stopping the server" in shown) == (0, True, True), shown
    assert "ep4-pp1" not in shown, "timed with --timing alone"
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5 * MOST_SECONDS
    question = styles.QUESTIONS.index(PROMPT)
    for answer in (styles.PLAIN[question], *(styles.STYLES[name][question] for name in styles.SERVED)):
        assert shown.count(answer) == 2, (answer, shown)  # the server's and PEFT's
    assert said[-2:] == [styles.STYLES["poet"][1], styles.PLAIN[1]]


COMMAND = "import sys; sys.argv[0] = 'lora-server'; from lora_server.__main__ import main; main()"


def test_status_tells_clients_transports_and_memory(load, server):
    first, second = load.names[:2]
    with attach(load.model, server=server.address, transport="tcp") as lora, lora.adapters([first, second]):
        until(lambda: all(len(one.stats.attached) == 1 for one in status(server.address).shards), "it is reported")
        document = json.loads(cli("status", "--server", server.address, "--json").stdout)
        (client,) = document["joined"]
        assert (client["adapters"], client["transports"]) == (sorted([first, second]), ["tcp"])
        assert client["instance"].endswith(f":{os.getpid()}") and 0 <= client["silent_seconds"] < 10
        shown = cli("status", "--server", server.address).stdout
        assert re.search(r"\n +0  cpu +[\d.]+ [KM]iB +[\d.]+ .iB of [\d.]+ .iB  1 tcp *\n", shown), shown
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
    words = {"COMP_WORDS": "lora-server adapters remove per", "COMP_CWORD": "3"}
    words["_LORA_SERVER_COMPLETE"] = "complete_bash"
    done = complete(**words, LORA_SERVER_ADDRESS=server.address)
    assert (done.stdout.split(), done.stderr) == (["per-expert"], "")
    silent = complete(**words, LORA_SERVER_ADDRESS="127.0.0.1:1")
    assert (silent.stdout.strip(), silent.stderr) == ("", "")


def in_a_terminal(*arguments, until_shown=None):
    """The exit code of the command, and what a terminal got; Ctrl-C is pressed once `until_shown` is true of it."""
    pid, terminal = pty.fork()
    if not pid:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell that ran the tests in its background has it ignored
        os.execve(sys.executable, [sys.executable, "-m", "lora_server", *arguments], os.environ | {"TERM": "xterm"})
    shown, code = b"", None
    try:
        while select.select([terminal], [], [], HANG_SECONDS)[0]:
            try:
                shown += os.read(terminal, 1 << 16)
            except OSError:  # it ended
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                break
            if until_shown is not None and until_shown(shown.decode(errors="replace")):
                until_shown = None
                os.write(terminal, b"\x03")
    finally:
        os.close(terminal)
        if code is None:
            os.kill(pid, signal.SIGTERM)
            os.waitpid(pid, 0)
    assert code is not None, f"nothing for {HANG_SECONDS} s after {shown.decode()!r}"
    return code, shown.decode()


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
    controller = make_controller(timings=Timings(progress=0.0))
    found = Slow({f"a{index}": tmp_path for index in range(3)})
    controller.arrivals.arrive(registration(0, agreement_digest=controller.agreement.digest()), [])
    with capture_logs() as lines:
        thread = threading.Thread(target=controller.adapters.directory.register, args=(found,), daemon=True)
        thread.start()
        assert found.halfway.wait(HANG_SECONDS)
        assert controller.not_ready() == "registering adapters: 1 of 3"
        found.go_on.set()
        thread.join(HANG_SECONDS)
    assert controller.not_ready() == ""
    said = [(line["done"], line["total"]) for line in lines if line["event"] == "registering"]
    assert said == [(0, 3), (1, 3), (2, 3)]


def test_the_doctor_joins_a_server_as_an_engine_does(server):
    """What a slow or broken network adds: tests/cluster."""
    done = cli("doctor", "--cluster", "--json", "--server", server.address)
    found = json.loads(done.stdout)
    shards = len(status(server.address).shards)
    expected = ["server", "version", "clock", *[f"shard {shard}" for shard in range(shards)] * 2]
    assert done.returncode == 0 and [one["check"] for one in found] == expected, done
    assert {one["state"] for one in found[: 3 + shards]} == {"ok"}


def test_the_doctor_says_where_no_server_is():
    done = cli("doctor", "--cluster", "--server", f"127.0.0.1:{free_ports()}")
    assert done.returncode == 1 and "start it, or give its address by --server" in done.stdout
