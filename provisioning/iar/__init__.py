"""Immediate Admissibility Rate: the share of requests that find their adapter cached, or can have it cached at once.

admissibility      what callers see: checked input, one of three models
models             `offered`, and what all three share
literal            the paper's Eq. 2-4
queued             the working set with its waiting requests
search             the smallest cache by `literal`, without trying every size
oracle             Algorithm 1 word for word, for the tests
poisson_binomial   the law of the number of present adapters
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["admissibility_curve", "immediate_admissibility", "min_cache_slots"]

if TYPE_CHECKING:
    from provisioning.iar.admissibility import admissibility_curve, immediate_admissibility, min_cache_slots
else:

    def __getattr__(name: str) -> object:
        """Import a name on first use: a plan needs `models` alone, and scipy.optimize is slow to load."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from provisioning.iar import admissibility

        return getattr(admissibility, name)
