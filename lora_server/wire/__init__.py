"""What travels between clients, shards and the controller.

slot      one step's request or response, mirrored by slot.h    region   the slots that two ends share
messages  handshakes, orders, prefetches (msgpack)              rpc      calling the control plane (gRPC)
host      which host this is                              plain    messages as JSON says them
listing   pages of adapters as one list                         credentials  what a caller shows
"""
