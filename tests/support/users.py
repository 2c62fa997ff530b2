"""Runs a call as another user of this host."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

NOBODY = 65534


def as_another_user(act: Callable[..., object], *arguments: object) -> str:
    """Run `act` as another user and return the text of its OSError, or ''. Skips the test if this user is not root."""
    if os.geteuid():
        pytest.skip("only root can become another user")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = "it ended"
        try:
            os.setuid(NOBODY)
            act(*arguments)
            said = ""
        except OSError as error:
            said = str(error)
        finally:
            os.write(write, said.encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as told:
        said = told.read()
    os.waitpid(child, 0)
    return said
