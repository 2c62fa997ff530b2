"""Stage `engine`: a transformers engine and its server on one GPU, beside PEFT on the same.

Exact are PEFT's logits in float32; in bfloat16 ours may be as far from them as PEFT's own are. Greedy tokens are
counted as equal up to a sequence's first difference. PEFT takes its adapters one after another, ours all in one batch.
`--device cpu` plays the same in float32, where every token must be equal.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.gpu_run import stage
from bench.gpu_run.lab import record_starts
from bench.gpu_run.record import Record
from client_connector.transformers import attach
from lora_server.demo import tiny
from lora_server.demo.engine import load_model
from lora_server.demo.launch import running_server
from lora_server.errors import LoraServerError

WIDTH, LAYERS, HEAD_DIM, VOCABULARY = 512, 4, 64, 2048
RANKS = (8, 16, 32, 64)
SEQUENCES, PROMPT = 16, 24
TRANSPORTS = "cuda_ipc,shm"
RATIO, SLACK = 1.5, 1e-3  # of the mean error of logits: ours against PEFT's own


class Case:
    """A model, adapters and prompts of one length; sequence i has adapter i modulo their number, the last has none."""

    def __init__(self, work: Path, device: torch.device, new_tokens: int, width: int, layers: int) -> None:
        self.device, self.new_tokens = device, new_tokens
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.base, self.adapters = work / "base", work / "adapters"
        heads = width // HEAD_DIM
        model = tiny.make_model(
            "mixtral", num_hidden_layers=layers, hidden_size=width, intermediate_size=3 * width // 2,
            num_attention_heads=heads, num_key_value_heads=heads // 2, head_dim=HEAD_DIM, vocab_size=VOCABULARY,
        )  # fmt: skip
        tiny.save_model(model, self.base)
        for seed, lora_rank in enumerate(RANKS):
            tiny.make_adapter(model, self.adapters / f"rank-{lora_rank}", lora_rank=lora_rank, targets="all", seed=seed)
        self.names: list[str | None] = [f"rank-{RANKS[i % len(RANKS)]}" for i in range(SEQUENCES - 1)]
        self.names.append(None)
        generator = torch.Generator().manual_seed(9)
        self.ids = torch.randint(3, VOCABULARY, (SEQUENCES, PROMPT), generator=generator).to(device)

    def model(self, dtype: torch.dtype) -> Any:
        """The base model on the device."""
        return load_model(self.base).to(self.device, dtype)

    def groups(self) -> dict[str | None, list[int]]:
        """The sequences of each adapter."""
        return {name: [i for i, one in enumerate(self.names) if one == name] for name in dict.fromkeys(self.names)}


def generate(model: Any, ids: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """Greedy, exactly so many: [B, new_tokens]."""
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, min_new_tokens=new_tokens,
        do_sample=False, pad_token_id=0,
    )  # fmt: skip
    tokens: torch.Tensor = out[:, ids.shape[1] :]
    return tokens


@contextlib.contextmanager
def timed(device: torch.device, into: list[float]) -> Iterator[None]:
    """Seconds of a block, with what it left running on the device."""
    began = time.perf_counter()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    into.append(time.perf_counter() - began)


def by_peft(case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, float]:
    """(logits [B, V] after the prompt, tokens, seconds of generating), adapter after adapter."""
    base = case.model(dtype)
    logits = torch.empty(SEQUENCES, VOCABULARY, device=case.device)
    tokens = torch.empty(SEQUENCES, case.new_tokens, dtype=torch.int64, device=case.device)
    seconds: list[float] = []
    for name, rows in case.groups().items():
        model = base if name is None else tiny.peft_model(base, case.adapters / name).to(case.device, dtype)
        logits[rows] = model(case.ids[rows]).logits[:, -1].float()
        generate(model, case.ids[rows], 2)  # warm up
        with timed(case.device, seconds):
            tokens[rows] = generate(model, case.ids[rows], case.new_tokens)
    return logits, tokens, sum(seconds)


def by_us(case: Case, address: str, transport: str) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """Generate the same in one batch through the server. Returns logits, tokens, and seconds, ours and base model's."""
    model = case.model(case.dtype)
    ours: list[float] = []
    alone: list[float] = []
    with attach(model, server=address, transport=transport) as lora, lora.adapters(case.names):
        logits = model(case.ids).logits[:, -1].float()
        generate(model, case.ids, 2)
        with timed(case.device, ours):
            tokens = generate(model, case.ids, case.new_tokens)
    generate(model, case.ids, 2)
    with timed(case.device, alone):
        generate(model, case.ids, case.new_tokens)
    return logits, tokens, ours[0], alone[0]


