"""The analytic model: capabilities of the machines, and the time of a step.

hardware   GPUs, links and nodes                 geometry   bytes and FLOPs of one layer
latency    one layer's LoRA step, Eq. 5 and 6    profile    measured times, which override it
memory     how many adapters fit                 transports links, and what overlaps on them
library    adapters as they are: ranks, bytes    engine_steps  vLLM's whole steps, measured
base       the base model's own layer            lora_work  bytes and FLOPs of a LoRA step
table1     the paper's Table 1                   table4     its Table 4 beside the model
profiles   measured ones that ship
"""
