"""`python -m bench.gpu_run`: everything that wants a GPU, in stages that each end by a deadline (docs/gpu-run.md).

stages     the table                                  runner   one stage as a process, its deadline
state      what ended, on disk, so that it resumes    record   what a stage found, line by line
carried    wheels that travel, unpacked               report   the Markdown, and the kernels' JSON
stage      what the processes of stages share         spoken   a child process that reports events (child)

Stages with code of their own: probe, cuda_tests, correctness, sanitizer (sanitized), ipc (lab, endless), put
(put_timing), ours (variants, one_cell), peers, engine, codes, nvshmem (nvshmem_pe), world (world_engine).
"""
