"""A run's kernel times as a profile of the planner; see provisioning/model/profile.py."""

from __future__ import annotations

from typing import Any

from bench.gpu_run.record import picked
from lora_server.errors import ConfigError
from provisioning.model.hardware import GPUS


def profile(lines: list[dict[str, Any]], transport: str) -> dict[str, Any]:
    """Return the compute terms that stage `headline` measured. Raises ConfigError where it did not come to them."""
    cells, machines = picked(lines, "headline"), picked(lines, "hardware")
    name = str(machines[-1]["gpu"]).lower() if machines else ""
    gpu = next((known for known in GPUS if known.split("-")[0] in name), None)
    if not cells or gpu is None:
        raise ConfigError(f"got GPU {name!r} and {len(cells)} cells of headline; run make gpu")
    of = {"model": "mixtral-8x7b", "gpu": gpu, "lora_rank": 64, "wire": "exact", "transport": transport}
    compute = [{"ep": 4, "batch": cell["tokens"], "us": cell["us"]} for cell in cells]
    return {"source": f"make gpu, headline, {name}: kernels alone", "of": of, "terms": {"compute": compute}}
