"""What `provision` prints: whole words at 80 columns, the same in a pipe, colours that show on any background."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import typer

from provisioning.cli import app
from provisioning.report import words
from provisioning.simulation.measure import Estimate
from tests.support.doc_commands import SHELL, blocks

SLO = ["--slo", "ttft_p95=250ms,tpot_avg=100ms", "--model", "mixtral-8x7b"]
PLAN = [*SLO, "--adapters", "512", "--instances", "4", "--batch-size", "64", "--no-simulate"]
SIMULATE = ["simulate", "--cache-slots", "3", "--adapters", "64", "--batch-size", "40", "--requests", "200"]
INFEASIBLE = [*PLAN, "--max-gpus", "1", "--instances", "99999999"]
COMMANDS = [["models"], ["table4"], SIMULATE, [*PLAN, "--price-per-gpu-hour", "3"], INFEASIBLE]
READABLE = {0, 1, 2, 31, 32, 33, 36}  # bold, dim, red, green, yellow, cyan on what the background is
ESCAPE = re.compile(r"\x1b\[([0-9;]*)m")


def run(arguments, columns=None, stream="stdout", **environment):
    """(stdout, stderr); with `columns`, the stream is a terminal as wide as that."""
    ends = pty.openpty() if columns else None
    if ends:
        fcntl.ioctl(ends[1], termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | ({stream: ends[1]} if ends else {})
    process = subprocess.Popen(
        [sys.executable, "-m", "provisioning", *arguments], **pipes, env=kept | {"TERM": "xterm-256color"} | environment
    )
    seen = b""
    if ends:
        os.close(ends[1])
        try:
            while piece := os.read(ends[0], 65536):
                seen += piece
        except OSError:  # the last writer has gone
            pass
        os.close(ends[0])
    out, err = process.communicate(timeout=120)
    assert process.returncode in (0, 3), (err or seen).decode()
    texts = [seen if piece is None else piece for piece in (out, err)]
    return tuple(piece.decode().replace("\r\n", "\n") for piece in texts)


def plain(text):
    return "\n".join(line.rstrip() for line in ESCAPE.sub("", text).splitlines())


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command)[:20])
def test_no_word_is_broken_and_a_pipe_says_the_same(command):
    piped, _ = run(command)
    assert "\x1b" not in piped and not re.search(r"\de[+-]\d|…", piped)
    for columns in (80, 100):
        shown = plain(run(command, columns)[0])
        assert Counter(shown.split()) == Counter(piped.split())
        assert max(map(len, shown.splitlines())) <= columns


@pytest.mark.parametrize(
    "command", [[], ["models"], ["simulate"], ["table4"], ["watch"], ["compare"]], ids=lambda command: "".join(command)
)
def test_help_names_every_option_in_whole_words(command):
    found = typer.main.get_command(app)
    for name in command:
        found = found.commands[name]
    shown, _ = run([*command, "--help"], 80)
    said = set(plain(shown).split())
    for option in found.params:
        assert option.opts[0] in said
        assert set(option.help.split()) <= said, option.opts[0]
    check_colours(shown)


def check_colours(text, allowed=READABLE):
    codes = {int(code) for group in ESCAPE.findall(text) for code in group.split(";") if code}
    assert codes and codes <= allowed, codes


@pytest.mark.parametrize("command", [COMMANDS[3], INFEASIBLE], ids=["plan", "infeasible"])
def test_colours_show_on_light_and_dark(command):
    check_colours(run(command, 80)[0])
    check_colours(run(command, 80, NO_COLOR="1")[0], {0, 1, 2})


def test_json_is_raw_on_a_terminal_too():
    shown, _ = run(["models", "--json"], 80)
    assert "\x1b" not in shown and json.loads(shown)[0]["hidden"] == 2880


def test_progress_is_for_who_watches():
    asked = [*SIMULATE[:-1], "2000"]
    assert "simulating, run" in run(asked, 80, "stderr")[1]
    assert run([*asked, "--json"], 80, "stderr")[1] == ""
    assert run(asked)[1] == ""


def test_models_at_80_columns():
    assert plain(run(["models", "--lora-rank", "1024"], 80)[0]) == (
        """\
