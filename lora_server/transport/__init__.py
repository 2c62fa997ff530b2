"""Moving slots between a client and a shard: one interface, several backends."""
