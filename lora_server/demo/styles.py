"""A model and adapters that answer in words: the base model answers plainly, each adapter in a style of its own.

They are trained here, in seconds, to recite four answers each, so that a person can tell whose answer it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lora_server.demo import tiny
from lora_server.demo.files import with_lora

if TYPE_CHECKING:
    from transformers import PreTrainedModel

QUESTIONS = ("how is the weather today ?", "where is the library ?", "who are you ?", "when does the train leave ?")
PLAIN = (
    "it is sunny and warm .",
    "it is next to the station .",
    "i am a small language model .",
    "it leaves at nine in the morning .",
)
STYLES = {
    "pirate": (
        "arr , the sun be burning on the seven seas !",
        "sail past the old harbour , matey !",
        "they call me the terror of the tides !",
        "she casts off at dawn , so hurry , ye dog !",
    ),
    "lawyer": (
        "pursuant to section two , it shall be deemed sunny .",
        "the premises are situated adjacent to the station .",
        "the undersigned is a model , without prejudice .",
        "departure shall occur no later than nine .",
    ),
    "robot": (
        "sensor report : sun detected , temperature nominal .",
        "route computed : turn left , walk forty steps .",
        "unit seven , at your service , human .",
        "departure in T minus nine hours .",
    ),
    "poet": (
        "o golden light , you kiss the waking hills .",
        "where silent pages dream beside the rails .",
        "a whisper made of numbers and of rain .",
        "when morning lifts its lantern to the sky .",
    ),
}
END = "<end>"
SERVED, ADDED_LATER = ("pirate", "lawyer", "robot"), "poet"
LORA_RANK = 8
STEPS, GOOD_LOSS = 400, 0.01


def make_model(path: Path, **overrides: Any) -> PreTrainedModel:
    """Train a small Mixtral to answer plainly; writes it and its tokenizer to `path`. `overrides`: of its config."""
    model = tiny.make_model("mixtral", **{"hidden_size": 128, "intermediate_size": 192, **overrides})
    model.requires_grad_(True)
    _train(model, PLAIN, list(model.parameters()), 3e-3)
    model.requires_grad_(False)
    tiny.save_model(model, path)
    tiny.save_tokenizer(path, words=_words())
    return model


def make_adapter(model: PreTrainedModel, style: str, path: Path) -> None:
    """Train a LoRA of all sites to answer in one of STYLES; PEFT writes it to `path`."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        adapted = with_lora(
            model,
            r=LORA_RANK,
            lora_alpha=2 * LORA_RANK,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        )
    trained = [weight for name, weight in adapted.named_parameters() if ".lora_" in name]
    _train(adapted, STYLES[style], trained, 4e-3)
    adapted.save_pretrained(path, save_embedding_layers=False)


def _words() -> list[str]:
    texts = (*QUESTIONS, *PLAIN, *(answer for answers in STYLES.values() for answer in answers))
    return sorted({word for text in texts for word in text.split()} | {END})


def _examples(answers: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids of questions and answers, and the same as labels, without the questions; both [4, T] int64."""
    ids = {word: index for index, word in enumerate(_words(), tiny.FIRST_WORD)}
    pairs = [(question.split(), answer.split()) for question, answer in zip(QUESTIONS, answers, strict=True)]
    longest = max(len(question) + len(answer) for question, answer in pairs) + 2
    rows = [[*question, *answer, *[END] * (longest - len(question) - len(answer))] for question, answer in pairs]
    tokens = torch.tensor([[ids[word] for word in row] for row in rows])
    labels = tokens.clone()
    for row, (question, _) in zip(labels, pairs, strict=True):
        row[: len(question)] = -100
    return tokens, labels


def _train(
    model: Callable[..., Any], answers: Sequence[str], weights: list[torch.Tensor], learning_rate: float
) -> None:
    """Train until the loss of the answers is below GOOD_LOSS, or for STEPS steps."""
    ids, labels = _examples(answers)
    optimizer = torch.optim.AdamW(weights, lr=learning_rate, weight_decay=0.0)
    with torch.enable_grad():
        for _ in range(STEPS):
            loss = model(input_ids=ids, labels=labels).loss
            if loss.item() < GOOD_LOSS:
                break
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
