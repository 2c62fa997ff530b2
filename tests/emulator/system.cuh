// kernels_cuda/source/system.cuh for a CPU: threads take turns, so every store is seen at once.
#pragma once

inline void fence_system() {}
inline unsigned add_one(unsigned* p) { return (*p)++; }
inline void store_release_system(uint64* p, uint64 value) { *p = value; }
