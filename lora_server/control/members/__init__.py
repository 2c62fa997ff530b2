"""Who is here.

shards     who is up, commands to them              agreement  what all nodes must share
leases     clients, until when                      world      of NVSHMEM: who has which place
"""
