"""Admission: which requests may use their adapters now, and which wait.

service    the lock, and what drains        queue      the rule, on tickets and order
tickets    what clients ask for             table      those that are open
order      of those that wait               ranking    within a tenant, by margin
margin     the time that one may wait       classes    SLO classes of tickets
holds      which client holds what          capacity   the places in the shards' pools
tally      how often adapters are held       loading    what admitted tickets wait for: their weights
names      which names clients hold          updates    what shards are told of holds
cut_offs   deadlines of what drains
"""
