"""`lora-server merge`: what it prints, and of what it warns."""

import json
import re

import pytest
import structlog
import torch
from typer.testing import CliRunner

from lora_server.cli import app
from lora_server.demo import tiny
from lora_server.merged import find_merged
from tests.support.screens import on_terminal


@pytest.fixture(autouse=True)
def _logs():
    """The command's logs go to the test's stderr, which ends with it."""
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A bfloat16 base model, and adapters whose deltas are about 0.1 and 1.5 of its weights."""
    root = tmp_path_factory.mktemp("merge")
    model = tiny.make_model("llama", dtype=torch.bfloat16)
    tiny.save_model(model, root / "base")
    for name, alpha in (("small", 1.6), ("large", 24.0)):
        tiny.make_adapter(model, root / name, lora_rank=4, seed=5, targets="all", alpha=alpha)
    return root


def flags(files, out, adapter="small", *more):
    return ["merge", "--base-model", str(files / "base"), "--adapter", str(files / adapter), "--out", str(out), *more]


def merge(*asked):
    found = CliRunner().invoke(app, flags(*asked))
    assert found.exit_code == 0, found.output
    return " ".join(found.stdout.split()), " ".join(found.stderr.split())


def test_errors_are_printed_beside_what_the_law_expects(files, tmp_path):
    shown, warnings = merge(files, tmp_path / "out")
    record = find_merged(tmp_path / "out")
    assert f"its delta is {record.delta_ratio:.2g} of the weights" in shown and not warnings
    assert re.search(r"rows of error, not merged error, merged ratio expected small \S+ \S+ \S+x 1\.00x", shown)
    assert re.search(r"the base model 1\.\de-03 \S+ 1\.7\dx 1\.74x another adapter \S+ \S+ 1\.2\dx 1\.23x", shown), (
        shown
    )
    found = CliRunner().invoke(app, flags(files, tmp_path / "again", "small", "--json"))
    assert json.loads(found.stdout)["delta_ratio"] == record.delta_ratio


def test_a_delta_that_is_large_beside_the_weights_gets_a_warning_with_figures_and_a_cure(files, tmp_path):
    _, warnings = merge(files, tmp_path / "out", "large")
    for rows, most, limit in (("the base model", "2", "0.57"), ("another adapter", "1.4", "0.92")):
        assert re.search(
            rf"warning: rows of {rows} have \d\.\d\d times the rounding error of an engine without a merge "
            rf"\(\S+ and \S+\), expected at most {most} times: the delta is 1\.\d\d of the weights, and up to {limit} "
            "keeps it; leave this adapter to the server, or merge it into a float32 copy of the base model",
            warnings,
        ), warnings


@pytest.mark.parametrize(("share", "warns"), [("0.24", True), ("0.5", False), ("0.8", False)])
def test_a_share_below_break_even_gets_a_warning(files, tmp_path, share, warns):
    _, warnings = merge(files, tmp_path / "out", "small", "--hot-share", share)
    expected = "warning: --hot-share 0.24: the server computes 1.52 entries per adapter row, and 1.00 without a merge"
    assert (expected in warnings) == warns == bool(warnings)


def test_a_terminal_shows_progress_and_a_pipe_does_not(files, tmp_path):
    _, seen = on_terminal("lora_server", flags(files, tmp_path / "out"), "stderr")
    assert "merging (MiB)" in seen
    _, warnings = merge(files, tmp_path / "again")
    assert warnings == ""
