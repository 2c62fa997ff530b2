// The cost of a job of so many entries to a warp, in units in which jobs of one phase compare. Mirrored by shares.py.
//
// A tile is copied once and multiplied once per band of 8 entries. How much longer each band after the first takes
// is not known yet, and to weigh bands too lightly costs more than too heavily. With 1 + 2 bands the slowest warp
// exceeds the average one by 5-10 % at the models' shapes, whether a band takes nothing or up to 0.75 of a tile's
// time; with equal numbers of jobs by 39 % at 0.25 and by 104 % at 0.75 (a model: python -m bench.kernels --balance).
#pragma once
#include "ptx.cuh"

DEVICE int job_cost(int rows) { return 1 + 2 * ((rows + 7) / 8); }
