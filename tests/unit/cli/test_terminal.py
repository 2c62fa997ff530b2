"""What the command shows: exact text at 80 columns, whole words, whole values in a pipe, numbers for people."""

import io
import re
import time

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from docs import configuration
from lora_server import terminal, units
from lora_server.cli import app as server
from lora_server.cli import rows, status
from lora_server.config.groups import ESSENTIAL
from lora_server.demo.engine import EngineResult, Times
from lora_server.demo.report import DemoReport, LayoutTimes, PeftVerdict, ShownAnswer, show
from lora_server.demo.styles import PLAIN, QUESTIONS, STYLES
from lora_server.wire import lora_server_pb2 as pb
from provisioning.cli import app as provision
from tests.support.screens import check_screen

LONG = "tenant-042-legal-contracts-germany-v2.1a"
REASON = (
    "adapter /srv/adapters/europe-west/production/2026-11/tenant-043-contracts/checkpoint-12000: adapter_config.json: "
    "use_dora: got True, expected False; DoRA's magnitudes cannot be served"
)
GIB = 1 << 30


def rendered(draw, width=80, **settings):
    out = io.StringIO()
    draw(Console(file=out, width=width, soft_wrap=True, highlight=False, **settings))
    return out.getvalue()


def row(name, **fields):
    return rows.adapter_row(pb.Adapter(name=name, layers=32, **fields))


def test_a_lost_shard_says_where_it_was_and_since_when(monkeypatch):
    monkeypatch.setattr(time, "localtime", time.gmtime)
    lost = pb.ShardStatus(shard=2, state="lost", node=1, lost_since=8 * 3600 + 17 * 60)
    shown = rendered(lambda console: status.show(pb.StatusReply(shards=[lost]), console))
    assert re.search(r"^ +2 +0 +0 +lost since 08:17 +1 +- ", shown, re.MULTILINE), shown


