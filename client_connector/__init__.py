"""What engines import: an engine-neutral client, and one folder of hooks per engine.

remote        joining a server                  client       a joined client: start, finish, recover
directory     its list of adapters              lanes        the way to one shard
retry         while a server is away            exchange     one site of one step
world         in NVSHMEM's world
prefetch      signals before a first step
routing       rows -> messages                  packing      messages <-> slots
routed        rows -> messages on a device
alora         where an activated LoRA begins    geometry     the same base model at both ends
forward_pass  an engine's model at work
serving/      what every serving engine needs   transformers/ vllm/   their hooks
"""
