"""Adds a delta to one matrix in float32, rounds to the base's dtype, and measures what the rounding costs.

Shapes: O output rows, K input columns, P probes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lora_server.adapters import Adapter
from lora_server.errors import ConfigError
from lora_server.merge.places import MatrixPlace

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PROBES, SAMPLED_ROWS = 8, 64
DELTA = "delta"  # the key of its sums in RowErrors


def expected_factors(delta_ratio: float) -> dict[str, float]:
    """Return by how much a merge multiplies the errors of RowErrors, where each rounding has the same relative error.

    `delta_ratio`: of the delta's result to the weights'. docs/merge.md derives it.
    """
    d2 = delta_ratio**2
    return {"merged": 1.0, "base_model": (3 + 3 * d2) ** 0.5, "others": ((3 + 5 * d2) / (2 + 2 * d2)) ** 0.5}


def merged_matrix(place: MatrixPlace, data: bytearray, adapter: Adapter, errors: RowErrors) -> torch.Tensor:
    """Return the matrix of `place` (its bytes are `data`) with the adapter's delta added."""
    dtype = DTYPES[place.dtype]
    base = torch.frombuffer(data, dtype=dtype).view(place.shape)
    exact = base.float()
    delta = torch.zeros_like(exact)
    for part, a, b in adapter.read(place.site, place.expert):
        change_OK = part.scale * (b.float() @ a.float())
        for begin, end, rows in _views(place, delta):
            low, high = max(begin, part.out_begin), min(end, part.out_end)
            if low < high:
                rows[low - begin : high - begin] = change_OK[low - part.out_begin : high - part.out_begin]
    merged = (exact + delta).to(dtype)
    if not bool(merged.isfinite().all()):
        raise ConfigError(
            f"{place.file}: {place.tensor}: got numbers that {dtype} cannot hold once the adapter is added, "
            "expected finite ones; use a base model in bfloat16 or float32"
        )
    errors.measure(*((one.T if place.transposed else one) for one in (base, merged, delta)))
    return merged


def _views(place: MatrixPlace, matrix: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield (begin, end, view) per section of `place`: the site's rows [begin, end), and their view of `matrix`."""
    rows_OK = matrix.T if place.transposed else matrix
    first = place.sections[0].begin
    for index, section in enumerate(place.sections):
        own = rows_OK[index::2] if place.interleaved else rows_OK[section.begin - first : section.end - first]
        yield section.begin, section.end, own


class RowErrors:
    """Sums of squared errors of a site's output, against float64, for an engine with merged weights and one without.

    There are three kinds of rows: of the `merged` adapter, of the `base_model`, and of `others`, an adapter with deltas
    of the merged one's size. Inputs are random; the first rows of every changed matrix are sampled. The engine's GEMM,
    the server's answer and their sum are rounded to the engine's dtype.
    """

    def __init__(self, sums: dict[str, list[float]]) -> None:
        """`sums`: those of an interrupted merge, or {}; they are changed in place."""
        self._sums = sums

    def measure(self, base_OK: torch.Tensor, merged_OK: torch.Tensor, delta_OK: torch.Tensor) -> None:
        """Add one matrix, and its delta in float32."""
        dtype = base_OK.dtype
        generator = torch.Generator().manual_seed(base_OK.shape[1])
        x_KP = torch.randn(base_OK.shape[1], PROBES, generator=generator).to(dtype).double()
        base, merged, delta = (one[:SAMPLED_ROWS].double() @ x_KP for one in (base_OK, merged_OK, delta_OK))
        other = delta.roll(1, dims=1)
        self._sum(DELTA, delta, base)

        def rounded(value: torch.Tensor) -> torch.Tensor:
            return value.to(dtype).double()

        def served(gemm: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
            return rounded(rounded(gemm) + rounded(answer))

        self._add("merged", base + delta, served(base, delta), rounded(merged))
        self._add("base_model", base, rounded(base), served(merged, -delta))
        self._add("others", base + other, served(base, other), served(merged, other - delta))

    def _add(self, kind: str, exact: torch.Tensor, unmerged: torch.Tensor, merged: torch.Tensor) -> None:
        for way, got in (("unmerged", unmerged), ("merged", merged)):
            self._sum(f"{kind} {way}", got - exact, exact)

    def _sum(self, key: str, part: torch.Tensor, whole: torch.Tensor) -> None:
        sums = self._sums.setdefault(key, [0.0, 0.0])
        sums[0] += float(part.square().sum())
        sums[1] += float(whole.square().sum())

    def result(self) -> dict[str, dict[str, float]]:
        """Return the root mean square relative error by kind of row, then by engine."""
        found: dict[str, dict[str, float]] = {}
        for key in self._sums:
            if key != DELTA:
                kind, way = key.split()
                found.setdefault(kind, {})[way] = self._ratio(key)
        return found

    def delta_ratio(self) -> float:
        """Return the root mean square of the delta's result, relative to that of the weights'."""
        return self._ratio(DELTA)

    def _ratio(self, key: str) -> float:
        part, whole = self._sums.get(key, (0.0, 0.0))
        return float((part / whole) ** 0.5) if whole else 0.0
