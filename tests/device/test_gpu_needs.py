"""What a machine must have for links that no host touches, and what the driver is asked for."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from kernels_cuda.cuda import on_device
from lora_server.device.protocol.needs import FEATURES, Answers, missing, missing_for_network


def test_what_a_machine_lacks_is_named_with_its_cure():
    assert missing(Answers(13000, {})) == []
    (line,) = missing(Answers(0, {"cuda.bindings": "ImportError: x"}))
    assert line == "cuda.bindings: ImportError: x; pip install '.[cuda]' in a checkout of lora-server"
    (line,) = missing(Answers(0, {}))
    assert "no NVIDIA driver answers" in line
    old = missing(Answers(12020, {}, frozenset(["HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"])))
    assert "got CUDA 12.2, expected 12.4" in old[0] and "outside WSL" in old[1]


def test_what_a_network_of_gpus_lacks_is_read_from_the_host(tmp_path):
    lacks = "\n".join(missing_for_network(tmp_path))
    assert all(word in lacks for word in ("mlx5", "uverbs", "nvidia_peermem", "PeerMappingOverride"))
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "dev/infiniband/uverbs0").mkdir(parents=True)
    (tmp_path / "proc/modules").write_text("nvidia_peermem 16384 0 - Live 0x0\n")
    (tmp_path / "proc/driver/nvidia/params").write_text('RegistryDwords: "PeerMappingOverride=1;"\n')
    assert missing_for_network(tmp_path) == []
    (tmp_path / "proc/modules").write_text("nvidia 1 0 - Live 0x0\n")
    assert len(missing_for_network(tmp_path)) == 1 and missing_for_network(tmp_path, dma_buf=True) == []


def test_no_driver_is_asked_for_an_api_that_it_has_switched_off():
    """The first version of stream memory operations is off by default; we call the second, which is always on."""
    assert "CAN_USE_64_BIT_STREAM_MEM_OPS" in FEATURES and not any(name.endswith("_V1") for name in FEATURES)


@pytest.mark.parametrize(("before", "calls"), [(0, ["device 3"]), (77, ["device 3", "context 77"])])
def test_a_thread_without_a_context_is_given_none_on_another_gpu(monkeypatch, before, calls):
    """cudaSetDevice(0), to go back to where a new thread believes it was, would make a context on GPU 0."""
    said = list[str]()
    driver = SimpleNamespace(ctxGetCurrent=lambda: before, ctxSetCurrent=lambda one: said.append(f"context {one}"))
    runtime = SimpleNamespace(setDevice=lambda index: said.append(f"device {index}"))
    cupy = SimpleNamespace(cuda=SimpleNamespace(driver=driver, runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with on_device(torch.device("cuda", 3)):
        assert said == ["device 3"]
    assert said == calls
