"""Admission: which requests may use their adapters now, and which wait.

service    the lock, and what drains        queue      the rule, on tickets and order
tickets    what clients ask for, in which   table      those that are open
           class, and how it loads
order      of those that wait               ranking    within a tenant, by margin
margin     the time that one may wait
holds      which client holds what, and     capacity   the places in the shards' pools
           what shards are told of it       tally      how often adapters are held
names      which names clients hold         cut_offs   deadlines of what drains
"""
