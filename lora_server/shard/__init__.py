"""One shard: receive, shrink, expand, send.

loop          picks steps, computes and answers them   receiver      takes steps, and pins their weights
request       the bytes of a slot, checked             schedule      the fair order of steps
coordination  alone, or in the leader's order          orders        how that order travels
compute       on the host, or on a GPU                 phases        how long steps take, by phase
patience      how long steps wait for weights
device_host   the host of a kernel that serves by itself; numbers: its leader mode
"""
