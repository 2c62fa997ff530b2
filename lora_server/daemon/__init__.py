"""Where concrete backends are named and processes are started.

node              one `lora-server serve`: what it starts   processes  how: watched, restarted, stopped
  startup         says that it starts, and serves           forks      whence: one that has their imports behind it
                                                            forked     a child that it forked
controller_main   the controller's process (rank 0)         http       its port
                                                            heap       large buffers are given back
shard_main        a shard's process                         backends   what it computes with
  stream            to its controller, whenever there is one
    shard_commands    what that tells it                    shard_reports  what it tells that
  files             of adapters, from node 0
  kept              what it keeps for the next one          run_directory  sockets, gone with their last user
  world             its place in NVSHMEM's
child_main        what both processes have in common          signals    that ask a process to stop
inproc            the same shards inside the caller's own process
"""
