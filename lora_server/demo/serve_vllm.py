"""A LoRA server and vLLM's OpenAI endpoint beside it, to try by hand: `make serve-vllm MODEL=... ADAPTERS=...`.

Without a model: a tiny Mixtral, two adapters that answer in styles of their own, and `check`, a random activated LoRA.
Once vLLM answers, the commands to try are printed. Flags that are not ours are vLLM's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from client_connector.directory import AdapterDirectory
from lora_server.demo import children
from lora_server.demo.launch import running_server
from lora_server.demo.vllm_process import VllmProcess, require_free
from lora_server.errors import LoraServerError

VLLM_STOP_SECONDS = 60.0
KV_CACHE_GIB = "4"
MEMORY_FLAGS = ("--gpu-memory-utilization", "--kv-cache-memory-bytes")  # VLLM_CPU_KVCACHE_SPACE would win over them


@dataclass(frozen=True)
class ServedModel:
    """Model to serve, and how to try it; `more` is an adapter directory that is not served yet."""

    model: Path
    adapters: Path | None
    name: str = "base"
    prompt: str = "Hello, my name is"
    more: tuple[str, str] = ("NAME", "DIR")
    flags: tuple[str, ...] = ()  # of the server
    note: str = ""  # about its adapters


def make_tiny(root: Path, name: str) -> ServedModel:
    """Make a model directory and directories of adapters."""
    from transformers.utils import logging

    from lora_server.demo import styles, tiny
    from lora_server.demo.words import Words

    logging.disable_progress_bar()
    model = styles.make_model(root / "base", **tiny.FOR_VLLM)
    for style in ("lawyer", "pirate"):
        styles.make_adapter(model, style, root / "adapters" / style)
    styles.make_adapter(model, styles.ADDED_LATER, root / styles.ADDED_LATER)
    invocation = Words(root / "base").encode(styles.QUESTIONS[2], otherwise=())
    tiny.make_adapter(model, root / "adapters/check", lora_rank=8, seed=3, targets="attention", invocation=invocation)
    more, flags = (styles.ADDED_LATER, str(root / styles.ADDED_LATER)), ("--adapter-root", str(root))
    note = f"check is an activated LoRA of random weights: it changes nothing before a prompt's {styles.QUESTIONS[2]!r}"
    return ServedModel(root / "base", root / "adapters", name, styles.QUESTIONS[0], more, flags, note)


def engine_environment(flags: Sequence[str], environment: Mapping[str, str], server: str) -> dict[str, str]:
    """Limit vLLM's memory on a CPU, of which it takes 0.92 of the machine's by default."""
    told = any(flag.partition("=")[0] in MEMORY_FLAGS for flag in flags)
    ours = {"VLLM_NO_USAGE_STATS": "1"} | ({} if told else {"VLLM_CPU_KVCACHE_SPACE": KV_CACHE_GIB})
    return {**ours, **environment, "LORA_SERVER_ADDRESS": server}


def serve(served: ServedModel, address: str, flags: list[str], logs: Path, verbose: bool) -> int:
    """Serve until vLLM ends; returns its exit code."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    own = ["--base-model", str(served.model), *served.flags]
    own += ["--adapters", str(served.adapters)] if served.adapters else []
    host, _, port = address.rpartition(":")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(served.model)]
    command += ["--served-model-name", served.name, "--host", host, "--port", port, *flags]
    starting = console.status("the LoRA server starts")
    with starting, running_server(logs / "server.log", own) as server:
        with contextlib.closing(AdapterDirectory(server.address)) as directory:
            names, refused = adapters_of(directory), refusals_of(directory)
        starting.stop()
        console.print(f"LoRA server at {server.address}; log: {server.log}")
        for line in (*refused, *((served.note,) if served.note else ())):
            console.print(line)
        console.print("vLLM starts" + ("" if verbose else f"; log: {logs / 'vllm.log'} (--verbose: here)"))
        began, environment = time.monotonic(), engine_environment(flags, os.environ, server.address)
        vllm = VllmProcess(command, environment, address, None if verbose else logs / "vllm.log")
        try:
            vllm.wait_ready(console)
            console.print(f"vLLM is ready after {time.monotonic() - began:.0f} s{vllm.dtype_said(served.model)}")
            console.print("\nIn another terminal:", style="bold")
            for reason, line in to_try(served, names, address, server.address):
                console.print(f"\n  # {reason}\n  {line}")
            console.print("\nCtrl-C ends vLLM and the LoRA server.", style="bold")
            if code := vllm.process.wait():
                raise LoraServerError(vllm.last_words("while it served"))
            return code
        except SystemExit:
            console.print("stopping vLLM and the LoRA server")
            raise
        finally:
            children.stop(vllm.process, VLLM_STOP_SECONDS)


def adapters_of(directory: AdapterDirectory) -> list[str]:
    """Return the names of the server's adapters that need no invocation in the prompt."""
    return [one.name for one in directory.list() if not one.HasField("invocation")]


def refusals_of(directory: AdapterDirectory) -> list[str]:
    """List the refused adapters with their reasons, as far as the status names them; empty where there are none."""
    status = directory.status()
    more = status.num_refused - len(status.refused)
    lines = [f"refused: {one.name}: {one.reason}" for one in status.refused]
    return lines + [f"refused: {more} more; lora-server adapters list shows them"] * (more > 0)


def to_try(served: ServedModel, names: Sequence[str], address: str, server: str) -> list[tuple[str, str]]:
    """List (purpose, shell command) in the order to try them."""

    def complete(model: str) -> str:
        body = json.dumps({"model": model, "prompt": served.prompt, "max_tokens": 12, "temperature": 0})
        header = "Content-Type: application/json"
        return shlex.join(["curl", f"http://{address}/v1/completions", "-H", header, "-d", body])

    add = [str(Path(sys.executable).with_name("lora-server")), "adapters", "add", *served.more, "--server", server]
    return [
        ("the base model", complete(served.name)),
        *((f"an adapter; there are {', '.join(names)}", complete(name)) for name in names[-1:]),
        ("one more adapter, from any PEFT directory; its name is a model name from then on", shlex.join(add)),
        ("all of them", shlex.join(["curl", f"http://{address}/v1/models"])),
    ]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--adapters", type=Path)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-model-name", default="base")
    parser.add_argument("--verbose", action="store_true", help="vLLM's log here instead of in a file")
    options, flags = parser.parse_known_args()
    with children.ending_on_signals(), tempfile.TemporaryDirectory(prefix="lora-serve-") as scratch:
        logs, address = Path(scratch), f"127.0.0.1:{options.port}"
        served = ServedModel(options.model, options.adapters, options.served_model_name)
        try:
            require_free(address)
            if options.model is None:
                served = make_tiny(logs, options.served_model_name)
                flags = ["--dtype", "float32", "--enforce-eager", *flags]
                os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            return serve(served, address, flags, logs, options.verbose)
        except LoraServerError as error:
            print(f"error: {error}", file=sys.stderr)
            if (logs / "vllm.log").exists():
                kept = Path(tempfile.gettempdir(), f"serve-vllm-{os.getpid()}.log")
                print(f"all of it: {shutil.copy(logs / 'vllm.log', kept)}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())
