"""The `provision` command. What is heavy to import waits until a command runs, so that --help is quick.

command    the command and its subcommands    console      errors, progress, files that are written
plan       `provision`                        simulate     `provision simulate`
watch      `provision watch`                  experiment   what `provision simulate` runs
compare    `provision compare`                flags        `provision`'s flags, parsed elsewhere
follow     `provision watch --serve`
references `provision glossary`, `models` and `table4`
"""

from provisioning.cli.command import app, main

__all__ = ["app", "main"]
