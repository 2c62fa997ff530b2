"""A LoRA server and vLLM's OpenAI endpoint beside it, to try by hand: `make serve-vllm MODEL=... ADAPTERS=...`.

Without a model: a tiny random Mixtral and three adapters (law, code, and check, an activated LoRA).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from lora_server.demo import children
from lora_server.demo.launch import running_server
from lora_server.errors import LoraServerError

INVOCATION = [17, 18, 19]
VLLM_STOP_SECONDS = 60.0
KV_CACHE_GIB = "4"
MEMORY_FLAGS = ("--gpu-memory-utilization", "--kv-cache-memory-bytes")  # VLLM_CPU_KVCACHE_SPACE would win over them


def make_tiny(root: Path) -> tuple[Path, Path]:
    """A model directory and a directory of adapters."""
    from lora_server.demo import tiny

    model = tiny.make_model("mixtral", **tiny.FOR_VLLM)
    tiny.save_model(model, root / "base")
    tiny.save_tokenizer(root / "base")
    tiny.make_adapter(model, root / "adapters/law", lora_rank=8, seed=1, targets="all")
    tiny.make_adapter(model, root / "adapters/code", lora_rank=4, seed=2, targets="experts")
    tiny.make_adapter(model, root / "adapters/check", lora_rank=8, seed=3, targets="attention", invocation=INVOCATION)
    return root / "base", root / "adapters"


def engine_environment(flags: Sequence[str], environment: Mapping[str, str], server: str) -> dict[str, str]:
    """On a CPU vLLM would take 0.92 of the machine's memory, unless it is told."""
    told = any(flag.partition("=")[0] in MEMORY_FLAGS for flag in flags)
    ours = {"VLLM_NO_USAGE_STATS": "1"} | ({} if told else {"VLLM_CPU_KVCACHE_SPACE": KV_CACHE_GIB})
    return {**ours, **environment, "LORA_SERVER_ADDRESS": server}


def serve(model: Path, adapters: Path | None, port: int, flags: list[str], log: Path) -> int:
    """Until vLLM ends; returns its exit code."""
    own = ["--base-model", str(model), *(["--adapters", str(adapters)] if adapters else [])]
    with running_server(log, own) as server:
        names = sorted(path.name for path in adapters.iterdir() if path.is_dir()) if adapters else []
        print(f"LoRA server at {server.address}; adapters: {', '.join(names) or 'none yet'}; log: {log}")
        print(f"  lora-server adapters add NAME DIR --server {server.address}")
        print(f'  curl http://127.0.0.1:{port}/v1/completions -H "Content-Type: application/json" -d \'')
        print(
            f'    {{"model": "{names[-1] if names else "base"}", "prompt": "w5 w6 w7", "max_tokens": 8}}\'', flush=True
        )
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--served-model-name", "base", "--host", "127.0.0.1", "--port", str(port), *flags]
        environment = engine_environment(flags, os.environ, server.address)
        engine = subprocess.Popen(children.own(command), env=environment, stdin=subprocess.DEVNULL)
        try:
            return engine.wait()
        finally:
            children.stop(engine, VLLM_STOP_SECONDS)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--adapters", type=Path)
    parser.add_argument("--port", type=int, default=8000)
    options, flags = parser.parse_known_args()
    with children.ending_on_signals(), tempfile.TemporaryDirectory(prefix="lora-serve-") as scratch:
        model, adapters = options.model, options.adapters
        if model is None:
            model, adapters = make_tiny(Path(scratch))
            flags = ["--dtype", "float32", "--enforce-eager", *flags]
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        try:
            return serve(model, adapters, options.port, flags, Path(scratch) / "server.log")
        except LoraServerError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())
