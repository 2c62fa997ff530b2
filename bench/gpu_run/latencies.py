"""Latencies of the instructions that make up a device protocol: nanoseconds of each, in a row in one thread."""

from __future__ import annotations

from typing import Any

import numpy as np


def _load(how: str, where: str) -> str:
    return f'asm volatile("ld.{how}.global.u64 %0, [%1];" : "=l"(v) : "l"({where} + v) : "memory");'


def _store(how: str, where: str) -> str:
    return f'asm volatile("st.{how}.global.u64 [%0], %1;" :: "l"({where} + 1), "l"(v) : "memory");'


TIMES = {  # name: the repetitions, and the statement; `v` is 0, and makes each load wait for the one before
    "load_from_l2": (1000, _load("relaxed.gpu", "near")),
    "load_acquire_gpu": (1000, _load("acquire.gpu", "near")),
    "load_acquire_sys": (1000, _load("acquire.sys", "near")),
    "load_from_host": (200, _load("relaxed.sys", "host")),
    "store_release_gpu": (1000, _store("release.gpu", "near")),
    "store_release_sys": (1000, _store("release.sys", "near")),
    "store_release_host": (200, _store("release.sys", "host")),
    "fence_proxy_all": (1000, 'asm volatile("fence.proxy.async;" ::: "memory");'),
    "fence_proxy_global": (1000, 'asm volatile("fence.proxy.async.global;" ::: "memory");'),
    "sleep_20_ns": (1000, 'asm volatile("nanosleep.u32 20;" ::: "memory");'),
    "clock": (1000, "v = now() == 0;"),
}
SOURCE = """
typedef unsigned long long word;
__device__ __forceinline__ word now() {
    word v;
    asm volatile("mov.u64 %%0, %%%%globaltimer;" : "=l"(v) :: "memory");
    return v;
}
extern "C" __global__ void latencies(word* near, word* host, word* out) {
    word v = 0, least = ~0ull;
    for (int i = 0; i < 100; i++) {  // the clock's tick
        const word began = now();
        word next = began;
        while (next == began) next = now();
        if (next - began < least) least = next - began;
    }
    *out++ = least;
%s
}
"""


def source() -> str:
    """CUDA C++ of one kernel, which fills `out` with the clock's tick and then the times of all repetitions."""
    loop = (
        "    {{\n        const word began = now();\n#pragma unroll 1\n"
        "        for (int i = 0; i < {}; i++) {{ {} }}\n        *out++ = now() - began + v;\n    }}"
    )
    return SOURCE % "\n".join(loop.format(times, text) for times, text in TIMES.values())


def latencies() -> dict[str, Any]:
    """Nanoseconds: the tick of %globaltimer, and of each instruction on average."""
    import cupy

    words = 1 + len(TIMES)
    near, out = cupy.zeros(64, cupy.uint64), cupy.zeros(words, cupy.uint64)
    host = cupy.cuda.alloc_pinned_memory(64)
    np.frombuffer(host, np.uint8, 64)[:] = 0
    kernel = cupy.RawModule(code=source()).get_function("latencies")
    for _ in range(2):  # the second finds code and clocks warm
        kernel((1,), (1,), (near, cupy.uint64(host.ptr), out))
    tick, *spans = out.get().tolist()
    each = {name: round(span / times, 1) for (name, (times, _)), span in zip(TIMES.items(), spans, strict=True)}
    return {"clock_tick_ns": tick, **{f"{name}_ns": ns for name, ns in each.items()}}
