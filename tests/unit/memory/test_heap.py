"""What a process keeps of large buffers that it has freed."""

import subprocess
import sys

KEPT = """
import psutil
from lora_server.daemon.heap import give_back_large
if {give_back}:
    give_back_large()
memory = psutil.Process().memory_info
bytearray(30 << 20)  # as large as glibc learns to keep
before, small = memory().rss, []
large = [(bytearray(b"x") * (4 << 20), small.append(bytearray(20_000))) for _ in range(16)]
del large
print(memory().rss - before >> 20)
"""


def _kept(give_back: bool) -> int:
    """MB, of 64 with something small between them."""
    command = [sys.executable, "-c", KEPT.format(give_back=give_back)]
    return int(subprocess.run(command, capture_output=True, check=True, text=True, timeout=120).stdout)


def test_large_buffers_are_given_back():
    assert _kept(give_back=False) > 30, "else this test shows nothing"
    assert _kept(give_back=True) < 10
