"""The wheel, installed into empty environments outside the checkout: it serves, joins and plans, on every Python here.

Third-party packages cannot be had for every Python: those of the tests' own are lent to an environment by a .pth file;
for other Pythons what `provision` needs is installed once, where there is an index.
"""

import contextlib
import hashlib
import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from lora_server import __version__, installed
from lora_server.demo import children, engine, launch
from tests.support.serving import HANG_SECONDS
from tests.support.sources import PACKAGES, ROOT
from tests.support.workload import NEW_TOKENS, workload

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PLAN = ["--slo", "ttft_p95=250ms,tpot_avg=100ms", "--model", "mixtral-8x7b"]
PLAN += ["--adapters", "64", "--instances", "4", "--batch-size", "64", "--no-simulate"]
KEPT = ROOT / "build/pythons"  # what other Pythons needed once is not installed again: `make clean`
INSTALL_SECONDS = 500.0  # 20 s on an idle machine

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(autouse=True, scope="module")
def nothing_of_the_checkout():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONPATH", raising=False)
        yield


def run(*command, seconds=HANG_SECONDS, cwd=None, given=None):
    """Its outcome, whatever it is."""
    how = {"capture_output": True, "text": True, "check": False}
    return subprocess.run([*map(str, command)], cwd=cwd, input=given, timeout=seconds, **how)


def pip(python, *arguments):
    return run(sys.executable, "-m", "pip", "--python", python, *arguments, seconds=INSTALL_SECONDS)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, so that nothing of an earlier build gets into it."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    done = pip(sys.executable, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", target, source)
    assert done.returncode == 0, done.stderr
    (found,) = target.glob("*.whl")
    return found


def test_the_wheel_is_for_linux_and_holds_the_packages_and_nothing_else(wheel):
    assert wheel.name == f"lora_server-{__version__}-py3-none-manylinux_2_28_x86_64.manylinux_2_28_aarch64.whl"
    assert "Operating System :: POSIX :: Linux" in PROJECT["classifiers"]
    files = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in files}
    assert {name for name in tops if not name.endswith(".dist-info")} == set(installed.NAMES) == set(PACKAGES)
    wanted = {str(file.relative_to(ROOT)) for name in PACKAGES for file in (ROOT / name).rglob("*.*")}
    wanted = {name for name in wanted if name.endswith((".py", ".pyi", ".cu", ".cuh", ".h", ".proto"))}
    assert wanted <= files


@dataclass(frozen=True)
class Environment:
    """A virtual environment with the wheel; commands run outside the checkout."""

    root: Path

    @property
    def python(self):
        return self.root / "bin/python"

    def run(self, program, *arguments, given=None):
        return run(self.root / "bin" / program, *arguments, cwd=self.root, given=given)

    def borrow(self, folder):
        """Make packages of another environment, of the same Python, importable here."""
        (self.packages / "borrowed.pth").write_text(f"{folder}\n")

    @property
    def packages(self):
        (found,) = self.root.glob("lib/python*/site-packages")
        return found


def environment(python, root, wheel):
    """Without pip, which takes seconds to install and is not needed: ours can do it from outside."""
    assert run(python, "-m", "venv", "--without-pip", root).returncode == 0
    done = pip(root / "bin/python", "install", "--no-deps", "--no-index", "--no-compile", wheel)
    assert done.returncode == 0, done.stderr
    return Environment(root)


def check_what_needs_nothing(here):
    """Leaves, the version, and what a console script says without its extra."""
    leaves = "lora_server, lora_server.spec, lora_server.placement, lora_server.errors, lora_server.address"
    done = here.run("python", "-c", f"import {leaves}; print(lora_server.__version__, lora_server.__file__)")
    assert done.stdout.split()[0] == __version__, done.stderr
    assert Path(done.stdout.split()[1]).is_relative_to(here.root)
    for program, extra in (("lora-server", "server"), ("provision", "provision")):
        done = here.run(program, "--help")
        assert (done.returncode, f"pip install '.[{extra}]'" in done.stderr) == (2, True), done.stderr
        assert done.stderr.count("\n") == 1


def check_provision(here):
    assert here.run("provision", "--version").stdout == f"provision {__version__}\n"
    done = here.run("provision", *PLAN, "--json", "--report", "plan.html", "--out", "plan.yaml")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["feasible"]
    assert (here.root / "plan.html").stat().st_size > 1000


def serve(here, load):
    """The installed server, on free ports; its modules are the wheel's, since the checkout is not on its path."""
    address, http = launch.free_address(), launch.free_address()
    flags = ["--base-model", load.base, "--adapters", load.adapters, "--layout", "ep2-pp1"]
    command = [here.root / "bin/lora-server", "serve", "--listen", address, "--http", http, *flags]
    log = here.root / "server.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(children.own([*map(str, command)]), stdout=stream, stderr=stream, cwd=here.root)
    return launch.RunningServer(process, address, http, log)


def generate(here, load, server):
    """What an engine with the installed connector answers."""
    job = engine.Job(str(load.base), server.address, [load.batch], NEW_TOKENS)
    done = here.run("python", "-m", "lora_server.demo.engine", given=msgspec.json.encode(job).decode())
    assert done.returncode == 0, done.stderr
    return msgspec.json.decode(done.stdout, type=engine.EngineResult).answers[0]


@pytest.mark.long
def test_it_serves_joins_and_plans(wheel, tmp_path):
    here = environment(sys.executable, tmp_path / "venv", wheel)
    check_what_needs_nothing(here)
    here.borrow(sysconfig.get_path("purelib"))
    assert here.run("lora-server", "--version").stdout == f"lora-server {__version__}\n"
    load = workload("mixtral")
    server = serve(here, load)
    try:
        server.wait_ready()
        rows = json.loads(here.run("lora-server", "adapters", "list", "--server", server.address, "--json").stdout)
        assert {row["name"] for row in rows} == set(load.paths)
        load.check(generate(here, load, server))
    finally:
        server.stop()
    check_provision(here)


def newest_python():
    """(name, path) of the newest that starts, on PATH or beside this one; this one itself is tested above."""
    for minor in range(15, sys.version_info.minor, -1):
        name = f"python3.{minor}"
        for candidate in [shutil.which(name), *sorted(Path(sys.base_prefix).parent.glob(f"*/bin/{name}"))]:
            if candidate and run(candidate, "-c", "import venv").returncode == 0:
                return name, str(candidate)
    return None


def packages_for(python, name):
    """A folder with what `provision` needs; skips the test where it cannot be had."""
    needs = ["numpy", *PROJECT["optional-dependencies"]["provision"]]
    folder = KEPT / f"{name}-{hashlib.sha256(repr(needs).encode()).hexdigest()[:12]}"
    if not folder.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=KEPT) as fresh:
            options = ["--quiet", "--disable-pip-version-check", "--only-binary=:all:", "--no-compile"]
            done = pip(python, "install", *options, "--target", f"{fresh}/packages", *needs)
            if done.returncode:
                pytest.skip(f"no index has what provision needs: {done.stderr.strip().splitlines()[-1]}")
            with contextlib.suppress(OSError):  # another run was quicker
                Path(fresh, "packages").rename(folder)
    return folder


@pytest.mark.long
def test_a_newer_python_plans(wheel, tmp_path):
    """What there is without torch, which is too large to be had for each."""
    newer = newest_python()
    if newer is None:
        pytest.skip(f"no Python newer than {sys.version_info.major}.{sys.version_info.minor} here")
    name, python = newer
    here = environment(python, tmp_path / "venv", wheel)
    check_what_needs_nothing(here)
    here.borrow(packages_for(python, name))
    check_provision(here)
