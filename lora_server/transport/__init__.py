"""Moving slots between a client and a shard: one interface, several backends.

base      Link, Connection, Port            session   what a client has after joining
connect   which backend a client uses       mapping   memory that can be given up at once
shm       shared memory on one host         park      spin a little, then sleep on a futex
zmq       TCP, across hosts                 address   binding its sockets
cuda_ipc  GPUs of one host                  twin      a region's rows in device memory
inproc    one thread of one process
"""