model              layers  experts  top-k  hidden     ffn      own A   shared A
gpt-oss-20b            24       32      4   2,880   2,880  25.31 GiB  21.09 GiB
gpt-oss-20b-paper      32       32      4   2,880   2,880  33.75 GiB  28.12 GiB
qwen3-30b-a3b          48      128      8   2,048     768  99.00 GiB  75.00 GiB
mixtral-8x7b           32        8      2   4,096  14,336  27.00 GiB  25.00 GiB
scaled-moe             18       32      4   8,192   8,192  54.00 GiB  45.00 GiB
dbrx                   40       16      4   6,144  10,752  61.88 GiB  54.38 GiB
The last two are an adapter of rank 1,024: gate and up have an A each, or share
one.
Assumed of scaled-moe: hidden, ffn, heads, kv_heads, head_dim."""
    )


def test_a_plan_at_80_columns():
    shown = plain(run([*PLAN, "--gpu", "h100"], 80)[0])
    assert shown.startswith(
        """\
mixtral-8x7b on h100: 512 adapters of rank 64 (Zipf 1.2), 4 instances with 64
requests each in flight, TTFT p95 within 250 ms, TPOT within 100 ms
3 LoRA Server GPUs as ep3-pp1 on 1 node, beside 4 instances of 2 GPUs; binding:
cache
A LoRA Server is not worth it here: 5 coupled instances, tuned on the same 11
GPUs cache 144 of the 512 adapters and meet both SLOs, and by the model 10 GPUs
would do.

                        plan                      limit
cache slots             115                       >= 90 of 512 adapters
IAR, model              1.0000                    >= 0.95
IAR, simulated          not simulated
IAR, assumptions ±20 %  0.9720 to 1.0000          +20 %: holds
recv + comp + send      101 + 138 + 130 = 369 us  <= 3,034 us (Eq. 5)
slowest, 4 served       552 us                    <= 3,125 us (Eq. 6)
requests per instance   64                        <= 473 by KV memory
decode step             21.8 ms                   TPOT SLO 100 ms
visible load            377 us                    TTFT SLO 250 ms, with a step
adapter memory per GPU  73.23 GiB                 92% of h100
Any instance serves any adapter, so each holds 64 requests; were adapters
assigned to instances, the busiest would hold 64.01 (x1.00).
Prefill, estimated: 896 prompt tokens a request (by --context-tokens) take 14.3
ms, 16.4% of an instance's time; coupled, 13.1%.

                        with a LoRA Server  coupled
GPUs                    8 + 3               10
adapter slots           115, shared         5 x 29, 83% of free memory
copies of hot adapters  -                   1
requests by KV memory   473 an instance     81 an instance
IAR, model              1.0000              0.9999
decode step             21.8 ms             26.3 ms
GPUs that do            11                  10
"""
    )


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (words.number(28470.4), "28,470"),
        (words.number(0.49462), "0.4946"),
        (words.number(1e-7), "0.0000001"),
        (words.number(512), "512"),
        (words.number(0), "0"),
        (words.time(369.4), "369 us"),
        (words.time(15_240), "15.2 ms"),
        (words.time(1.72e8), "172 s"),
        (words.times(Estimate(mean=0.0301, low=0.0299, high=0.0303)), "30.1 ms [29.9, 30.3]"),
        (words.size(1.69 * 2**30), "1.69 GiB"),
        (words.size(300), "300 bytes"),
        (words.count(1, "GPU"), "1 GPU"),
        (words.count(1024, "GPU"), "1,024 GPUs"),
    ],
)
def test_numbers(shown, expected):
    assert shown == expected


def examples():
    """(document, the command of a shell block, the text block after it) where that is a plan's."""
    for document in ("README.md", "docs/provisioning.md"):
        found = blocks(document)
        for block, after in pairwise(found):
            asked = [line for line in block.commands if line.startswith("provision --slo")]
            if block.language in SHELL and asked and after.language == "text":
                yield document, asked[0], after.text


@pytest.mark.parametrize(("document", "command", "text"), list(examples()))
def test_documents_print_what_the_command_says(document, command, text, tmp_path):
    typed = re.sub(r"^provision", f"{sys.executable} -m provisioning", command)
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        typed,
        shell=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = " ".join(done.stdout.split())
    for part in text.split("...\n"):
        assert " ".join(part.split()) in said, said


def test_documents_show_a_verdict_each_way():
    texts = " ".join(text for _, _, text in examples())
    assert "A LoRA Server is worth it" in texts and "A LoRA Server is not worth it here" in texts
