"""`lora-server doctor` on machines written as files, and on this one."""

import socket
from importlib.metadata import PackageNotFoundError

import pytest
from packaging.requirements import Requirement

from lora_server import __version__
from lora_server.address import Address
from lora_server.demo.cluster_check import ShardPath, compared, server_findings
from lora_server.doctor import Machine, NodeResources, Outcome, diagnose, gpu, host, network, software
from lora_server.host_memory import available_bytes, container_bytes
from lora_server.wire import lora_server_pb2 as pb

WELL = {
    "/proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable:   33554432 kB\n",
    "/proc/cpuinfo": "flags\t\t: fpu avx2 avx512f\n",
    "/dev/shm/.keep": "",
}
NIC = {"/sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n"}
DOWN = {"/sys/class/infiniband/mlx5_0/ports/1/state": "1: DOWN\n"}
DRIVER = "/proc/driver/nvidia/version"
FULL = {"/sys/fs/cgroup/memory.max": "1000000000\n", "/sys/fs/cgroup/memory.current": "999000000\n"}
UNLIMITED = {"/sys/fs/cgroup/memory.max": "max\n", "/sys/fs/cgroup/memory.current": "999\n"}
DRIVER_580 = {DRIVER: "NVRM version: NVIDIA UNIX Kernel Module  580.65.06  Sun"}
DRIVER_535 = {DRIVER: "NVRM version: NVIDIA UNIX Kernel Module  535.104.05  Sat"}
NO_LOCKING = {"limits": {"NOFILE": -1, "MEMLOCK": 65536}}
ODD = {
    "one processor": ({}, {"processors": 1}, "processors", Outcome.WARNING),
    "half a processor": ({"/sys/fs/cgroup/cpu.max": "50000 100000\n"}, {}, "processors", Outcome.WARNING),
    "narrow processor": ({"/proc/cpuinfo": "flags : fpu sse2\n"}, {}, "vector units", Outcome.WARNING),
    "little memory": ({"/proc/meminfo": "MemAvailable: 2097152 kB\n"}, {}, "memory", Outcome.WARNING),
    "no memory": ({"/proc/meminfo": "MemAvailable: 1024 kB\n"}, {}, "memory", Outcome.FAILED),
    "a full container": (FULL, {}, "memory", Outcome.FAILED),
    "an unlimited container": (UNLIMITED, {}, "memory", Outcome.OK),
    "no meminfo": ({"/proc/meminfo": ""}, {}, "memory", Outcome.WARNING),
    "few descriptors": ({}, {"limits": {"NOFILE": 1024, "MEMLOCK": -1}}, "open files", Outcome.WARNING),
    "no descriptors": ({}, {"limits": {"NOFILE": 64, "MEMLOCK": -1}}, "open files", Outcome.FAILED),
    "an old kernel": ({}, {"release": "4.18.0-553.el8"}, "kernel", Outcome.FAILED),
    "a clock that drifts": ({}, {"clock_synchronised": False}, "clock", Outcome.WARNING),
    "a device without a driver": ({"/dev/nvidia0": ""}, {}, "driver", Outcome.FAILED),
    "an old driver": (DRIVER_535, {}, "driver", Outcome.FAILED),
    "no CUDA in torch": (DRIVER_580, {}, "torch", Outcome.FAILED),
    "a port that is down": (DOWN, {}, "infiniband", Outcome.WARNING),
    "a NIC that may lock nothing": (NIC, NO_LOCKING, "locked memory", Outcome.WARNING),
}


def machine(tmp_path, files=(), **fields):
    for name, text in {**WELL, **dict(files)}.items():
        path = tmp_path / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    well = {"release": "6.1.0", "processors": 8, "limits": {"NOFILE": -1, "MEMLOCK": -1}, "clock_synchronised": True}
    return Machine(tmp_path, **{**well, **fields})


def test_a_machine_that_is_well(tmp_path):
    found = diagnose(machine(tmp_path), NodeResources([]))
    assert {finding.state for finding in found if finding.check != "/dev/shm"} == {Outcome.OK}


@pytest.mark.parametrize("name", ODD)
def test_what_is_odd_is_found_and_has_a_cure(tmp_path, name):
    files, fields, check, state = ODD[name]
    found = diagnose(machine(tmp_path, files, **fields), NodeResources([]))
    assert [one.state for one in found if one.check == check] == [state]
    assert all(bool(one.cure) == (one.state is not Outcome.OK) for one in found)
    elsewhere = {one.check for one in found if one.state is not Outcome.OK} - {check, "/dev/shm", "compiler"}
    assert not elsewhere