LOADING = {"lora_rank": 64, "bytes": 33_000_000, "resident_layers": 12, "version": "3f" * 32, "uri": f"/srv/{LONG}"}
ROWS = [
    row("law", state="ready", lora_rank=8, bytes=3 * GIB // 2, holders=1234, warnings=["its rank is above 64"]),
    row(LONG, state="loading", **LOADING),
    rows.refused_row(pb.Refusal(name="tenant-043", uri="/srv/tenant-043", reason=REASON)),
]


def reply():
    attached = [("cuda_ipc", 12), ("shm", 3), ("tcp", 2)]
    clients = [pb.Attached(client=1, transport=name) for name, number in attached for _ in range(number)]
    memory = {"weight_bytes": 12 * GIB, "free_bytes": 105 * GIB // 2, "total_bytes": 64 * GIB}
    counts = {"steps": 2_847_012, "failed": 1024, "attached": clients}
    stats = pb.ShardStats(device="cuda:0 NVIDIA H100 80GB HBM3", **counts, **memory)
    up = pb.ShardStatus(state="up", pid=4194303, restarts=2, stats=stats)
    held = {"adapters": ["law", LONG], "held": 2, "transports": ["cuda_ipc", "shm"], "silent_seconds": 12.3}
    worker = pb.ClientStatus(client=1, instance="vllm-worker-7f9c6d5b8-x2x4z:1234", **held)
    return pb.StatusReply(
        model="mixtral-8x7b", layout="ep2-pp1", reason="registering adapters: 120 of 500", adapters=500, clients=2,
        warned=3, refused=[pb.Refusal(name="tenant-043", reason=REASON)],
        shards=[up, pb.ShardStatus(shard=1, ep_rank=1, state="starting")],
        joined=[worker, pb.ClientStatus(client=2, instance="vm:7")],
    )  # fmt: skip


def demo(console):
    times = [LayoutTimes("ep1-pp1", EngineResult([], 531.4, Times(474, 2132, 243, 953)))]
    times.append(LayoutTimes("ep4-pp1", EngineResult([], 315, Times(3234.4, 2108, 0.4, 1171))))
    answers = [ShownAnswer(None, said, said) for said in PLAIN] + [ShownAnswer("lawyer", *STYLES["lawyer"][:2])]
    show(DemoReport(PeftVerdict(1536, 1536, 1.3e-5), QUESTIONS[0], answers, times), console)


FAR = row("x", state="ready", uri=f"/srv/adapters/europe-west/production/{LONG}/checkpoint-12000")
SCREENS = {
    "adapters-list": lambda console: rows.show_list(ROWS, console),
    "adapters-show": lambda console: rows.show_one(ROWS[1], console),
    "adapters-show-far": lambda console: rows.show_one(FAR, console),
    "status": lambda console: status.show(reply(), console),
    "demo": demo,
}
WITH_REASON = [SCREENS["adapters-list"], SCREENS["status"]]


@pytest.mark.parametrize("name", SCREENS)
def test_screens_at_80_columns(name):
    check_screen(__file__, name, rendered(SCREENS[name]))


@pytest.mark.parametrize("draw", WITH_REASON)
def test_no_word_is_broken_and_in_a_pipe_every_value_is_on_one_line(draw):
    narrow, wide = rendered(draw), rendered(draw, width=terminal.WIDE)
    assert max(map(len, narrow.splitlines())) <= 80
    whole = {word for word in wide.split() if len(word) <= 70}
    assert whole <= set(narrow.split()), "words that are broken at 80 columns"
    assert REASON in wide


@pytest.mark.parametrize("draw", WITH_REASON)
def test_colours_read_on_light_and_dark(draw):
    codes = set(re.findall(r"\x1b\[([\d;]*)m", rendered(draw, force_terminal=True, color_system="standard")))
    assert {"1", "31", "33"} <= codes <= {"0", "1", "2", "31", "32", "33", "36"}


def test_no_escapes_with_no_color_or_in_a_pipe(monkeypatch, capsys):
    for name, value in (("NO_COLOR", "1"), ("FORCE_COLOR", "1")):
        monkeypatch.setenv(name, value)
    status.show(reply(), terminal.open_console())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.delenv("FORCE_COLOR")
    monkeypatch.setenv("COLUMNS", "80")
    status.show(reply(), terminal.open_console())
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and shown.count(REASON) == 2


@given(st.lists(st.text("abc-/_. ", max_size=60)), st.integers(1, 40))
def test_wrapped_text_fits_and_loses_nothing(words, width):
    text = " ".join(words)
    lines = terminal.wrap(text, width)
    assert max(map(len, lines)) <= width
    assert "".join("".join(lines).split()) == "".join(text.split())
    assert {word for word in text.split() if len(word) <= width} <= set(" ".join(lines).split())


def test_sizes():
    expected = {0: "0 B", 999: "999 B", 1000: "1.0 KiB", 100 << 10: "100 KiB", 33_000_000: "31.5 MiB"}
    expected |= {1023 << 20: "1.0 GiB", 5000 << 40: "5,000 TiB"}
    assert {nbytes: units.size(nbytes) for nbytes in expected} == expected


@pytest.mark.parametrize("app", [server, provision], ids=["lora-server", "provision"])
def test_either_help_flag_says_every_flag_in_80_columns_and_breaks_no_word(monkeypatch, app):
    monkeypatch.setenv("COLUMNS", "80")
    for path, command in configuration.commands(typer.main.get_command(app), ""):
        short, long = (CliRunner().invoke(app, [*path.split(), flag]) for flag in ("-h", "--help"))
        assert (short.exit_code, short.output) == (0, long.output) and "Usage:" in long.output, path
        assert app is provision or not path or len(configuration.first_line(command)) <= 64, "a list would cut it"
        everything = path == " serve" and CliRunner().invoke(app, ["serve", "--help-all"])
        text = everything.output if everything else long.output
        assert max(map(len, text.splitlines())) <= 80, path
        assert "…" not in text and "..." not in text.replace("[ARGS]...", ""), path
        flags = {flag for option in command.params for flag in option.opts if flag.startswith("--")}
        assert flags - set(re.findall(r"--[\w-]+", text)) == set(), path
        words = {word for option in command.params for word in (option.help or "").split() if word[0].isalpha()}
        assert words - set(text.split()) == set(), path


def test_serve_help_shows_an_example_choices_and_defaults_of_the_flags_that_people_need():
    text = " ".join(CliRunner().invoke(server, ["serve", "--help"]).output.split())
    assert "lora-server serve --base-model ./Mixtral-8x7B --adapters ./adapters" in text
    assert "--device cpu|cuda Where" in text and "(default: cpu)" in text
    flags = set(re.findall(r"^  (--[\w-]+)", CliRunner().invoke(server, ["serve", "--help"]).output, re.MULTILINE))
    assert flags - {"--help-all"} == {f"--{name.replace('_', '-')}" for name in {*ESSENTIAL, "config"}}
