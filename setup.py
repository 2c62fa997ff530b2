"""The wheel's tag; everything else is in pyproject.toml, which cannot say this.

Pure Python, but Linux's: processes are watched by pidfd, memory is shared by memfd and futex. Other CPUs than
x86-64 have the TCP transport only. glibc 2.28 is what PyTorch's wheels ask for.
"""

from __future__ import annotations

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel


class LinuxWheel(bdist_wheel):
    """Any Python 3, no ABI, Linux only."""

    def get_tag(self) -> tuple[str, str, str]:
        """PEP 425: one tag per CPU."""
        return "py3", "none", "manylinux_2_28_x86_64.manylinux_2_28_aarch64"


setup(cmdclass={"bdist_wheel": LinuxWheel})
