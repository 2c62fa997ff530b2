"""Put the .pth file beside the modules: SGLang starts processes of its own, and each has to import the hook."""

from __future__ import annotations

from setuptools import setup
from setuptools.command.build_py import build_py


class WithPth(build_py):
    """Modules, and the file by which Python imports one of them at every start."""

    def run(self) -> None:
        """Build."""
        super().run()
        self.copy_file("sglang_on_cpu.pth", self.build_lib)


setup(cmdclass={"build_py": WithPth})
