"""The control plane. Nothing here is on a step's path.

controller    puts together:                       start       how far its start is
  clients     their leases, and what they hold     prefetch    signals before a request's first step
  arrivals    shards that come, go, and tell       drain       nobody is admitted any more
                what they kept                   connections  how many a port has
  caller      whether who asked still waits
adapters/     what there is, by name
sync/         what shards were told of it, and what they have
admission/    who may use it now, who waits
members/      shards and clients: who is here, until when
reports/      what the server tells of itself
rpc/          its gRPC services                    http/       health, metrics and the page
"""
