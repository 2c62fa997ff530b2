"""The four models that are measured, and the two sites of a layer of each."""

from __future__ import annotations

from dataclasses import dataclass

from kernels_cuda.layout import BlockShape, PairShape

NUM_ADAPTERS = 512
ZIPF = 1.2
ELEMENT_BYTES = 2  # bf16


@dataclass(frozen=True)
class Site:
    """A projection of all experts of one layer. `slices` pairs (A, B) of equal size lie side by side in its output."""

    name: str
    in_width: int
    slice_width: int
    slices: int
    lora_rank: int
    combine: bool  # routing weights and a sum per token, or one result per (token, expert)

    @property
    def out_width(self) -> int:
        return self.slices * self.slice_width

    @property
    def shape(self) -> BlockShape:
        pairs = [PairShape(self.lora_rank, i * self.slice_width, self.slice_width, 2.0) for i in range(self.slices)]
        return BlockShape(self.in_width, tuple(pairs))

    @property
    def a_bytes(self) -> int:
        return self.slices * self.lora_rank * self.in_width * ELEMENT_BYTES

    @property
    def b_bytes(self) -> int:
        return self.out_width * self.lora_rank * ELEMENT_BYTES


@dataclass(frozen=True)
class Model:
    """A mixture of experts with a LoRA of one rank on all of them."""

    name: str
    hidden: int
    ffn: int
    num_experts: int
    top_k: int
    lora_rank: int

    @property
    def sites(self) -> tuple[Site, Site]:
        return (
            Site("gate_up", self.hidden, self.ffn, 2, self.lora_rank, combine=False),
            Site("down", self.ffn, self.hidden, 1, self.lora_rank, combine=True),
        )


MODELS = {
    model.name: model
    for model in (
        Model("mixtral-8x7b", 4096, 14336, 8, 2, 64),
        Model("qwen3-30b-a3b", 2048, 768, 128, 8, 32),
        Model("gpt-oss-20b", 2880, 2880, 32, 4, 64),
        Model("dbrx", 6144, 10752, 16, 4, 64),
    )
}
