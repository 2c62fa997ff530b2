"""Events of a server, for engines, gateways and autoscalers that follow it.

log        what happened: batches, sequences, replay   publisher  the socket that sends it, advice to
                                                                  routers too
residency  when an adapter's state is news             topics     which topics a caller may read
sockets    over ipc, and over TCP with CURVE           keys       which keys readers have shown
"""
