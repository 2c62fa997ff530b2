"""The SGLang plugin (entry point `sglang.srt.plugins`): adapters of a LoRA server as SGLang's `lora_path`.

contract      which versions, and which attributes of SGLang are touched
names         the base model's, and what SGLang knows an adapter by
tenants       what each kind of caller may use, where callers show tokens
hooks/        what is wrapped; the only modules that import SGLang
"""

from __future__ import annotations

import os
import sys


def register() -> None:
    """Install the plugin, if an address is set: SGLang calls this entry point in each of its processes.

    Ends the process where that fails: SGLang logs what a plugin raises, and serves on without it.
    """
    from client_connector.serving.settings import ADDRESS
    from client_connector.sglang.tenants import TENANTS, has_tenants

    try:
        if not os.environ.get(ADDRESS):
            if has_tenants(os.environ):
                sys.exit(
                    f"lora-server: {ADDRESS}: got none with {TENANTS}, expected the LoRA server that knows the tokens"
                )
            return
        from client_connector.sglang.hooks import install

        install.install()
    except Exception as error:
        sys.exit(f"lora-server: {error}")
