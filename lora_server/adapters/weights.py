"""Read the matrices of an adapter from its open files on demand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

from lora_server.adapters.files import OpenFiles
from lora_server.adapters.header import ITEM_BYTES
from lora_server.adapters.outline import Matrix, Outline, PairOutline
from lora_server.adapters.parts import DeltaPart
from lora_server.adapters.scan import stamp_of
from lora_server.errors import AdapterFormatError
from lora_server.spec import ModelSpec, Site

if TYPE_CHECKING:
    import torch

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class Weights:
    """Owns open files until `close`; reads may come from any thread.

    Holds no tensors but the fused B that was read last, so that a loader that reads the experts of a site in turn
    reorders it once. `stamp` identifies the files; see `reopen`.
    """

    def __init__(self, path: Path, spec: ModelSpec, outline: Outline, files: OpenFiles, stamp: str) -> None:
        """Takes over `files`; use `open_adapter` or `reopen`."""
        self.path, self.outline, self.stamp = path, outline, stamp
        self._spec, self._files = spec, files
        self._last_site: tuple[Site, dict[int, list[PairOutline]]] | None = None
        self._last_fused: tuple[tuple[Matrix, int], torch.Tensor] | None = None

    def sites(self) -> tuple[Site, ...]:
        """Return the sites with a delta, by layer and then in the order of PROJECTIONS."""
        return self.outline.sites()

    def experts(self, site: Site) -> tuple[int, ...]:
        """Return the experts of a site with a delta, sorted; (0,) for a dense site with one."""
        return tuple(self._at(site))

    def parts(self, site: Site, expert: int) -> tuple[DeltaPart, ...]:
        """Return what `read` would, without the tensors; () where there is no delta."""
        return tuple(pair.kind.part for pair in self._at(site).get(expert, ()))

    def read(self, site: Site, expert: int) -> list[tuple[DeltaPart, torch.Tensor, torch.Tensor]]:
        """Read each part, by out_begin: A [r, in] and B [out_end - out_begin, r], contiguous and in the file's dtype.
        Not to be written to: a B may be part of a fused one.

        Rows of B are in canonical order ([gate | up], [q | k | v]). Raises AdapterFormatError where
        the file has become shorter since it was opened.
        """
        pairs = self._at(site).get(expert, ())
        with _naming(self.path, site, expert):
            return [(one.kind.part, self._read_a(one, site), self._read_b(one, site, expert)) for one in pairs]

    def read_into(self, site: Site, expert: int, places: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Read each part's A and B into contiguous host tensors of their shapes, `places` in the order of `read`;
        without a copy where they have the file's dtype and layout. Raises as `read` does."""
        with _naming(self.path, site, expert):
            for one, (a, b) in zip(self._at(site).get(expert, ()), places, strict=True):
                self._read_a(one, site, a)
                if one.kind.fused or one.kind.interleaved:
                    b.copy_(self._read_b(one, site, expert))
                else:
                    self._matrix(one.kind.b, one.b_begin, _shape_b(one), b)

    def _at(self, site: Site) -> dict[int, list[PairOutline]]:
        last = self._last_site
        if last is None or last[0] != site:
            last = self._last_site = site, self.outline.at(site)
        return last[1]

    def _read_a(self, pair: PairOutline, site: Site, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._matrix(pair.kind.a, pair.a_begin, (pair.kind.part.lora_rank, self._spec.in_width(site)), out)

    def _read_b(self, pair: PairOutline, site: Site, expert: int) -> torch.Tensor:
        shape = _shape_b(pair)
        b = self._fused_b(pair, site, shape)[expert] if pair.kind.fused else None
        if b is None:
            b = self._matrix(pair.kind.b, pair.b_begin, shape)
        if pair.kind.interleaved:
            b = b.view(-1, 2, shape[1]).transpose(0, 1).reshape(shape)
        return b

    def _fused_b(self, pair: PairOutline, site: Site, shape: tuple[int, int]) -> torch.Tensor:
        """Return B [E, out, r] of a fused tensor. Column j of expert e is column j*E+e in its file."""
        key, last = (pair.kind.b, pair.b_begin), self._last_fused
        if last is None or last[0] != key:
            num_experts = self._spec.experts_at(site)
            b = self._matrix(pair.kind.b, pair.b_begin, (shape[0], shape[1] * num_experts))
            last = self._last_fused = key, b.view(*shape, num_experts).permute(2, 0, 1).contiguous()
        return last[1]

    def _matrix(
        self, matrix: Matrix, begin: int, shape: tuple[int, int], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Read a matrix, into `out` if that is given. Imports torch only here: the controller, which reads no tensors,
        starts without it."""
        import torch

        dtype = getattr(torch, _DTYPES[matrix.dtype])
        if out is not None and out.dtype is dtype:
            assert tuple(out.shape) == shape, (tuple(out.shape), shape)
            self._files.read_into(matrix.file, begin, out.view(-1).view(torch.uint8).numpy().data)
            return out
        data = self._files.read(matrix.file, begin, begin + shape[0] * shape[1] * ITEM_BYTES[matrix.dtype])
        read = torch.frombuffer(data, dtype=dtype).view(shape)
        return read if out is None else out.copy_(read)

    def check(self) -> None:
        """Raise AdapterFormatError if a file was written to since it was opened."""
        try:
            self._files.check()
        except AdapterFormatError as error:
            raise AdapterFormatError(f"adapter {self.path}: {error}") from None

    def close(self) -> None:
        """Close the files. Idempotent; `read` must not be called after it."""
        self._last_fused = None
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _shape_b(pair: PairOutline) -> tuple[int, int]:
    part = pair.kind.part
    return part.out_end - part.out_begin, part.lora_rank


@contextmanager
def _naming(path: Path, site: Site, expert: int) -> Iterator[None]:
    """Name the adapter and the block in errors about its files."""
    try:
        yield
    except AdapterFormatError as error:
        raise AdapterFormatError(f"adapter {path}: {site} expert {expert}: {error}") from None


def reopen(path: Path, spec: ModelSpec, outline: Outline, seen: str, stamp: str) -> Weights | None:
    """Open the files that `open_adapter` opened, by its `seen` and `stamp`, without reading them.

    None where any file may have been touched since: then call `open_adapter`.
    """
    try:
        if stamp_of(path) != seen:
            return None
        files = OpenFiles(path, outline.names)
    except OSError:
        return None
    if stamp.endswith(f"/{files.stamp}"):
        return Weights(path, spec, outline, files, stamp)
    files.close()
    return None
