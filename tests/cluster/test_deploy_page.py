"""The first commands of deploy/README.md, as they stand, on hosts that share nothing: from nothing to tokens."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lora_server.demo import children, tiny
from lora_server.demo.engine import Sequence, generate, load_model
from tests.support.doc_commands import LORA, READY_SECONDS, blocks, furnish
from tests.support.hosts import switch
from tests.support.serving import HANG_SECONDS, until
from tests.support.sources import ROOT

PAGE, HERE = "deploy/README.md", "tests/cluster/test_deploy_page.py"
NEW_TOKENS = 8  # the page's


class EmptyHost:
    """A host at an address of the page's, with a folder that no other host sees."""

    def __init__(self, host, address, folder):
        host.inside.run("ip", "addr", "add", f"{address}/24", "dev", "eth0")
        self.prefix, self.folder = host.prefix, folder
        (folder / "tmp").mkdir(parents=True)

    def command(self, typed, others):
        """Return the command line that types a command there, where the folders of `others` are empty."""
        hidden = "".join(f"mount -t tmpfs none '{other.folder}'; " for other in others)
        script = f"set -eu; {hidden}cd '{self.folder}'; export TMPDIR='{self.folder}/tmp'; exec {typed}"
        return [*self.prefix, "unshare", "--mount", "bash", "-c", script]


@pytest.fixture
def short_path():
    """A folder whose path leaves room for the names of Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="lora-") as folder:
        yield Path(folder)


def test_the_page_leads_from_empty_hosts_to_an_adapters_tokens(tmp_path, short_path):
    serve, engine = (block for block in blocks(PAGE) if block.why == HERE)
    own = {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    how = {"env": os.environ | own, "stdin": subprocess.DEVNULL}
    furnish(tmp_path)
    with switch() as wires:
        hosts = [EmptyHost(wires.host(), f"10.0.0.{n}", short_path / f"{n}") for n in (1, 2, 3)]
        first, second, third = hosts
        for host in (first, second):
            (host.folder / "Mixtral-8x7B").mkdir()
            shutil.copy(tmp_path / "Mixtral-8x7B/config.json", host.folder / "Mixtral-8x7B")
        shutil.copytree(tmp_path / "adapters", first.folder / "adapters")
        shutil.copytree(tmp_path / "Mixtral-8x7B", third.folder / "Mixtral-8x7B")
        (third.folder / "engine.py").write_text(engine.text)
        nodes = []
        try:
            for host, command in zip((first, second), serve.commands, strict=True):
                others = [other for other in hosts if other is not host]
                with (host.folder / "log").open("wb") as log:
                    nodes.append(children.start(host.command(command, others), stdout=log, stderr=log, **how))
            ready = children.start([*first.prefix, sys.executable, "-m", "tests.support.doc_commands", LORA], **how)
            until(lambda: any(one.poll() is not None for one in (ready, *nodes)), "node 0 is ready", READY_SECONDS)
            logs = [(host.folder / "log").read_text() for host in (first, second)]
            assert ready.poll() == 0 and [node.poll() for node in nodes] == [None, None], logs
            done = subprocess.run(
                third.command(f"{sys.executable} engine.py", (first, second)),
                capture_output=True, text=True, check=True, timeout=HANG_SECONDS, **how,
            )  # fmt: skip
        finally:
            codes = [children.stop(node, HANG_SECONDS) for node in reversed(nodes)]
    assert codes == [0, 0] and "activations go over TCP" in done.stdout
    printed = json.loads(done.stdout.splitlines()[-1])
    prompt, tokens = printed[:-NEW_TOKENS], printed[-NEW_TOKENS:]
    base = load_model(tmp_path / "Mixtral-8x7B")
    without = generate(base, [Sequence(prompt, None)], NEW_TOKENS)[0].tokens
    oracle = tiny.peft_model(base, tmp_path / "adapters/code")
    assert generate(oracle, [Sequence(prompt, None)], NEW_TOKENS)[0].tokens == tokens != without
