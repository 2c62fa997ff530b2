"""Make a virtual environment and install into it: `python environment.py DIR GIB [PIP'S ARGUMENTS] ...`.

What make runs first. GIB: on disk, as seen with PyTorch's CPU build; several calls of pip are parted by `--`. In
a terminal one line says what pip is doing; elsewhere only its errors are seen. Written for any Python 3, so that an
old one is told what is wrong.
"""

import os
import select
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec

OLDEST = (3, 11)


def problem(version: "tuple[int, ...]", modules: "list[str]") -> str:
    """Explain why a Python of this version that has these of venv and ensurepip will not do; empty if it will."""
    cure = "then say which: make ... PYTHON=/usr/bin/python3.11"
    if version < OLDEST:
        got, expected = (".".join(map(str, one)) for one in (version, OLDEST))
        return f"{sys.executable}: got Python {got}, expected {expected} or later; install one, {cure}"
    missing = [name for name in ("venv", "ensurepip") if name not in modules]
    if missing:
        return (
            f"{sys.executable} has no {' and no '.join(missing)}: install it (Debian, Ubuntu: apt install "
            f"python3-venv), or another Python, {cure}"
        )
    return ""


def install(folder: str, arguments: "list[str]") -> int:
    """Call pip once and return its exit code. Its errors are on stderr."""
    command = [f"{folder}/bin/python", "-u", "-m", "pip", "install", "--disable-pip-version-check"]
    command += ["--progress-bar", "off", *arguments]
    if not sys.stdout.isatty():
        return subprocess.call([*command, "--quiet"])
    pip = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert pip.stdout is not None
    show(pip.stdout.fileno())
    return pip.wait()


def show(pip: int) -> None:
    """Show the newest of pip's lines, in place of the one before, until pip closes its end."""
    began, doing, text = time.monotonic(), "", b" "
    while text:
        if select.select([pip], [], [], 1.0)[0]:
            text = os.read(pip, 65536)
            lines = [line.strip() for line in text.decode(errors="replace").splitlines()]
            new = [line for line in lines if line and not line.startswith("Requirement already satisfied")]
            doing = (new or [doing])[-1]
            if doing.startswith("Installing collected packages"):
                doing = f"Installing {doing.count(',') + 1} packages"
        line = f"  {time.monotonic() - began:4.0f} s  {doing}"
        print("\r\033[K" + line[: shutil.get_terminal_size().columns - 1], end="", flush=True)
    print("\r\033[K", end="", flush=True)


def main(folder: str, gib: str, *arguments: str) -> int:
    """Make the environment. Returns the exit code of the first step that failed, or 0."""
    said = problem(sys.version_info[:2], [name for name in ("venv", "ensurepip") if find_spec(name)])
    if said:
        print(f"error: {said}", file=sys.stderr)
        return 2
    size = f"{gib} GiB on disk, more where PyTorch comes with CUDA"
    print(f"setting up {folder}: downloads, {size}; takes minutes, once", flush=True)
    code = subprocess.call([sys.executable, "-m", "venv", folder])
    for call in "\n".join(arguments).split("\n--\n"):
        code = code or install(folder, call.split("\n"))
    if code:
        print(f"error: {folder} is not complete; the reason is above, and make goes on from there", file=sys.stderr)
    return code


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
