"""The shell blocks of the documents, run as a reader would type them, on tiny models with the documents' names.

A block is run as written unless a comment before it says otherwise:
    <!-- not run: REASON -->        <!-- run in: A FILE OF TESTS -->
A command that serves for ever is started, waited for, and stopped at the end of its block. Blocks run in a network
namespace of their own, so that the documents' ports and addresses are free.
"""

import re
import shlex
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from lora_server.demo import children, tiny
from tests.support.sources import ROOT

FENCE = re.compile(r"(?:<!-- (not run|run in): (.+?) -->\n)?^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL = {"sh", "bash", "console", "shell"}
READY_SECONDS = 300.0
LORA, VLLM = "http://127.0.0.1:7401/readyz", "http://127.0.0.1:8000/health"


@dataclass(frozen=True)
class Block:
    """`mark` is "", "not run" or "run in"; `why` is what comes after it."""

    document: str
    language: str
    text: str
    mark: str
    why: str

    @property
    def commands(self):
        """One per command, comments left out, continued lines joined."""
        joined = self.text.replace("\\\n", " ")
        lines = [re.sub(r"(^|\s)#.*", "", line).strip() for line in joined.splitlines()]
        return [line for line in lines if line]


def blocks(document):
    return [
        Block(document, language, text, mark, why)
        for mark, why, language, text in FENCE.findall((ROOT / document).read_text())
    ]


def no_network():
    """Explain why blocks cannot have a network namespace here; empty if they can."""
    try:
        done = subprocess.run(["unshare", "-rn", "ip", "addr"], capture_output=True, timeout=60, check=False)
    except FileNotFoundError:
        return "unshare (util-linux) or ip (iproute2) is not installed"
    return f"no network namespaces here: {done.stderr.decode().strip()}" if done.returncode else ""


def furnish(folder, **settings):
    """Make the files that the documents assume: a model directory, ./adapters, ./law-v2 and ./law-v3."""
    model = tiny.make_model("mixtral", **settings)
    tiny.save_model(model, folder / "Mixtral-8x7B")
    tiny.save_tokenizer(folder / "Mixtral-8x7B")
    for seed, path in enumerate(("adapters/code", "adapters/chat", "law-v2", "law-v3")):
        tiny.make_adapter(model, folder / path, lora_rank=4, seed=seed, targets="experts")


def script(commands):
    """Write the bash script: the commands, and after those that serve for ever a wait until all of them are ready."""
    lines = ["set -eu", "ip link set lo up", "ip addr add 10.0.0.1/32 dev lo", "servers=", ": > servers.log"]
    lines.append("trap 'set +e; tail -n 60 servers.log >&2; [ -z \"$servers\" ] || kill $servers; wait' EXIT")
    waiting = []
    for index, command in enumerate(commands):
        vllm = "vllm serve" in command or "make serve-vllm" in command
        if vllm or "lora-server serve" in command:
            # the HTTP port of a second node, which would be on a host of its own
            other = f"LORA_SERVER_HTTP=127.0.0.1:{7500 + index} " if "--controller" in command else ""
            lines += [f"{other}{command} >> servers.log 2>&1 &", 'servers="$servers $!"']
            waiting.append(VLLM if vllm else LORA)
            continue
        lines += [*waits(waiting), f"echo {shlex.quote('$ ' + command)}", command]
        waiting = []
    lines += [*waits(waiting), "for one in $servers; do kill -0 $one; done", "echo all served"]
    return "\n".join(lines)


def waits(urls):
    return [f"{sys.executable} -m tests.support.doc_commands {url} $servers" for url in sorted(set(urls))]


NO_MAKE = {"MAKEFLAGS": "", "MFLAGS": "", "MAKELEVEL": "0", "ARGS": ""}  # what a make that runs the tests was asked for


def type_in(commands, folder, environment, seconds):
    """Run them as a reader would in a folder; returns what was printed. A command that fails fails the test."""
    path = f"{Path(sys.executable).parent}:{environment['PATH']}"
    done = subprocess.run(
        children.own(["unshare", "-rn", "bash", "-c", script(commands)]),
        cwd=folder,
        env=environment | NO_MAKE | {"PYTHONPATH": str(ROOT), "PATH": path},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "all served" in done.stdout
    return done.stdout


def wait_until_ready(url, servers):
    """Polls; a server that has ended will not get ready."""
    deadline = time.monotonic() + READY_SECONDS
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError as error:
            ended = [pid for pid in servers if not Path(f"/proc/{pid}").exists()]
            if ended or time.monotonic() > deadline:
                sys.exit(f"{url}: {error}; ended: {ended}")
        time.sleep(0.1)


if __name__ == "__main__":
    wait_until_ready(sys.argv[1], sys.argv[2:])
