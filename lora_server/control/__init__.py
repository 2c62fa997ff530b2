"""The control plane. Nothing here is on a step's path.

controller   puts together:                       server      its gRPC services at one address
  scope        what a caller sees of the adapters
  adapters     registered, removed                  service       what it answers
    updates      another version, a pin (attempts)  registration  the shards' streams
    reconciled   as the ledger has them
    told         what shards were told of them    files         of adapters, for nodes without them
    held         what clients hold of them        listener      sockets, threads, limits
    registry     what there is
    origins      where they come from (allowed)
    resolver     names that nobody registered
    refusals     what is not served, and why
    followed     what is taken from it            http        health and metrics (http_limits, metrics_disk)
      readings   what of it need not be read
    admission    who may use it now, who waits    prefetch    signals before a request's first step
    room         what fits into the pools         watch       a directory that is followed
    holds        who uses it                      agreement   what all nodes must share
    tally        who used it, for how long         status      all of it, for who asks (overview, page, listing)
    residency    which shard has how much          metrics     what Prometheus asks for (build, metrics_disk)
  drain        nobody is admitted any more        calls       ids, spans and refusals of all calls
  clients      leases, and what they hold         arrivals    shards that come, go, and tell what they kept
    leases       until when                       shards      who is up, commands to them
  world        of NVSHMEM: who has which place
"""
