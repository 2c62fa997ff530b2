"""The systemd unit: systemd accepts it, and its command and variables are the server's."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lora_server.config import ServeConfig, load
from tests.support.serving import HANG_SECONDS
from tests.support.sources import ROOT

UNIT = (ROOT / "deploy/systemd/lora-server.service").read_text()
README = (ROOT / "deploy/README.md").read_text()
PROGRAM = "/opt/lora-server/bin/lora-server"


def value(name):
    return re.search(rf"^{name}=(.*)$", UNIT, re.MULTILINE)[1]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze here")
def test_systemd_accepts_the_unit(tmp_path):
    """With a program that is here; a line that systemd does not know fails."""
    here = UNIT.replace(PROGRAM, str(Path(sys.executable).parent / "lora-server"))
    for text, accepted in ((here, True), (here.replace("RestartSec=", "RestartSecs="), False)):
        (tmp_path / "lora-server.service").write_text(text)
        command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "lora-server.service")]
        how = {"capture_output": True, "text": True, "timeout": HANG_SECONDS, "check": False}
        done = subprocess.run(command, env=os.environ, **how)
        faults = [line for line in done.stderr.splitlines() if "lora-server.service" in line]
        assert (not faults and not done.returncode) == accepted, done.stderr


def test_the_server_takes_its_command_files_and_variables(monkeypatch, tmp_path):
    """The files are those of deploy/README.md."""
    command = shlex.split(value("ExecStart"))
    assert command == [PROGRAM, "serve", "--config", "/etc/lora-server/serve.yaml"]
    shared = re.search(r"^```yaml\n(# /etc/lora-server/serve.yaml.*?)^```", README, re.MULTILINE | re.DOTALL)[1]
    assert not [name for name in yaml.safe_load(shared) if name.replace("-", "_") not in ServeConfig.model_fields]
    (tmp_path / "serve.yaml").write_text(shared)
    own = re.search(r"^```ini\n# /etc/lora-server/node.env.*?\n(.*?)^```", README, re.MULTILINE | re.DOTALL)[1]
    for line in [*own.splitlines(), *value("Environment").split()]:
        name, _, text = line.partition("=")
        assert name == "HOME" or name.removeprefix("LORA_SERVER_").lower() in ServeConfig.model_fields, line
        monkeypatch.setenv(name, text.replace("%S", "/var/lib"))
    config = load({}, tmp_path / "serve.yaml")
    assert (config.nodes, config.node_rank) == (2, 1) and config.controller is not None
    assert str(config.data_dir) == f"/var/lib/{value('StateDirectory')}"
