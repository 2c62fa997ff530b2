"""Who asks, and what they may do. Nothing here is on a step's path: shards check what a step names by the lease.

identity   a tenant and a role                    names      what a name means to a tenant, what it sees
rights     which role may call what               limits     how much a tenant may have and do
tokens     texts that prove an identity           gate       every call comes through it
tables     in the database                        audit      what was changed, by whom
store      what is read and written there         service    tokens and tenants over gRPC
exposure   what may be open without any of it     tls        certificates of the controller
remote     the gate of a node above rank 0        certificate   of a shard
"""
