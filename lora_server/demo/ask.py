"""Ask one question through a server: `python -m lora_server.demo.ask --server ADDRESS --model DIR QUESTION`.

The model runs in this process, without adapters; the adapter's part of each layer comes from the server.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from lora_server import logs
from lora_server.demo.engine import Sequence, generate, load_model
from lora_server.demo.words import Words
from lora_server.errors import LoraServerError

NEW_TOKENS = 24


def main() -> int:
    """Print the answer; return the exit code."""
    from client_connector.transformers import attach

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True, help="address of the LoRA server")
    parser.add_argument("--model", required=True, type=Path, help="directory of the base model and its tokenizer")
    parser.add_argument("--adapter", help="name of an adapter (default: the base model answers)")
    parser.add_argument("question")
    options = parser.parse_args()
    logs.configure()  # to stderr
    torch.set_grad_enabled(False)
    words = Words(options.model)
    asked = Sequence(words.encode(options.question, ()), options.adapter)
    if not asked.prompt:
        parser.error(
            f"question: got {options.question!r} and the tokenizer of {options.model}, expected a word it knows"
        )
    model = load_model(options.model)
    try:
        with attach(model, server=options.server) as lora, lora.adapters([options.adapter]):
            (answer,) = generate(model, [asked], NEW_TOKENS)
    except LoraServerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(words.decode(answer.tokens))
    return 0


if __name__ == "__main__":
    sys.exit(main())
