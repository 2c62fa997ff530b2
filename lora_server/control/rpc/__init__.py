"""The gRPC services at one address.

server          puts together                       listener  sockets, threads, limits
  service       the answers to clients' calls       calls     ids, spans and refusals of all calls
    scope       the adapters that a caller may see  holds     acquires and releases, one by one or in batches
  refusing      what a standby answers
  registration  the shards' streams               silence   limits on calls that have sent no message yet
  nodes         their streams, and leases of ranks    streams  helpers of both-way streams
  files         of adapters, for nodes without them           events   where events are, and their replay
"""
