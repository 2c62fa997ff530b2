"""`python -m bench.kernels`: the CUDA kernels beside their floor and their peers. Imports only kernels_cuda,
numpy, torch and cupy (peers also triton): a GPU host may have nothing else."""
