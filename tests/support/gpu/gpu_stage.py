"""A stage that needs no GPU: `python -m tests.support.gpu.gpu_stage DEED --record FILE`, for the runner's tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from bench.gpu_run import stage
from lora_server.demo import children

STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"


def work(record, arguments):
    deed, _, number = arguments.deed.partition(":")
    record.add("did", deed=deed, earlier=len(record.find("did")))
    if deed == "fail":
        record.add("check", name="one", good=True)
        record.add("check", name="two", good=False, reason="it is wrong")
        return False
    if deed == "unable":
        raise stage.Unable("no such thing here")
    if deed == "rehearse":
        stage.need_gpu(True)
    if deed == "raise":
        raise ValueError("got 1, expected 2")
    if deed == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if deed == "exit":
        sys.exit("a wrong flag, say")
    if deed in ("hang", "sleep"):
        family(record, (False, True) if deed == "hang" else ())
        time.sleep(600)
    if deed == "needs":  # another stage's JSON
        return os.path.exists(number)  # noqa: PTH110
    return True


def family(record, stubborn):
    """Children in groups of their own that ignore SIGTERM, and may be stopped; and one that obeys."""
    meek = subprocess.Popen(children.own([sys.executable, "-c", "import signal; signal.pause()"]))
    found = [meek.pid]
    for stopped in stubborn:
        command = children.own([sys.executable, "-c", STUBBORN])
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert child.stdout.readline() == "up\n"
        if stopped:
            child.send_signal(signal.SIGSTOP)
        found.append(child.pid)
    record.add("family", pids=[os.getpid(), *found])


if __name__ == "__main__":
    own = stage.parser(__doc__)
    own.add_argument("deed")
    stage.main(work, own.parse_args(), gpu=False)
