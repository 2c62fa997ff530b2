"""The share of a step's jobs that each worker (a warp) does, for plans and checks. Mirrors source/shares.cuh, cost.cuh.

The jobs of a phase, shrink or expand, in their order: segment by segment, for each 32 of its entries all tiles of A
(two to a job), or of B. Legend: S segments, J jobs, W workers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels_cuda.sizes import JOB_ROWS

BAND_ROWS = 8  # entries that share one MMA

Ints = npt.NDArray[np.int64]


def rows_of_jobs(rows_S: Ints, jobs_S: Ints) -> Ints:
    """Count the entries that each job serves. A segment has `jobs_S` jobs per 32 entries; its last ones serve fewer."""
    blocks_S = -(-rows_S // JOB_ROWS)
    segment_J = np.repeat(np.arange(len(rows_S)), blocks_S * jobs_S)
    first_S = np.cumsum(blocks_S * jobs_S) - blocks_S * jobs_S
    block_J = (np.arange(len(segment_J)) - first_S[segment_J]) // jobs_S[segment_J]
    rows_J: Ints = np.minimum(rows_S[segment_J] - block_J * JOB_ROWS, JOB_ROWS)
    return rows_J


def job_cost(rows_J: Ints) -> Ints:
    """Return the cost of jobs of so many entries; cost.cuh says why."""
    bands_J = -(-rows_J // BAND_ROWS)
    return 1 + 2 * bands_J


def shares(cost_J: Ints, workers: int) -> Ints:
    """Divide the jobs: returns [W + 1]; worker w does the jobs from number w of it up to the next.

    Jobs lie on a line, each as long as it costs; a job belongs to the share in which its last unit lies. So no
    share costs more than an equal one and the longest job together.
    """
    ends_J = np.cumsum(cost_J)
    total = int(ends_J[-1]) if len(ends_J) else 0
    return np.searchsorted(ends_J, total * np.arange(workers + 1) // workers, side="right")
