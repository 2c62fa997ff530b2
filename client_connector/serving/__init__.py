"""The parts of the connector that every serving engine needs; imports no engine.

request_state   one request: a state machine       driver      carries out what it decides
leases          the scheduler's adapters            scheduler_session   its lease, joined again when lost
poller          requests that wait                  lookahead   prefetches for them
plan            scheduler -> workers, and back      settings    address, failure policy
planned         a worker's forward pass             sites       its sites, by the host
launched        the same by kernels alone           kernel_links  its links
launches        one site of one step                tables      what changes between launches
watchdog        watches shards while kernels wait
linear          a dense site                        experts     the two expert sites of a layer
modules         finds the sites of a model          wrapping    replaces an engine's functions
contract        what a connector touches of an engine, and in which versions
lookup          names of adapters                   http        errors as answers, Retry-After
pace            how long the next pass takes        waits       how long a request waited, and for what
tenants         middleware for many tenants         ranks       what tensor-parallel ranks tell each other
"""
