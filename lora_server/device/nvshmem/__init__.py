"""The world of processes with GPUs that reach each other by NVSHMEM.

world     the processes, and their places in the heap    opened    which GPU of the world a device is
library   a real GPU there: NVSHMEM's host side          nvshmem_build  its device code, linked
"""
