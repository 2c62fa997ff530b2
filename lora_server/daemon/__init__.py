"""Where concrete backends are named and processes are started.

node           one `lora-server serve`: its shard processes and, on rank 0, the controller
processes      starts, watches, restarts and stops shard processes
shard_main     what runs in a shard process
inproc         the same shards inside the caller's own process
"""
