// What a job of so many entries costs a warp, in units in which the jobs of one phase compare.
#pragma once
#include "ptx.cuh"

DEVICE int job_cost(int) { return 1; }
