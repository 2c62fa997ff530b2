"""SGMV / BGMV for mixed-adapter batches: contract (ops), CPU (torch), slow reference (numpy)."""
