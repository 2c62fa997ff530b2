"""The stages of a run, in order: what each shows, and for how long it may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """`python -m module`, which has the flags of bench.gpu_run.stage; killed after `seconds`.

    `resumes`: after a cut it goes on with what its record lacks, instead of beginning anew. `sliced`: several processes
    take turns on the GPU, unless the run is under MPS, so its times are those of the time slices.
    """

    name: str
    seconds: float
    about: str
    module: str
    arguments: tuple[str, ...] = ()
    resumes: bool = False
    sliced: bool = False


def _stage(
    name: str, seconds: float, about: str, module: str = "", resumes: bool = False, sliced: bool = False,
    arguments: tuple[str, ...] = (),
) -> Stage:  # fmt: skip
    return Stage(name, seconds, about, f"bench.gpu_run.{module or name}", arguments, resumes, sliced)


STAGES = (  # what is worth most first: a GPU may be lent for less than all of it
    _stage("probe", 60, "driver, tools, IPC and VMM export, MPS; compiles the kernels, reads their registers"),
    _stage("headline", 30, "the paper's cell: gate_up and down of Mixtral-8x7B, one shard of EP4, 128 and 256 tokens"),
    _stage("inproc", 75, "the persistent path without time slices: put, answer, add in a graph, beside loads"),
    _stage("live", 60, "a kernel that serves, its host and a client in one process: is it right, what waits for it?",
           "cuda_tests", arguments=("--file", "test_gpu_live.py")),
    _stage("correctness", 45, "every width, rank and popularity against float64, bits against bits", resumes=True),
    _stage("engine-gpu", 150, "a transformers engine and its server with --gpu-transport gpu, on one GPU, beside PEFT",
           "engine", sliced=True, arguments=("--transports", "gpu,shm")),
    _stage("ipc-gpu", 210, "the same, end to end; either side killed or stopped in a step: does the other live?",
           "ipc", sliced=True, arguments=("--transport", "gpu")),
    _stage("ours", 180, "our kernels at every cell; variants; ncu on two cells", resumes=True),
    _stage("sanitizer", 180, "memcheck and racecheck on small cases"),
    _stage("served", 60, "a kernel that serves by itself: right answers, latency by Link and captured, 1,000 steps",
           sliced=True),
    _stage("passes", 60, "a serving engine's pass in a CUDA graph: a host's bits, base rows that send nothing, times",
           sliced=True),
    _stage("codes", 60, "rows in 8 bits, by kernels: a host's codes, answers beside float64, times beside exact rows",
           sliced=True),
    _stage("first", 60, "who runs beside whom, which streams wait, time slices, latencies, one headline cell"),
    _stage("push-pull", 30, "one way and a step, pushed and pulled, beside a raw put of the same bytes, 16 KB to 16 MB",
           "push_pull"),
    _stage("nvshmem", 120, "2 to 4 PEs on the GPU: init, module init, put and signal, one killed", sliced=True),
    _stage("world", 180, "--gpu-transport nvshmem, its PEs on one GPU: tokens, times, an engine and the shard killed",
           sliced=True),
    _stage("tests", 180, "pytest -m cuda", "cuda_tests"),
    _stage("put", 120, "put / serve / wait in one process: latency, overlap with a GEMM, priority on and off"),
    _stage("engine", 180, "the same as engine-gpu, over CUDA IPC, where a host launches every step", sliced=True),
    _stage("ipc", 180, "the same as ipc-gpu, over CUDA IPC", sliced=True),
    _stage("peers", 360, "other projects' kernels at the same cells", resumes=True),
)  # fmt: skip
LENT_SECONDS = 840  # of a GPU: what the stages up to `ours` may take, together


def chosen(names: str) -> list[Stage]:
    """Return the stages of a comma-separated list, in the table's order; all for "". Raises ValueError."""
    wanted = [name for name in names.split(",") if name]
    known = [stage.name for stage in STAGES]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"--only: got {', '.join(unknown)}, expected some of {', '.join(known)}")
    return [stage for stage in STAGES if not wanted or stage.name in wanted]
