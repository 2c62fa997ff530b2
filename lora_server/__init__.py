"""lora-server: LoRA adapters live and run on their own shards; engines stay LoRA-free."""

__version__ = "0.1.0"
