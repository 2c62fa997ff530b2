"""Moving slots between a client and a shard by a host: one interface, several backends. On a GPU: lora_server.device.

base      Link, Connection, Port            session   a client's links and terms after joining
connect   choice of a client's backend      mapping   memory that can be given up at once
shm       shared memory on one host         park      spin a little, then sleep on a futex
          (shm_listener: the shard's side; bells: clients that pushed; slack: memory that goes back)
tcp       across hosts (tcp_listener: the   address   binding sockets
          shard's side; frames;             tls       encrypted, between hosts
          unauthenticated: connections that have proved nothing yet)
inproc    one thread of one process         rows      where the rows of a step lie
e4m3      rows in 8 bits                    environment    what CUDA reads once, for kernels that wait
"""
