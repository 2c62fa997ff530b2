"""Makes the documents' pictures anew: `make screenshots`. It needs Chromium (`make browser`) and two minutes.

    page-light.png, page-dark.png        the page of a small server that an engine uses meanwhile
    status.svg                           what `lora-server status` says of it, in a terminal's colours
    report-light.png, report-dark.png    the report of a plan in docs/provisioning.md

A PNG's description lists the headings and labels that it shows; tests/unit/docs/test_pictures.py compares them with the
code.
"""

from __future__ import annotations

import contextlib
import html
import io
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from PIL import Image, PngImagePlugin
from rich.console import Console
from rich.terminal_theme import TerminalTheme

from client_connector.transformers import attach
from lora_server.cli.call import ask
from lora_server.cli.status import show
from lora_server.demo import tiny
from lora_server.demo.engine import Sequence, generate
from lora_server.demo.launch import RunningServer, running_server
from lora_server.wire import lora_server_pb2 as pb
from tests.support.browser import look

IMAGES = Path(__file__).with_name("img")
SCHEMES = ("light", "dark")
COLOURS = 64  # of a PNG: the plots of a report have the most
ADAPTERS = {"law": 8, "code": 16, "chat": 4, "sql": 8, "summaries": 16, "support": 4}  # name: rank
SERVE = ("--layout", "ep2-pp2", "--device-pool", "8MiB", "--host-pool", "16MiB")  # room for four of the six
AT_ONCE, NEW_TOKENS, BUSY_STEPS = 3, 8, 2000
WORKING = "document.querySelectorAll('[aria-label^=\"a step: \"]').length === 4"  # each shard, by two answers
PLAN = ("--slo", "ttft_p95=250ms,tpot_avg=100ms", "--model", "mixtral-8x7b", "--gpu", "h100", "--lora-rank", "64")
PLAN += ("--prefill", "apart", "--adapters", "1000", "--zipf", "1.2", "--instances", "4", "--batch-size", "128")
COLUMNS, CHAR_WIDTH, MARGIN = 80, 12.2, 16
GROUNDS = {"light": (246, 248, 250), "dark": (22, 27, 34)}
# black, red, green, yellow, blue, magenta, cyan, white: those that a terminal shows in lora_server.terminal
PALETTES = {
    "light": "1f2328 a40e26 116329 7d4e00 0550ae 6639ba 0e6068 1f2328",
    "dark": "6e7681 ff7b72 3fb950 d29922 58a6ff bc8cff 39c5cf e6edf3",
}


def main(images: Path = IMAGES) -> None:
    """Make all pictures."""
    with tempfile.TemporaryDirectory(prefix="lora-pictures-") as scratch:
        work = Path(scratch)
        report(work, images)
        with served(work) as server:
            for scheme in SCHEMES:
                take(f"http://{server.http}/", work, images, f"page-{scheme}", (1160, 1180), WORKING)
            status(server, images)


@contextlib.contextmanager
def served(work: Path) -> Iterator[RunningServer]:
    """A small server, in use by an engine in this process until the end of the block."""
    model = tiny.make_model("mixtral")
    tiny.save_model(model, work / "Mixtral-tiny")
    for seed, (name, rank) in enumerate(ADAPTERS.items()):
        tiny.make_adapter(model, work / "adapters" / name, lora_rank=rank, seed=seed, targets="all")
    flags = ["--base-model", str(work / "Mixtral-tiny"), "--adapters", str(work / "adapters"), *SERVE]
    with running_server(work / "log", flags) as server:
        ended = threading.Event()
        engine = threading.Thread(target=generate_until, args=(ended, model, server.address))
        engine.start()
        try:
            while sum(shard.stats.steps for shard in state(server).shards) < BUSY_STEPS and engine.is_alive():
                time.sleep(0.1)
            yield server
        finally:
            ended.set()
            engine.join()


def generate_until(ended: threading.Event, model: Any, address: str) -> None:
    """Generate for a few adapters at a time, the first ones more often, until the event is set."""
    chance, weights = random.Random(0), [1 / (place + 1) for place in range(len(ADAPTERS))]
    with mock.patch("socket.gethostname", return_value="engine"), attach(model, server=address) as lora:
        while not ended.is_set():
            names = list(dict.fromkeys(chance.choices(list(ADAPTERS), weights, k=AT_ONCE)))
            with lora.adapters(names):
                generate(model, [Sequence([3, 4, 5, 6], name) for name in names], NEW_TOKENS)


def state(server: RunningServer) -> Any:
    """Ask for what `lora-server status` shows."""
    return ask(server.address, "Server", "Status", pb.StatusRequest())


def report(work: Path, images: Path) -> None:
    """Plan, and look at the top of the report."""
    command = [sys.executable, "-m", "provisioning", *PLAN, "--report", "plan.html"]  # which the report repeats
    environment = os.environ | {"PYTHONPATH": str(IMAGES.parents[1])}
    subprocess.run(command, cwd=work, env=environment, check=True, stdout=subprocess.DEVNULL)
    for scheme in SCHEMES:
        take((work / "plan.html").as_uri(), work, images, f"report-{scheme}", (1000, 1480))


def take(url: str, work: Path, images: Path, name: str, size: tuple[int, int], when: str = "true") -> None:
    """Write what Chromium shows of a page, with few colours, and with its labels as the description."""
    scheme = name.rpartition("-")[2]
    elements, picture = look(url, work / "browser", size=size, scheme=scheme, when=when)
    labels = re.findall(r"<(?:dt|th|h2)[^>]*>([^<]+)", elements)
    info = PngImagePlugin.PngInfo()
    info.add_itxt("Description", "\n".join(sorted({html.unescape(label).strip() for label in labels})))
    with Image.open(io.BytesIO(picture)) as shown:
        small = shown.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
        small.save(images / f"{name}.png", optimize=True, pnginfo=info)


def status(server: RunningServer, images: Path) -> None:
    """Draw what `lora-server status` says, for light and dark in one file."""
    with io.StringIO() as unseen:
        console = Console(file=unseen, record=True, width=COLUMNS, force_terminal=True, soft_wrap=True, highlight=False)
        console.print("$ lora-server status", style="bold")
        show(state(server), console)

    def part(code_format: str, scheme: str = "light") -> str:
        colours = [tuple(bytes.fromhex(colour)) for colour in PALETTES[scheme].split()]
        theme = TerminalTheme(GROUNDS[scheme], colours[-1], colours)
        return console.export_svg(theme=theme, clear=False, code_format=code_format, unique_id="s")

    texts = re.sub(r' clip-path="[^"]*"|<text[^>]*>\n</text>', "", part("{matrix}"))
    width, height = COLUMNS * CHAR_WIDTH + 2 * MARGIN, float(part("{terminal_height}")) + 2 * MARGIN
    ground = {scheme: f".ground {{ fill: rgb{colour} }}" for scheme, colour in GROUNDS.items()}
    (images / "status.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="What lora-server status says of a server of four shards">\n<style>\n'
        f'text {{ font: 20px "DejaVu Sans Mono", Menlo, Consolas, monospace; }}\n'
        f"{ground['light']}\n{part('{styles}')}\n"
        f"@media (prefers-color-scheme: dark) {{\n{ground['dark']}\n{part('{styles}', 'dark')}\n}}\n</style>\n"
        f'<rect class="ground" width="{width:g}" height="{height:g}" rx="8"/>\n'
        f'<g transform="translate({MARGIN},{MARGIN})">{texts.replace("<text", chr(10) + "<text")}\n</g>\n</svg>\n'
    )


if __name__ == "__main__":
    main()
