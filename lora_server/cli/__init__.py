"""The `lora-server` command. Heavy imports happen inside commands, so that --help is quick.

command    what it is made of; serve, demo         adapters   of a running server: list, add, update (rows)
call       one call to a running server            loading    the bar of an adapter that is added
status     what a running server does              complete   adapters' names for a shell
doctor     what a machine lacks for a node         live       status, again and again
tokens     who may do what                         tenants    whose, and how much
sharing    adapters that others may use            audit      what was changed, by whom
local      tokens and tenants without a server
drain      before a node stops, or a shard is started anew
"""

from lora_server.cli.command import app, main

__all__ = ["app", "main"]
