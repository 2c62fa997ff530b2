// What of NVSHMEM is used, in sources that are linked with its device library (-DNVSHMEM=1).
#pragma once
#include <nvshmem.h>
#include <nvshmemx.h>
