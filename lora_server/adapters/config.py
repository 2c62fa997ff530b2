"""Parse adapter_config.json: take the fields that decide the delta, and refuse those that cannot be served.

Every field of PEFT's LoraConfig that changes the result is either used here or refused by name; the
others (dropout, initialisation that leaves the base alone, where it was trained) have no effect
once an adapter is trained. Nothing is imported or executed because a config asks for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from lora_server.adapters.patterns import Patterns
from lora_server.adapters.refusal import few, refusal, shown
from lora_server.adapters.selection import parse_selection
from lora_server.adapters.settings import LoraSettings
from lora_server.spec import Invocation

MAX_LORA_RANK = 1024
MAX_INVOCATION = 4096  # tokens, or characters
CONFIG = "adapter_config.json"

# Field -> why it cannot be served, and what to do about it. Off is null, false, empty (or "none").
_MUST_BE_OFF = {
    "use_dora": "DoRA rescales the base weight, which a separate server does not have: retrain without DoRA",
    "bias": "trained biases belong to the base model: retrain with bias='none'",
    "lora_bias": "a bias on B is not served: retrain with lora_bias=False",
    "modules_to_save": "whole modules are not LoRA deltas: retrain without modules_to_save",
    "fan_in_fan_out": "transposed base layers (Conv1D) are not among the supported models",
    "trainable_token_indices": "trained embeddings are not LoRA deltas: retrain without them",
    "layer_replication": "a model with replicated layers is another base model",
    "use_qalora": "QALoRA pools its input: retrain without it",
    "use_bdlora": "BD-LoRA is stored in blocks: expand it to plain LoRA matrices",
    "megatron_config": "Megatron's parallel layers are stored in slices: export the adapter with PEFT",
    "arrow_config": "Arrow mixes adapters per token: serve its adapters one by one",
    "kasa_config": "KaSA truncates the base weight and adds a diagonal: retrain as plain LoRA",
    "monteclora_config": "MonteCLoRA samples its weights: retrain as plain LoRA",
}
_KNOWN = frozenset(
    (
        *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        # the delta, and what it is for
        *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules"),
        *("target_parameters", "layers_to_transform", "layers_pattern"),
        *("alora_invocation_tokens", "alora_invocation_string", "invocation_string"),
        # training, and how it began
        *("lora_dropout", "init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        *("velora_config", "ensure_weight_tying", "inference_mode", "runtime_config"),
        # of what must be off
        *("megatron_core", "qalora_group_size"),
    )
)
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica")
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")


def parse_config(text: bytes) -> LoraSettings:
    """Parse a config file's bytes; raises AdapterFormatError for all that is not plain LoRA."""
    config = _object(text)
    if config.get("peft_type") != "LORA":
        raise _wrong("peft_type", config.get("peft_type"), "'LORA'", "only LoRA adapters can be served")
    for field, reason in _MUST_BE_OFF.items():
        value = config.get(field)
        if value not in (None, False, [], {}, "") and not (field == "bias" and value == "none"):
            raise _wrong(field, value, "'none'" if field == "bias" else "null, false or empty", reason)
    _check_init(config.get("init_lora_weights", True))
    rslora = config.get("use_rslora")
    if not isinstance(rslora, bool | None):
        raise _wrong("use_rslora", rslora, "true or false", "correct the config")
    return LoraSettings(
        lora_rank=_rank("r", config.get("r")),
        alpha=_number("lora_alpha", config.get("lora_alpha")),
        rslora=bool(rslora),
        ranks=_patterns(config, "rank_pattern", _rank),
        alphas=_patterns(config, "alpha_pattern", _number),
        target_parameters=_names(config, "target_parameters"),
        selection=parse_selection(config, CONFIG),
        base_model=_text(config, "base_model_name_or_path"),
        warnings=_unknown_fields(config),
        invocation=_invocation(config),
    )


def _object(text: bytes) -> dict[str, Any]:
    try:
        config = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise refusal(CONFIG, got=f"a file that is not JSON ({error})", expected="JSON", do="save it again") from None
    if not isinstance(config, dict):
        raise refusal(CONFIG, got=f"a {type(config).__name__}", expected="a JSON object", do="save it again")
    return config


def _check_init(value: Any) -> None:
    name = value.lower() if isinstance(value, str) else ""
    if name.startswith(_BASE_CHANGING_INITS):
        do = "convert it to plain LoRA: save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        raise _wrong("init_lora_weights", value, "an initialisation that leaves the base model as it is", do)
    if not isinstance(value, bool | None) and name not in _PLAIN_INITS:
        raise _wrong("init_lora_weights", value, f"true, false, {', '.join(_PLAIN_INITS)}", "save as plain LoRA")


def _unknown_fields(config: Mapping[str, Any]) -> tuple[str, ...]:
    unknown = [key for key in config if key not in _KNOWN and key not in _MUST_BE_OFF]
    for key in unknown:
        if key.startswith("use_") and config[key] not in (None, False, [], {}):
            raise _wrong(key, config[key], "a field of PEFT 0.21's LoraConfig", "it may change the result; retrain")
    return few(f"{CONFIG}: {shown(key)} is not a field of PEFT 0.21's LoraConfig; not used" for key in unknown)


def _rank(field: str, value: Any) -> int:
    if type(value) is not int or not 0 < value <= MAX_LORA_RANK:
        raise _wrong(field, value, f"an integer from 1 to {MAX_LORA_RANK}", "a lora_rank must be positive")
    return value


def _number(field: str, value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= 1e30:
        raise _wrong(field, value, "a finite number", "correct the config")
    return float(value)


def _patterns(config: Mapping[str, Any], field: str, check: Callable[[str, Any], float]) -> Patterns:
    given = config.get(field) or {}
    if not isinstance(given, dict):
        raise _wrong(field, given, "an object of pattern: number", "correct the config")
    values = {key: check(f"{field}[{shown(key)}]", value) for key, value in given.items()}
    return Patterns(f"{CONFIG}: {field}", values)


def _invocation(config: Mapping[str, Any]) -> Invocation | None:
    """Return the invocation of an activated LoRA. An empty one is refused: PEFT would search for nothing."""
    tokens = config.get("alora_invocation_tokens")
    if tokens is not None:
        whole = isinstance(tokens, list) and all(type(token) is int and 0 <= token < 2**31 for token in tokens)
        if not whole or not 0 < len(tokens) <= MAX_INVOCATION:
            wanted = f"a list of 1 to {MAX_INVOCATION} token ids, or null"
            raise _wrong("alora_invocation_tokens", tokens, wanted, "correct the config")
        return Invocation(tokens=tuple(tokens))
    for field in ("alora_invocation_string", "invocation_string"):
        if config.get(field) is not None:
            text = _text(config, field)
            if not 0 < len(text) <= MAX_INVOCATION:
                raise _wrong(field, text, f"a text of 1 to {MAX_INVOCATION} characters, or null", "correct the config")
            return Invocation(text=text)
    return None


def _names(config: Mapping[str, Any], field: str) -> tuple[str, ...]:
    value = config.get(field) or []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise _wrong(field, value, "a list of names", "correct the config")
    return tuple(value)


def _text(config: Mapping[str, Any], field: str) -> str:
    value = config.get(field)
    if not isinstance(value, str | None):
        raise _wrong(field, value, "a text", "correct the config")
    return value or ""


def _wrong(field: str, value: Any, expected: str, do: str) -> Exception:
    return refusal(f"{CONFIG}: {field}", got=shown(value), expected=expected, do=do)
