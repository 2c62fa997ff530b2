"""Processes of a node; the one package that names concrete backends.

node              one `lora-server serve`: what it starts   processes  how: watched, restarted, stopped
  placements      the sets of shards that it runs
    node_stream     from its controller, which names them
  checks          what it checks first, and `doctor`
  startup         says that it starts, and serves           forks      forked from one that has imported all
  rank            leased from the controller              on_ray     nodes as actors of a Ray cluster
  node_calls      to the controller, each side proven       ray_node   one of them
                                                            forked     a forked child
controller_main   the controller's process (rank 0)         http       its port
  standby         one of two, until it leads
  guard           its ports, while none listens there      heap       large buffers are given back
shard_main        a shard's process                         backends   what it computes with
  shard_parts       its listeners, and what serves steps
  stream            to its controller, whenever there is one
    shard_commands    what that tells it                    shard_reports  what it tells that
  files             of adapters, from node 0
  kept              what it keeps for the next one          run_directory  sockets, gone with their last user
  world             its place in NVSHMEM's world
child_main        what both processes have in common          signals    that ask a process to stop
watchdog          ends a shard whose loop hangs
"""
