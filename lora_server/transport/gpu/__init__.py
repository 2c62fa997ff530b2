"""Steps that no host touches: device code of a link between GPUs; see docs/gpu-path.md.

layout   what the two ends, their hosts and their kernels read and write      source   the kernels' sources
"""
