"""What `provision` prints: as in screens/*.txt, whole words at 80 columns, the same in a pipe, readable colours.

LORA_REWRITE_SCREENS=1 writes the files anew.
"""

import fcntl
import io
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
from tests.support.provision import ASKED
from tests.support.sources import ROOT

SCREENS = Path(__file__).parent / "screens"
SIMULATE = ["simulate", "--cache-slots", "3", "--adapters", "64", "--batch-size", "40", "--requests", "200"]
COMMANDS = {
    "models": ["models", "--lora-rank", "1024"],
    "table4": ["table4"],
    "simulate": SIMULATE,
    "plan": [*ASKED, "--gpu", "h100", "--price-per-gpu-hour", "3", "--no-simulate"],
    "infeasible": [*ASKED, "--max-gpus", "1", "--instances", "99999999", "--no-simulate"],
}
READABLE = {0, 1, 2, 31, 32, 33, 36}  # bold, dim, red, green, yellow, cyan on what the background is
ESCAPE = re.compile(r"\x1b\[([0-9;]*)m")


class Terminal(io.StringIO):
    """Of as many columns as COLUMNS says."""

    def isatty(self):
        return True


def screen(arguments, columns=0, **environment):
    """What stdout gets; without `columns` it is a pipe."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR"):
            patch.delenv(name, raising=False)
        for name, value in {"TERM": "xterm-256color", "COLUMNS": str(columns or 80), **environment}.items():
            patch.setenv(name, value)
        patch.setattr("sys.stdout", Terminal() if columns else io.StringIO())
        assert app(arguments, standalone_mode=False, prog_name="provision") in (None, 0, 3)
        return sys.stdout.getvalue()


def plain(text):
    return "".join(f"{line.rstrip()}\n" for line in ESCAPE.sub("", text).splitlines())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_screen_is_its_file_and_says_what_a_pipe_says(name):
    piped = screen(COMMANDS[name])
    assert "\x1b" not in piped and not re.search(r"\de[+-]\d|…", piped)
    narrow, wide = (screen(COMMANDS[name], columns) for columns in (80, 100))
    for columns, shown in ((80, plain(narrow)), (100, plain(wide))):
        assert Counter(shown.split()) == Counter(piped.split()), "a word is broken"
        assert max(map(len, shown.splitlines())) <= columns
    if name in ("plan", "infeasible"):
        check_colours(narrow)
        check_colours(screen(COMMANDS[name], 80, NO_COLOR="1"), {0, 1, 2})
    if os.environ.get("LORA_REWRITE_SCREENS"):
        (SCREENS / f"{name}.txt").write_text(plain(narrow))
    assert plain(narrow) == (SCREENS / f"{name}.txt").read_text()


def check_colours(text, allowed=READABLE):
    codes = {int(code) for group in ESCAPE.findall(text) for code in group.split(";") if code}
    assert codes and codes <= allowed, codes


@pytest.mark.parametrize("command", [[], ["models"], ["simulate"], ["table4"], ["watch"], ["compare"]], ids="".join)
def test_help_names_every_option_in_whole_words(command):
    found = typer.main.get_command(app)
    for name in command:
        found = found.commands[name]
    shown = screen([*command, "--help"], 80)
    said = set(plain(shown).split())
    for option in found.params:
        assert option.opts[0] in said
        assert set(option.help.split()) <= said, option.opts[0]
    check_colours(shown)


def on_terminal(arguments, stream):
    """(stdout, stderr) of a process, one of them a real terminal of 80 columns."""
    ends = pty.openpty()
    fcntl.ioctl(ends[1], termios.TIOCSWINSZ, struct.pack("HHHH", 50, 80, 0, 0))
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: ends[1]}
    command = [sys.executable, "-m", "provisioning", *arguments]
    process = subprocess.Popen(command, **pipes, env=kept | {"TERM": "xterm-256color"})
    os.close(ends[1])
    seen = b""
    try:
        while piece := os.read(ends[0], 65536):
            seen += piece
    except OSError:  # the last writer has gone
        pass
    os.close(ends[0])
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, (err or seen).decode()
    texts = [seen if piece is None else piece for piece in (out, err)]
    return tuple(piece.decode().replace("\r\n", "\n") for piece in texts)


@pytest.mark.long
def test_progress_is_shown_on_a_terminal_alone():
    shown, progress = on_terminal([*SIMULATE[:-1], "2000"], "stderr")
    assert "simulating, run" in progress and shown == screen([*SIMULATE[:-1], "2000"])
    quiet, progress = on_terminal([*SIMULATE, "--json"], "stderr")
    assert progress == "" and json.loads(quiet)


def test_a_real_terminal_shows_the_same_screen_and_raw_json():
    assert on_terminal(COMMANDS["models"], "stdout")[0] == screen(COMMANDS["models"], 80)
    shown = screen(["models", "--json"], 80)
    assert "\x1b" not in shown and json.loads(shown)[0]["hidden"] == 2880


@pytest.mark.parametrize(("shown", "expected"), [
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
    (words.sparkline([0, 1, 2, 4]), "▁▃▅█"),
    ([words.moment(s) for s in (90, 750, 22_500, 302_400)], ["90 s", "12.5 min", "6.25 h", "3.5 days"]),
], ids=str)  # fmt: skip
def test_numbers(shown, expected):
    assert shown == expected
    assert len(words.sparkline(list(range(1000)))) <= 48


def examples():
    """(document, the command of a shell block, the text block after it) where that is a plan's."""
    for document in ("README.md", "docs/provisioning.md"):
        found = blocks(document)
        for block, after in pairwise(found):
            asked = [line for line in block.commands if line.startswith("provision --slo")]
            if block.language in SHELL and asked and after.language == "text":
                yield document, asked[0], after.text


@pytest.mark.long
@pytest.mark.parametrize(("document", "command", "text"), list(examples()), ids=lambda value: value[:40])
def test_documents_print_what_the_command_says(document, command, text, tmp_path):
    typed = re.sub(r"^provision", f"{sys.executable} -m provisioning", command)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        typed, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )  # fmt: skip
    said = " ".join(done.stdout.split())
    for part in text.split("...\n"):
        assert " ".join(part.split()) in said, said


def test_documents_show_a_verdict_each_way():
    texts = " ".join(text for _, _, text in examples())
    assert "A LoRA Server is worth it" in texts and "A LoRA Server is not worth it here" in texts