def test_a_nic_and_a_gpu_that_do_not_know_each_other(tmp_path):
    nic = NIC | {DRIVER: "580.65.06"}
    strangers = list(gpu.infiniband(machine(tmp_path, nic)))
    assert [one.state for one in strangers] == [Outcome.OK, *[Outcome.WARNING] * 3]
    for one, cure in zip(strangers[1:], ("--device /dev/infiniband", "nvidia_peermem", "PeerMappingO"), strict=True):
        assert cure in one.cure
    friends = {"/proc/modules": "nvidia_peermem 16384 0\n", "/proc/driver/nvidia/params": "PeerMappingOverride=1\n"}
    friends |= {"/dev/infiniband/uverbs0": ""}
    assert [one.state for one in gpu.infiniband(machine(tmp_path, nic | friends))] == [Outcome.OK]


@pytest.mark.parametrize("files", [{}, DRIVER_580], ids=["no GPU", "a GPU"])
def test_half_of_nvshmem_is_said_where_there_are_gpus(tmp_path, monkeypatch, files):
    def version(package):
        if package != gpu.NVSHMEM:
            raise PackageNotFoundError
        return "3.4"

    monkeypatch.setattr(gpu, "version", version)
    found = [one.found for one in gpu.nvshmem(machine(tmp_path, files))]
    assert found == ([f"{gpu.NVSHMEM} without {gpu.NVSHMEM4PY}"] if files else [])


def test_shared_memory_that_is_not_mounted(tmp_path):
    written = machine(tmp_path)
    (tmp_path / "dev/shm/.keep").unlink()
    (tmp_path / "dev/shm").rmdir()
    assert [one.state for one in host.shared_memory(written)] == [Outcome.WARNING]


def test_a_port_that_is_taken_says_by_whom():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        places = [("--listen", Address("127.0.0.1", taken.getsockname()[1])), ("--http", Address("::1", 0))]
        found = next(iter(network.ports(NodeResources(places))))
    assert found.state is Outcome.FAILED
    assert "listens there" in found.found and "--listen" in found.cure


def test_directories(tmp_path):
    (tmp_path / "file").write_text("")
    places = [("--disk-cache", tmp_path / "new/er"), ("--disk-cache", tmp_path / "file/in")]
    places += [("--data-dir", tmp_path / ("x" * 90))]
    states = [one.state for one in network.directories(NodeResources([], places))]
    assert states[1:] == [Outcome.FAILED, Outcome.FAILED] and states[0] is not Outcome.FAILED


def test_versions():
    fits = {"torch>=2.8": True, "torch>=99": False, "no-such-package": False}
    fits |= {"no-such-package; python_version < '3'": True, "no-such-package; extra == 'vllm'": True}
    fits |= {"torch>=99; extra == 'vllm'": False}
    assert {line: software.misfit(Requirement(line)) == "" for line in fits} == fits


def test_no_limit_of_an_old_control_group_is_none():
    group = {"memory.limit_in_bytes": "9223372036854771712\n", "memory.usage_in_bytes": "999\n"}
    written = {"/proc/meminfo": WELL["/proc/meminfo"]} | {f"/sys/fs/cgroup/memory/{k}": v for k, v in group.items()}
    assert container_bytes(written.get) is None and available_bytes(written.get) == 32 * 2**30


@pytest.mark.parametrize(("version", "now", "ready", "wrong"), [
    (__version__, 1000.4, True, []),
    ("9.9", 1000.0, True, ["version"]),
    (__version__, 1007.0, True, ["clock"]),
    (__version__, 993.0, True, ["clock"]),
    (__version__, 1000.0, False, ["server"]),
])  # fmt: skip
def test_a_server_of_another_version_or_time(version, now, ready, wrong):
    reply = pb.StatusReply(version=version, now=now, ready=ready, reason="shards not up: [2]")
    found = list(server_findings("h:7400", reply, 999.0, 1001.0))
    assert [one.check for one in found if one.state is Outcome.WARNING] == wrong
    assert all(one.cure for one in found if one.state is not Outcome.OK)


def test_a_shard_that_is_far_from_the_others_in_speed_is_named():
    paths = {0: ShardPath(100.0, 2.0), 1: ShardPath(120.0, 1.9), 2: ShardPath(110.0, 0.4), 3: ShardPath(900.0, 2.1)}
    assert [one.check for one in compared(paths) if one.state is Outcome.WARNING] == ["shard 2", "shard 3"]
