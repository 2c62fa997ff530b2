"""The `lora-server` command. Heavy imports happen inside commands, so that --help is quick.

command    the command itself; serve, demo          adapters   adapters of a running server, and what is shared
call       one call to a running server            loading    progress bars of an adapter that is added
status     state of a running server               rows       adapters as printed, and completed by a shell
doctor     checks of this machine                  live       status --watch
tokens     tokens and their roles                  tenants    tenants and their limits
audit      the audit log
events     what happened, and what happens            profile    measures this machine for provision
profile_vllm    measures vLLM's steps for it
merge      an adapter into base weights, offline
local      tokens and tenants without a server     drain      draining before a node or shard stops
resize     another layout, while it serves
"""

from lora_server.cli.command import app, main

__all__ = ["app", "main"]
