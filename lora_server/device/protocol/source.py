"""The kernels' sources, each as one text for NVRTC or nvcc; see kernels_cuda.build."""

from __future__ import annotations

from pathlib import Path

from lora_server.device.protocol import codes
from lora_server.wire import slot

SERVES = ("serve.cu", "serve_e4m3.cu")  # of a shard: for rows as they are, and in 8 bits
SOURCES = (*SERVES, "link.cu")
ONE_WARP = ("link_wait",)  # kernels of one warp: they wait where a kernel that serves may have to start
FILES = {path.name: path.read_text() for path in sorted(Path(__file__).parent.parent.glob("*/*.cu*"))}
FILES |= {"codes.cuh": codes.HEADER, "slot.h": Path(slot.__file__).with_name("slot.h").read_text()}
