"""The only modules that import vLLM; each wraps one part of it.

install   wraps them in, once       frontend   configuration, names, errors
engine    scheduler, KV hashes      worker     model runner, linear layers
moe       experts
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Make = Callable[[Any], Callable[..., Any]]
Wrap = Callable[[Any, str, Make], None]


def ours(find: Callable[[Any], Any]) -> Callable[[Callable[..., Any]], Make]:
    """Turn `hook(original, found, self, ...)` into a wrapper of a method, for objects in which `find` finds ours.

    `original` is the bound method. Objects of an engine without a LoRA server keep it.
    """

    def decorate(hook: Callable[..., Any]) -> Make:
        def make(original: Any) -> Callable[..., Any]:
            def method(self: Any, *args: Any, **kwargs: Any) -> Any:
                found = find(self)
                if found is None:
                    return original(self, *args, **kwargs)
                return hook(functools.partial(original, self), found, self, *args, **kwargs)

            return method

        return make

    return decorate
