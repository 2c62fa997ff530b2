"""The control plane. Nothing here is on a step's path.

controller   puts together:                       service     its gRPC services
  adapters     registered, loaded, dropped        http        health and metrics (http_limits)
    registry     what there is (durable)          prefetch    signals before a request's first step
    refusals     what is not served, and why      watch       a directory that is followed
    followed     what is taken from it
    admission    who may use it now, who waits    agreement   what all nodes must share
    room         what fits into the pools
    holds        who uses it
    residency    which shard has how much          status      all of it, for who asks
  clients      leases, and what they hold         arrivals    shards that come, go, and tell what they kept
    leases       until when                       shards      who is up, commands to them
"""
