"""The parts that both sides of a link between GPUs need.

layout    structs that hosts and kernels share      slots     the memory of a link
codes     the numbers and codes in them
source    the kernels' sources                      needs     what a machine must have for it
gpu       a GPU as hosts use it                     cuda      a real one; cuda_kernels: its kernels
opened    which GPU a device is                     pinned    host memory that a GPU can use
virtual_memory memory that is handed over as a descriptor
"""
