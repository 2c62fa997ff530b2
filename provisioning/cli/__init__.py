"""The `provision` command. What is heavy to import waits until a command runs, so that --help is quick.

command    the command and its subcommands    errors       bad input: one line, exit code 2
plan       `provision`                        simulate     `provision simulate`
models     `provision models`                 experiment   what `provision simulate` runs
table4     `provision table4`                 progress     what long work is at
watch      `provision watch`                      flags        `provision`'s flags, parsed elsewhere
glossary   `provision glossary`
compare    `provision compare`                    save         files that are written
"""

from provisioning.cli.command import app, main

__all__ = ["app", "main"]
