"""Stage `peers`: other projects' kernels at the cells of `ours`, a deadline per site; after a cut it goes on."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bench.gpu_run import stage
from bench.gpu_run.ours import TOKENS
from bench.gpu_run.record import Record
from bench.kernels import peer_process
from bench.kernels.__main__ import PEERS
from bench.kernels.models import MODELS

SITE_SECONDS = 90.0


def check(record: Record, arguments: argparse.Namespace) -> None:
    """The peers' files, if there are any here: that each is Python."""
    folder: Path = arguments.carried / "peers"
    if not folder.is_dir():
        record.add("absent", what="the peers' files; collect them: python -m bench.fetch_gpu")
        return
    files = sorted(folder.rglob("*.py"))
    for path in files:
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    manifest = json.loads((folder / "manifest.json").read_text())
    missing = [name for name in PEERS if name not in manifest]
    if missing:
        raise ValueError(f"{folder}/manifest.json lacks {', '.join(missing)}; collect again: python -m bench.fetch_gpu")
    record.add("files", count=len(files))


def work(record: Record, arguments: argparse.Namespace) -> bool:
    """Every site that the record lacks; whether at least one peer ran and was right somewhere."""
    folder: Path = arguments.carried / "peers"
    if not folder.is_dir():
        raise stage.Unable(f"no peers' files in {folder}; collect them beforehand: python -m bench.fetch_gpu")
    for model in MODELS.values():
        for site in model.sites:
            about = {"model": model.name, "site": site.name}
            if record.find("done", **about):
                continue
            for line in peer_process.collect(model.name, site.name, list(TOKENS), list(PEERS), folder, SITE_SECONDS):
                record.add("peer", **about, **line)
            record.add("done", **about)
    return any("us" in line for line in record.find("peer"))


if __name__ == "__main__":
    stage.main(work, stage.parser(__doc__).parse_args(), check=check)
