"""The gRPC services at one address.

server          puts together                       listener  sockets, threads, limits
  service       what clients are answered           calls     ids, spans and refusals of all calls
    scope       what a caller sees of the adapters
  registration  the shards' streams               silence   calls that have not said anything yet
  files         of adapters, for nodes without them
"""
