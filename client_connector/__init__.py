"""The connector: an engine-neutral client, and one folder of hooks per engine.

remote        joining a server                  client       a joined client: start, finish, recover
lease         calls that prove it, holdings     exchange     one site of one step; lanes to the shards
directory     the server's list of adapters     world        NVSHMEM's, which must be complete
reconnect     while a server is away            prefetch     signals before a first step
routing       rows -> messages                  packing      messages <-> slots
routed        rows -> messages on a device
alora         where an activated LoRA begins    geometry     the same base model at both ends
forward_pass  an engine's model at work         session      what a client has after joining
connect       which backend reaches a shard
serving/      what every serving engine needs   transformers/ vllm/   their hooks
"""
