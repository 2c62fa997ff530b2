"""The container file, read and not built: no container engine is here. What it copies makes the wheel, what it installs
exists, and its image fits the chart's pods."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import yaml

from lora_server.config import ServeConfig
from tests.support.serving import HANG_SECONDS
from tests.support.sources import FILES, ROOT

LINES = re.sub(r"\\\n\s*", "", (ROOT / "deploy/Containerfile").read_text()).splitlines()
STEPS = [tuple(line.split(maxsplit=1)) for line in LINES if line and not line.startswith("#")]
CHART = (ROOT / "deploy/helm/lora-server/templates/_helpers.tpl").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def of(kind):
    return [rest for step, rest in STEPS if step == kind]


def stages():
    """Names of stages, each with what it is built from."""
    return {name: base for base, name in (line.split(" AS ") for line in of("FROM"))}


def test_stages_stand_on_a_pinned_base_and_on_one_another():
    found = stages()
    bases, copied = set(found.values()) - set(found), set(re.findall(r"--from=(\S+)", "\n".join(of("COPY"))))
    assert bases == {"${BASE}"} and copied <= set(found) and {"cpu", "cuda"} <= set(found)
    (base,) = [rest for rest in of("ARG") if rest.startswith("BASE=")]
    assert re.fullmatch(r"BASE=python:3\.\d+\.\d+-slim-\w+", base), "a tag of one patch release"


def test_what_is_copied_makes_the_wheel(tmp_path):
    """With every module and every file that a checkout's packages have."""
    for line in of("COPY"):
        if line.startswith("--from="):
            continue
        *sources, target = line.split()
        for name in sources:
            path = ROOT / name
            if path.is_dir():
                shutil.copytree(path, tmp_path / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(path, tmp_path / target)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", "dist", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "dist").iterdir()
    with zipfile.ZipFile(wheel) as file:
        packed = set(file.namelist())
    assert {str(path.relative_to(ROOT)) for path in FILES} <= packed
    assert "lora_server/wire/lora_server.proto" in packed


def test_what_is_installed_exists():
    (extras,) = [rest.removeprefix("EXTRAS=") for rest in of("ARG") if rest.startswith("EXTRAS=")]
    assert {*extras.split(","), "cuda"} <= set(PROJECT["optional-dependencies"])
    installs = [line for line in of("RUN") if "pip install" in line]
    assert len(installs) == 2 and all("-c constraints.txt" in line for line in installs)
    venv = re.search(r"-m venv (\S+)", "\n".join(of("RUN")))[1]
    assert all(line.startswith(f"{venv}/bin/pip") for line in installs)
    assert all(line.endswith(f" {venv} {venv}") for line in of("COPY") if line.startswith("--from="))
    assert f"PATH={venv}/bin:" in "\n".join(of("ENV"))
    (entry,) = of("ENTRYPOINT")
    assert set(yaml.safe_load(entry)) <= set(PROJECT["scripts"])


def test_the_image_is_what_the_chart_runs():
    user = int(re.search(r"runAsUser: (\d+)", CHART)[1])
    assert of("USER") == [f"{user}:{user}"] and f"useradd --uid {user} " in "\n".join(of("RUN"))
    assert re.search(r"command: \[([\w-]+),", CHART)[1] in PROJECT["scripts"]
    written = set(re.findall(r"\{name: (?:data|tmp), mountPath: (\S+)\}", CHART))
    (volumes,) = of("VOLUME")
    assert set(yaml.safe_load(volumes)) == written
    home = re.search(r"HOME=(\S+)", "\n".join(of("ENV")))[1]
    assert home in written, "CuPy compiles kernels into a directory below it"
    defaults = [ServeConfig.model_fields[name].default.port for name in ("listen", "http")]
    assert [int(port) for port in of("EXPOSE")[0].split()] == defaults
