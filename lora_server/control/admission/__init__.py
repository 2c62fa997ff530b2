"""Admission: which requests may use their adapters now, and which wait.

service    the lock, and what drains        queue      the rule, on tickets and order
holds      which client holds what          capacity   the places in the shards' pools
tally      how often adapters are held     loading    what admitted tickets wait for: their weights
names      which names clients hold        updates    what shards are told of holds
"""
