"""The connector: an engine-neutral client, and one folder of hooks per engine.

remote        joining a server                  client       a joined client: start, finish, recover
lease         calls that prove it, prefetches   exchange     one site of one step
lanes         which link a shard's steps take   twins        links to replicas, lost and connected again
holds         what it holds, calls in batches
directory     the server's list of adapters
reconnect     while a server is away            packing      messages <-> slots
routing       rows -> messages                  geometry     the same base model at both ends
routed        rows -> messages on a device      session      what a client has after joining
moves         to another layout's shards
alora         where an activated LoRA begins   merged       what rows need if an adapter is in the weights
forward_pass  an engine's model at work
events        names known without a call
connect       which backend reaches a shard, once NVSHMEM's world is complete
serving/      what every serving engine needs   transformers/ vllm/ sglang/   their hooks
"""
