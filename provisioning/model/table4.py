"""The paper's Table 4 beside our model: Mixtral-8x7B, 8 server GPUs, hosts of four, 512 adapters."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from lora_server.placement import Layout
from lora_server.spec import PRESETS
from provisioning.model.hardware import GPUS, Cluster
from provisioning.model.latency import StepModel
from provisioning.workload.workload import zipf

# (layout, batch): receive, LoRA, send, base MoE, in us
PAPER: dict[tuple[str, int], tuple[float, float, float, float]] = {
    ("ep1-pp8", 128): (243, 342, 384, 493),
    ("ep2-pp4", 128): (155, 212, 221, 493),
    ("ep4-pp2", 128): (145, 142, 207, 492),
    ("ep8-pp1", 128): (173, 163, 255, 493),
    ("ep1-pp8", 256): (527, 526, 734, 762),
    ("ep2-pp4", 256): (279, 315, 402, 764),
    ("ep4-pp2", 256): (246, 204, 396, 763),
    ("ep8-pp1", 256): (310, 205, 441, 763),
}
COLUMNS = ("receive", "compute", "send", "base_ffn")


@dataclass(frozen=True)
class Residual:
    """One cell: `in_sample` says that the constants were fitted to it."""

    layout: str
    batch: int
    column: str
    paper_us: float
    model_us: float
    in_sample: bool

    @property
    def relative(self) -> float:
        """Model over paper, minus 1."""
        return self.model_us / self.paper_us - 1


def paper_model() -> StepModel:
    """Return the set-up of appendix A.2.1; Zipf 1.2 and rank 64 as in section 6.1; the paper's wire."""
    return StepModel(
        spec=PRESETS["mixtral-8x7b"],
        cluster=Cluster(gpu=GPUS["hopper-96"], gpus_per_node=4),
        popularity=zipf(1.2, 512),
        lora_rank=64,
        instance_gpus=2,
        once_per_shard=False,
    )


def residuals() -> list[Residual]:
    """Read all 32 cells."""
    model, cells = paper_model(), []
    for (layout, batch), paper in PAPER.items():
        latency = model.lora(batch, Layout.parse(layout))
        ours = (latency.receive.value, latency.compute.value, latency.send.value, model.base.ffn_us(batch).value)
        for column, paper_us, model_us in zip(COLUMNS, paper, ours, strict=True):
            fitted = batch == 128 or column == "base_ffn"
            cells.append(Residual(layout, batch, column, paper_us, model_us, in_sample=fitted))
    return cells


def as_json() -> list[dict[str, object]]:
    """Return every cell with its residuals."""
    return [{**asdict(cell), "residual": cell.relative} for cell in residuals()]
