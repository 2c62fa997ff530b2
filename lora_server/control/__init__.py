"""The control plane. Nothing here is on a step's path.

controller    puts together:                       start       how far its start is
  clients     their leases, and what they hold     prefetch    signals before a request's first step
  arrivals    shards that register, and the        drain       admission stops, requests in use end
                state that they kept             connections  the limit on a port's connections
resize        another layout, while it serves      new_shards  its shards, until they serve
  caller      whether an RPC's caller still waits
adapters/     the catalog of adapters, by name, and its changes
sync/         what shards were told of adapters, and what they have
admission/    which requests may use their adapters now, and which wait
members/      shards and clients that are connected, and their leases
events/       what happened, for readers that follow it
reports/      status, metrics and listings
rpc/          its gRPC services                    http/       health, metrics and the page
"""
