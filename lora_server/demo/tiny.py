"""Tiny seeded models, and the door to what is made for them.

    make_model, save_model, save_tokenizer        here
    make_adapter, make_shared_outer               files, in every layout on disk
    peft_model, apply_literal                     oracle: what an adapter must do

Importing this module imports neither transformers nor peft.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from lora_server.demo.files import TARGETS, make_adapter, make_shared_outer, write_adapter
from lora_server.demo.oracle import apply_literal, peft_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "FIRST_WORD",
    "FOR_VLLM",
    "KINDS",
    "TARGETS",
    "apply_literal",
    "make_adapter",
    "make_model",
    "make_shared_outer",
    "peft_model",
    "save_model",
    "save_tokenizer",
    "write_adapter",
]

FIRST_WORD = 2  # tokens before it are special
KINDS = ("mixtral", "qwen3_moe", "gpt_oss", "llama")

_CONFIG_CLASS = {"mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe", "gpt_oss": "GptOss", "llama": "Llama"}
_COMMON: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_OWN: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 128},
    "llama": {},
}

# vLLM's attention on CPUs has no heads of 16, and its GPT-OSS always has YaRN; prefixes are cached in blocks of 128
FOR_VLLM: dict[str, Any] = {
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}


def make_model(kind: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> PreTrainedModel:
    """Make a model of one of KINDS, on the CPU, frozen and in eval mode; `overrides` are fields of its config.

    The same arguments give the same weights. They are spread enough that greedy tokens vary.
    """
    import transformers

    config_class = getattr(transformers, f"{_CONFIG_CLASS[kind]}Config")
    config = config_class(**{**_COMMON, **_OWN[kind], **overrides})
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("norm.weight"):
                weight.copy_(1 + 0.1 * noise)
            else:
                weight.copy_(noise * (1.0 if "embed_tokens" in name else 1.2 * weight.shape[-1] ** -0.5))
    return cast("PreTrainedModel", model.to(dtype).eval().requires_grad_(False))


def save_tokenizer(path: str | Path, words: Sequence[str] | None = None) -> None:
    """Write a tokenizer of `words`, numbered from FIRST_WORD; without them token i is the word `w<i>`, up to 255."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [f"w{i}" for i in range(FIRST_WORD, 256)] if words is None else words
    vocabulary = {"<pad>": 0, "<s>": 1, **{word: i for i, word in enumerate(words, FIRST_WORD)}}
    split = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    split.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=split, unk_token="<pad>", pad_token="<pad>", bos_token="<s>")
    fast.save_pretrained(path)


def save_model(model: PreTrainedModel, path: str | Path) -> None:
    """Write the model's config and weights as transformers loads them."""
    model.save_pretrained(path)
