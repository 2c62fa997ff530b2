"""PEFT adapter files -> canonical tensors, and the refusal of what cannot be served exactly.

files     directories, bounded reads       header     safetensors headers
config    adapter_config.json              settings   what it says about the delta
patterns  rank_pattern, alpha_pattern      selection  which modules it selects
keys      tensor names -> site, expert     parts      pairs of tensors, checked shapes
outline   where each matrix lies, small    weights    reads them from open files
adapter   opens and checks one             refusal    the one form of error
scan      a directory of them, by stat     limits     how much text there may be
"""

from lora_server.adapters.adapter import Adapter, open_adapter, validate_adapter
from lora_server.adapters.config import CONFIG
from lora_server.adapters.files import (
    INDEX,
    WEIGHTS,
    adapter_files,
    find_adapters,
    is_adapter,
    no_weights,
    weight_map,
)
from lora_server.adapters.limits import AdapterLimits, check_values
from lora_server.adapters.outline import Outline
from lora_server.adapters.parts import DeltaPart
from lora_server.adapters.scan import Scan, is_watched, scan, stamp_of
from lora_server.adapters.weights import Weights, reopen

__all__ = [
    "CONFIG",
    "INDEX",
    "AdapterLimits",
    "is_watched",
    "WEIGHTS",
    "Adapter",
    "Outline",
    "DeltaPart",
    "Scan",
    "Weights",
    "adapter_files",
    "check_values",
    "find_adapters",
    "is_adapter",
    "no_weights",
    "open_adapter",
    "reopen",
    "scan",
    "stamp_of",
    "validate_adapter",
    "weight_map",
]
