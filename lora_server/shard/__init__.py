"""One shard: receive, shrink, expand, send.

loop          picks steps, computes and answers them,  receiver      takes steps, pins their weights, and says
              and says how long each phase took                     how long they wait for them
request       the bytes of a slot, checked             schedule      the fair order of steps
coordination  alone, or in the leader's order          orders        how that order travels
compute       on the host, or on a GPU
device_host   the host of a kernel that serves by itself; numbers: its leader mode
"""
