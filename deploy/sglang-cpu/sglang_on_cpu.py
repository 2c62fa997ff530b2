"""Imported at every start of Python: changes torch before SGLang uses it, and nothing where there is a GPU.

torchvision's wheels are for CUDA; its operators are declared here, since it does not import without them. Pinned
memory is ordinary memory: SGLang's own LoRA asks for it on every device, and torch refuses without an accelerator.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from typing import Any

OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
FACTORIES = ("tensor", "empty", "zeros", "arange")
_declared: list[Any] = []  # torch forgets what a library declared when that is collected


class BeforeTorchvision(MetaPathFinder):
    """Finds nothing: does what is to be done before the first import of torchvision, once."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """See MetaPathFinder."""
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            _prepare()


def _prepare() -> None:
    import torch

    if torch.cuda.is_available():
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in OPERATORS:
        library.define(operator)
    _declared.append(library)
    for name in FACTORIES:
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return make(*args, **kwargs)

    return unpinned


sys.meta_path.insert(0, BeforeTorchvision())
