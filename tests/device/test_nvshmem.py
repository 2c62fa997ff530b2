"""What calls NVSHMEM: against its real packages where they are, on GPUs where there are some."""

from __future__ import annotations

import ast
import ctypes
import importlib
import inspect
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from lora_server.demo import children
from lora_server.device.nvshmem import library as nvshmem
from lora_server.device.nvshmem import nvshmem_build
from lora_server.device.nvshmem.world import UID_BYTES, Heap, World, _Entered
from lora_server.device.protocol import needs
from lora_server.device.protocol.needs import missing_for_nvshmem
from lora_server.device.protocol.slots import SlotSizes
from lora_server.errors import WorldError
from lora_server.wire import lora_server_pb2 as pb
from tests.support.gpu import nvshmem_pe
from tests.support.serving import HANG_SECONDS
from tests.support.sources import ROOT


def bindings():
    try:
        needs.host_library()
        return importlib.import_module("nvshmem.bindings")
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"nvshmem4py and NVSHMEM's host library: {error}")


def test_calls_are_those_that_nvshmem4py_has():
    real = bindings()
    tree = ast.parse(inspect.getsource(nvshmem))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    called = {call.func.attr: len(call.args) for call in calls if ast.unparse(call.func).startswith("bindings.")}
    assert {"hostlib_init_attr", "set_attr_uniqueid_args", "cumodule_init", "ptr"} <= set(called)
    for name, count in called.items():
        if not inspect.isclass(getattr(real, name)):
            assert len(inspect.signature(getattr(real, name)).parameters) == count, name
    attributes = real.InitAttr()
    attributes.version = (1 << 16) + real.init_attr_dtype.itemsize
    assert attributes.version == 65680, "NVSHMEMX_INIT_ATTR_INITIALIZER of NVSHMEM 3"
    assert real.Flags.INIT_WITH_UNIQUEID == 8
    assert ctypes.CDLL(needs.host_library()).nvshmem_calloc


def test_a_unique_id_takes_no_gpu():
    bindings()
    uids = [nvshmem.NvshmemGpu.new_uid(SimpleNamespace()) for _ in range(2)]
    assert [len(uid) for uid in uids] == [UID_BYTES] * 2


def test_a_module_is_linked_with_nvshmem_once(tmp_path):
    if why := nvshmem_build.missing():
        pytest.skip(why)
    source = '#include <nvshmem.h>\nextern "C" __global__ void mine(int* to) { *to = nvshmem_my_pe(); }\n'
    path = nvshmem_build.cached(source, "sm_90a", ["-DWARPS=8"], tmp_path)
    module = path.read_bytes()
    assert b"mine" in module and nvshmem_build.STATE in module
    path.write_bytes(b"kept")
    assert nvshmem_build.cached(source, "sm_90a", ["-DWARPS=8"], tmp_path).read_bytes() == b"kept"
    assert [one.name for one in tmp_path.iterdir()] == [path.name], "no half of a file"
    with pytest.raises(nvshmem_build.BuildError, match="no storage class"):
        nvshmem_build.cached("nonsense;", "sm_90a", [], tmp_path)


def test_what_a_host_lacks_for_it_is_named_with_its_cure(tmp_path, monkeypatch):
    def nowhere() -> str:
        raise OSError("libnvshmem_host.so.3: not found")

    (lack,) = missing_for_nvshmem(nowhere, str)
    assert "libnvshmem_host" in lack and "pip install '.[cuda]'" in lack
    monkeypatch.setitem(sys.modules, "nvshmem", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "nvshmem.bindings", SimpleNamespace())
    lacks = missing_for_nvshmem(lambda: str(tmp_path / "libnvshmem_host.so.3"), lambda: "no nvidia-cuda-cccl")
    assert ["nvshmem_bootstrap_uid" in lacks[0], "no nvidia-cuda-cccl" in lacks[1]] == [True, True]
    (tmp_path / "nvshmem_bootstrap_uid.so.3").touch()
    assert missing_for_nvshmem(lambda: str(tmp_path / "libnvshmem_host.so.3"), str) == []


@pytest.mark.parametrize(("shards", "clients"), [(1, 1), (1, 5), (4, 3), (3, 8)])
def test_no_two_links_of_a_pe_lie_at_one_place(shards, clients):
    heap = Heap(shards, clients, SlotSizes.of(nvshmem_pe.LAYOUT))
    link = heap.sizes.requests + heap.sizes.responses
    for of_one in (
        *([heap.at(client, shard) for client in range(clients)] for shard in range(shards)),
        *([heap.at(client, shard) for shard in range(shards)] for client in range(clients)),
    ):
        assert len(set(of_one)) == len(of_one) and all(at % link == 0 and at + link <= heap.nbytes for at in of_one)
    assert heap.nbytes == max(shards, clients) * link, "and no more is taken"


def test_a_world_that_does_not_come_about_is_said_so_in_time():
    """Some PE never comes, until `end`."""
    end = threading.Event()

    def enter(*place: object):
        end.wait(HANG_SECONDS)
        raise RuntimeError("the bootstrap failed")

    gpu, own = SimpleNamespace(enter=enter), _Entered()
    place = pb.Place(world=9, rank=1, size=2, uid=b"x" * UID_BYTES, slots=2)
    with pytest.raises(WorldError, match=r"PE 1 of 2, world 9: it was not entered in 0\.01 s; start this process anew"):
        own.enter(World(gpu, place, 1, nvshmem_pe.LAYOUT), 0.01)
    end.set()
    other = pb.Place(world=10, rank=1, size=2, uid=b"y" * UID_BYTES, slots=2)
    with pytest.raises(WorldError, match="was PE 1 of world 9, and a process is in one world in its life; start it"):
        own.enter(World(gpu, other, 1, nvshmem_pe.LAYOUT), 0.01)
    with pytest.raises(WorldError, match="RuntimeError: the bootstrap failed"):
        World(gpu, place, 1, nvshmem_pe.LAYOUT).enter(HANG_SECONDS)


@pytest.mark.emulator
def test_a_pe_that_sends_to_itself_on_this_cpu():
    from tests.support.gpu.emulated_world import EmulatedWorldGpu

    gpu = EmulatedWorldGpu()
    assert nvshmem_pe.play(gpu, 0, 1, gpu.new_uid()) == "came"


@pytest.mark.cuda
@pytest.mark.parametrize("size", [1, 2])
def test_a_step_is_put_on_gpus(size):
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} NVIDIA GPUs")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT, "env": os.environ}
    commands = [[sys.executable, "-m", "tests.support.gpu.nvshmem_pe", str(rank), str(size)] for rank in range(size)]
    pes = [subprocess.Popen(children.own(command), **pipes) for command in commands]
    try:
        uid = pes[0].stdout.readline()
        for pe in pes:
            pe.stdin.write(uid)
            pe.stdin.flush()
        assert [pe.stdout.readline().strip() for pe in pes] == ["came", "sent"][:size]
    finally:
        for pe in pes:
            pe.kill()
            pe.communicate()
