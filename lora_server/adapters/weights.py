"""The matrices of an adapter, read from its open files on demand."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from lora_server.adapters.files import OpenFiles
from lora_server.adapters.header import ITEM_BYTES
from lora_server.adapters.outline import Matrix, Outline, Pair
from lora_server.adapters.parts import Part
from lora_server.adapters.scan import stamp_of
from lora_server.errors import AdapterFormatError
from lora_server.spec import ModelSpec, Site

if TYPE_CHECKING:
    import torch

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class Weights:
    """Owns open files until `close`; reads may come from any thread.

    Holds no tensors, except the fused B that was read last, so that a loader that goes through the
    experts of a site reorders it once. `stamp` says which files they are; see `reopen`.
    """

    def __init__(self, path: Path, spec: ModelSpec, outline: Outline, files: OpenFiles, stamp: str) -> None:
        """Takes over `files`; use `open_adapter` or `reopen`."""
        self.path, self.outline, self.stamp = path, outline, stamp
        self._spec, self._files = spec, files
        self._last_site: tuple[Site, dict[int, list[Pair]]] | None = None
        self._last_fused: tuple[tuple[Matrix, int], torch.Tensor] | None = None

    def sites(self) -> tuple[Site, ...]:
        """The sites that have any delta, by layer and then in the order of PROJECTIONS."""
        return self.outline.sites()

    def experts(self, site: Site) -> tuple[int, ...]:
        """The experts of a site that have a delta, sorted; (0,) for a dense site that has one."""
        return tuple(self._at(site))

    def parts(self, site: Site, expert: int) -> tuple[Part, ...]:
        """What `read` would return without the tensors; () where there is no delta."""
        return tuple(pair.kind.part for pair in self._at(site).get(expert, ()))

    def read(self, site: Site, expert: int) -> list[tuple[Part, torch.Tensor, torch.Tensor]]:
        """Per part, by out_begin: A [r, in] and B [out_end - out_begin, r], contiguous copies in the file's dtype.

        Rows of B are in canonical order ([gate | up], [q | k | v]). Raises AdapterFormatError where
        the file has become shorter since it was opened.
        """
        pairs = self._at(site).get(expert, ())
        try:
            return [(one.kind.part, self._read_a(one, site), self._read_b(one, site, expert)) for one in pairs]
        except AdapterFormatError as error:
            raise AdapterFormatError(f"adapter {self.path}: {site} expert {expert}: {error}") from None

    def _at(self, site: Site) -> dict[int, list[Pair]]:
        last = self._last_site
        if last is None or last[0] != site:
            last = self._last_site = site, self.outline.at(site)
        return last[1]

    def _read_a(self, pair: Pair, site: Site) -> torch.Tensor:
        return self._matrix(pair.kind.a, pair.a_begin, (pair.kind.part.lora_rank, self._spec.in_width(site)))

    def _read_b(self, pair: Pair, site: Site, expert: int) -> torch.Tensor:
        part = pair.kind.part
        shape = (part.out_end - part.out_begin, part.lora_rank)
        b = self._fused_b(pair, site, shape)[expert] if pair.kind.fused else None
        if b is None:
            b = self._matrix(pair.kind.b, pair.b_begin, shape)
        if pair.kind.interleaved:
            b = b.view(-1, 2, shape[1]).transpose(0, 1).reshape(shape)
        return b.clone() if pair.kind.fused else b

    def _fused_b(self, pair: Pair, site: Site, shape: tuple[int, int]) -> torch.Tensor:
        """B [E, out, r] of a fused tensor, whose file has column j*E+e for column j of expert e."""
        key, last = (pair.kind.b, pair.b_begin), self._last_fused
        if last is None or last[0] != key:
            num_experts = self._spec.experts_at(site)
            b = self._matrix(pair.kind.b, pair.b_begin, (shape[0], shape[1] * num_experts))
            last = self._last_fused = key, b.view(*shape, num_experts).permute(2, 0, 1).contiguous()
        return last[1]

    def _matrix(self, matrix: Matrix, begin: int, shape: tuple[int, int]) -> torch.Tensor:
        """torch is imported here: the controller, which reads no tensors, starts without it."""
        import torch

        data = self._files.read(matrix.file, begin, begin + shape[0] * shape[1] * ITEM_BYTES[matrix.dtype])
        return torch.frombuffer(data, dtype=getattr(torch, _DTYPES[matrix.dtype])).view(shape)

    def close(self) -> None:
        """Closes the files; may be called again. `read` must not be called after it."""
        self._last_fused = None
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def reopen(path: Path, spec: ModelSpec, outline: Outline, seen: str, stamp: str) -> Weights | None:
    """What `open_adapter` opened, with its `seen` and `stamp`, without reading anything.

    None where somebody may have touched any file since: then it has to be opened anew.
    """
    try:
        if stamp_of(path) != seen:
            return None
        files = OpenFiles(path, outline.names)
    except OSError:
        return None
    if stamp.endswith(f"/{files.stamp()}"):
        return Weights(path, spec, outline, files, stamp)
    files.close()
    return None
