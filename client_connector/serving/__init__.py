"""What any serving engine needs to use a LoRA server; imports no engine.

settings   address, failure policy             staging    activations on their way to slots
plan       scheduler -> workers, and back      holder     the scheduler's adapters, by request
planned    a worker's forward pass             rejoin     joining anew while the engine goes on
launched   the same by kernels alone           launches   one site's of one step
tables     what changes between these          watchdog   looks after shards while kernels wait
linear     a dense site's exchange, as opaque torch ops too
experts    the two expert sites of a layer            lookahead  what waits, told before its turn
lookup     names, on a server that may be away
asking     a request's adapter, in a session that may be lost      waiting    requests without a place, or a server
"""
