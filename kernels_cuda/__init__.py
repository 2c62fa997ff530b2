"""SGMV / BGMV for mixed-adapter batches: one contract, several implementations.

ops        the contract                     reference   its literal loops, float64
cpu        torch                            cuda        the kernels of one GPU
layout     weights as tiles, and pages      tables      what kernels are told of weights and of a step
launch     one launch and its workspace     routing     segments from a router's choice, on the GPU
heuristics which variant a GPU gets         torch_ops   the step as a torch operator
build      the sources as one text          shares      which warp does what
residency  which blocks find room together     sizes       numbers that hosts and kernels share
"""
