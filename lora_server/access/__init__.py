"""Identities and rights of callers. Nothing here is on a step's path: shards check what a step names by the lease.

identity   a tenant and a role                    names      what a name means to a tenant, what it sees
rights     which role may call what               limits     how much a tenant may have and do
tokens     texts that prove an identity           gate       authenticates and authorizes every call,
tables     in the database                                   by what it has read last
audit      the log of changes and refused calls
store      reads and writes them
exposure   what may be open without any of it     service    tokens and tenants over gRPC
remote     the gate of a node above rank 0        tls        of the controller, and of a shard
"""
