"""The types of arrays. A suffix of a name says its shape, in the legend of each file."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
