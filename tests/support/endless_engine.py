"""An engine process that generates until it is killed: `python -m tests.support.endless_engine MODEL SERVER NAME...`.

Prints one line per forward pass, so that the parent knows that load is on.
"""

import sys

import torch

from client_connector.transformers import attach
from lora_server import logs
from lora_server.demo.engine import load_model


def main() -> None:
    logs.configure()  # stdout is for the steps
    model_path, server, *names = sys.argv[1:]
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    model = load_model(model_path)
    ids = torch.full((len(names), 12), 7)
    with attach(model, server=server) as lora, lora.adapters(names):
        while True:
            model(ids)
            print("step", flush=True)


if __name__ == "__main__":
    main()
