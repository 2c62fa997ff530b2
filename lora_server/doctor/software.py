"""Checks of Python and of installed packages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from lora_server import __version__, installed
from lora_server.doctor.machine import Finding, failed, ok
from lora_server.errors import ConfigError

OLDEST_PYTHON = (3, 11)


def python() -> Iterator[Finding]:
    """Check the version of Python."""
    text = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < OLDEST_PYTHON:
        yield failed("python", text, f"take {'.'.join(map(str, OLDEST_PYTHON))} or newer")
    else:
        yield ok("python", text)


def packages() -> Iterator[Finding]:
    """Check that no other package hides ours, and that dependencies have the right versions."""
    try:
        installed.check_names()
        yield ok("lora-server", __version__)
    except ConfigError as error:
        yield failed("lora-server", str(error), "an environment of its own for each of the two")
    wrong = [text for requirement in _requirements() if (text := misfit(requirement))]
    if wrong:
        yield failed(
            "packages",
            "; ".join(wrong),
            "pip install '.[server]' in a checkout of lora-server in an environment of its own",
        )
    else:
        yield ok("packages", "versions fit")


def _requirements() -> list[Requirement]:
    try:
        found = [Requirement(line) for line in requires(installed.OURS) or ()]
    except PackageNotFoundError:  # run from its sources
        return []
    return [one for one in found if one.name != installed.OURS]


def misfit(requirement: Requirement) -> str:
    """Say why the installed version does not fit, or return ''. A missing package of an extra fits."""
    extra = requirement.marker is not None and "extra" in str(requirement.marker)
    if requirement.marker is not None and not extra and not requirement.marker.evaluate():
        return ""
    try:
        found = version(requirement.name)
    except PackageNotFoundError:
        return "" if extra else f"{requirement.name}: not installed, expected {requirement.specifier or 'any'}"
    if requirement.specifier.contains(found, prereleases=True):
        return ""
    return f"{requirement.name}: got {found}, expected {requirement.specifier}"