def equal(one: torch.Tensor, other: torch.Tensor) -> int:
    """Tokens up to each sequence's first difference."""
    return int((one == other).long().cumprod(dim=1).sum())


def judge(
    case: Case, transport: str, ours: Sequence[Any], peft: Sequence[Any], exact: Sequence[Any], record: Record
) -> bool:
    """Logits as near to the exact ones as PEFT's; in float32 the same tokens too."""
    by_ours, by_theirs = [float((one[0] - exact[0]).abs().mean()) for one in (ours, peft)]
    good = by_ours <= RATIO * by_theirs + SLACK
    if case.dtype == torch.float32:
        good = good and torch.equal(ours[1], peft[1])
    record.add(
        "exactness", name=f"logits, {transport}", transport=transport, dtype=str(case.dtype), good=good,
        mean_error=by_ours, mean_error_of_peft=by_theirs, tokens=ours[1].numel(),
        tokens_equal_to_peft=equal(ours[1], peft[1]), tokens_of_peft_equal_to_float32=equal(peft[1], exact[1]),
        sequences_equal_to_peft=int((ours[1] == peft[1]).all(dim=1).sum()),
    )  # fmt: skip
    return good


def work(record: Record, arguments: argparse.Namespace) -> bool:
    """Whether the answers are PEFT's; speeds are only written down."""
    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory(prefix="lora-engine-") as scratch:
        case = Case(
            Path(scratch), torch.device(arguments.device), arguments.new_tokens, arguments.width, arguments.layers
        )
        flags = ["--base-model", str(case.base), "--adapters", str(case.adapters), "--device", arguments.device]
        flags += ["--device-pool", "1GiB", "--max-step-rows", "1024"] if arguments.device == "cuda" else []
        flags += ["--gpu-transport", "gpu"] if "gpu" in arguments.transports.split(",") else []
        peft = by_peft(case, case.dtype)
        exact = peft if case.dtype == torch.float32 else by_peft(case, torch.float32)
        with running_server(Path(scratch) / "log", flags) as server:
            good = True
            for transport in arguments.transports.split(","):
                good = one(case, server.address, transport, peft, exact, record) and good
            record_starts(record, server.log)
    return good


def one(case: Case, address: str, transport: str, peft: Sequence[Any], exact: Sequence[Any], record: Record) -> bool:
    """Through one transport; an error of it leaves the others their turn."""
    try:
        ours = by_us(case, address, transport)
    except LoraServerError as error:
        reason = f"{type(error).__name__}: {error}"[:300]
        record.add("exactness", name=f"logits, {transport}", transport=transport, good=False, reason=reason)
        return False
    speeds = {"ours": ours[2], "base_model_alone": ours[3], "peft_adapter_by_adapter": peft[2]}
    tokens = SEQUENCES * case.new_tokens
    per_s = {f"{name}_tokens_per_s": round(tokens / seconds, 1) for name, seconds in speeds.items()}
    over = round(peft[2] / ours[2], 2)
    record.add("speed", transport=transport, **per_s, sequences=SEQUENCES, adapters=len(RANKS), ours_over_peft=over)
    return judge(case, transport, ours, peft, exact, record)


def check(record: Record, arguments: argparse.Namespace) -> None:
    """Run the stage on this CPU in a rehearsal."""
    if arguments.rehearse and arguments.transports == TRANSPORTS:
        stage.play(work, record, arguments, device="cpu", transports="shm", new_tokens=2, width=128, layers=1)


if __name__ == "__main__":
    own = stage.parser(__doc__)
    own.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    own.add_argument("--transports", default=TRANSPORTS)
    own.add_argument("--new-tokens", type=int, default=48)
    own.add_argument("--width", type=int, default=WIDTH, help="of the model")
    own.add_argument("--layers", type=int, default=LAYERS, help="of the model")
    given = own.parse_args()
    stage.main(work, given, modules=("cupy", "peft"), check=check, gpu=given.device == "cuda")
