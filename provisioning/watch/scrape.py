"""Scrapes of a server's /metrics: fetched, appended to a file, and parsed."""

from __future__ import annotations

import math
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPException
from itertools import pairwise
from pathlib import Path

from provisioning.inputs import InputError, text_of

HOLDS = "lora_server_adapter_hold_seconds"
ADMITTED, QUEUE = "lora_server_admissions_total", "lora_server_admission_queue"
BUILD, WAITED, REGISTERED = "lora_server_build_info", "lora_server_admission_wait_seconds_sum", "lora_server_adapters"
SHARD_SUMS = ("steps", "compute_seconds", "wait_seconds", "entries", "failed_steps", "loads", "evictions")
_SUMS = [f"lora_server_{name}_total" for name in SHARD_SUMS]
READ = frozenset(
    [f"{HOLDS}_count", f"{HOLDS}_sum", ADMITTED, QUEUE, BUILD, WAITED, REGISTERED, *_SUMS]
)  # others are skipped
SECONDS = 10.0  # for an answer
_MOST_BYTES = 64 << 20
_HEADING = re.compile(r"^# scrape (\d+(?:\.\d+)?)$", re.MULTILINE)
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Scrape:
    """`at` in seconds since the epoch, NaN where the file does not say; samples of every name in READ, by labels."""

    at: float
    samples: dict[str, dict[Labels, float]]

    def total(self, name: str) -> float:
        """Sum of a metric's samples; 0 where there are none."""
        return sum(self.of(name).values())

    def of(self, name: str) -> dict[Labels, float]:
        """List the samples of a name in READ."""
        return self.samples[name]


def fetched(server: str) -> str:
    """Fetch the text that HOST:PORT has at /metrics, under a heading with the time; raises InputError."""
    where = f"--server: {server}"
    if not re.fullmatch(r"[^\s/:]+:\d+|\[[0-9a-fA-F:]+\]:\d+", server):
        raise InputError(f"{where}: expected HOST:PORT of the server's --http, such as 127.0.0.1:7401")
    try:
        with urllib.request.urlopen(f"http://{server}/metrics", timeout=SECONDS) as answer:
            body = answer.read(_MOST_BYTES + 1)
        if len(body) > _MOST_BYTES:
            raise InputError(f"{where}: /metrics has more than {_MOST_BYTES >> 20} MiB; is it a lora-server?")
        text = body.decode()
    except (OSError, HTTPException, ValueError) as error:
        if isinstance(error, InputError):
            raise
        why = error.reason if isinstance(error, urllib.error.URLError) else error
        raise InputError(f"{where}/metrics cannot be read: {why}; give the server's --http address") from None
    return f"# scrape {time.time():.3f}\n{text.rstrip()}\n"


def recorded(file: Path, text: str) -> None:
    """Append a scrape to a file; raises InputError."""
    try:
        with file.open("a", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise InputError(f"--record: {file} cannot be written: {error.strerror}") from None


def read(file: Path) -> list[Scrape]:
    """Read a file of scrapes; raises InputError."""
    return parsed(text_of(file, str(file), "utf-8-sig"), str(file))


def parsed(text: str, where: str) -> list[Scrape]:
    """Parse all scrapes of a text, in the order of time; raises InputError that begins with `where`."""
    headings = list(_HEADING.finditer(text))
    if text[: headings[0].start() if headings else 0].strip():
        raise InputError(
            f"{where}: a scrape before others lacks its heading `# scrape SECONDS`; give each its own file"
        )
    pieces = [(math.nan, text)]
    if headings:
        ends = [*(heading.start() for heading in headings[1:]), len(text)]
        pieces = [(float(one[1]), text[one.end() : end]) for one, end in zip(headings, ends, strict=True)]
    found = [Scrape(at, _samples(piece, where)) for at, piece in pieces]
    if any(later.at < earlier.at for earlier, later in pairwise(found)):
        raise InputError(f"{where}: the scrapes are not in the order of time; give them as they were recorded")
    return found


def _samples(text: str, where: str) -> dict[str, dict[Labels, float]]:
    found: dict[str, dict[Labels, float]] = {name: {} for name in READ}
    for name, labels, value in _parsed(text, where):
        if name in READ:
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"{where}: {name} is {value}, expected a finite number >= 0")
            found[name][tuple(sorted(labels.items()))] = value
    if not found[ADMITTED]:
        raise InputError(f"{where} is no scrape of a lora-server: {ADMITTED} is not in it")
    if not found[f"{HOLDS}_count"]:
        raise InputError(f"{where}: the server does not say how adapters are held ({HOLDS}); it is too old: upgrade it")
    return found


def _parsed(text: str, where: str) -> Iterator[tuple[str, dict[str, str], float]]:
    from prometheus_client.parser import text_string_to_metric_families

    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                yield sample.name, sample.labels, sample.value
    except (ValueError, KeyError, IndexError) as error:
        raise InputError(f"{where} is not in Prometheus' text format: {' '.join(str(error).split())[:200]}") from None
