"""Formats that clients, shards and the controller exchange.

slot      one step's request or response, mirrored by slot.h    region   the slots that two ends share
messages  handshakes, orders, prefetches (msgpack)              rpc      calling the control plane (gRPC)
events    what happens at a server, by ZeroMQ                 event_stream  following it
host      which host this is                              plain    messages as JSON says them
listing   pages of lists                                        credentials  what a caller shows
bounds    how large the fields of a request may be              proofs       of secrets that are not sent
terms     what a client proves, agrees on and holds             waits        what requests waited for
leader    calls go to the controller that leads
"""
