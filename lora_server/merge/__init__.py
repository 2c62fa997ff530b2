"""Merges a PEFT adapter into a base model's weights, offline: `lora-server merge`.

checkpoint   the base model's directory: its safetensors headers, and a fingerprint of its weights
places       where the adapter's sites lie in it
rounding     one matrix: add the delta, round, measure
write        stream it all, restartable and atomic
"""

from lora_server.merge.write import Merge

__all__ = ["Merge"]
