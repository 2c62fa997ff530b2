"""Every duration that is a policy, in one table; constructors take the table, or the one number that they need."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Timings:
    """Durations in seconds. The lease of a client is a setting of its own: `lease_seconds`."""

    # a server's clients
    grant: float = 10.0  # for every shard to confirm a new client
    await_call: float = 1.0  # the longest that the controller lets one Await call wait
    foreign_step: float = 5.0  # a shard keeps a step until it learns of its adapter, and that the client holds it
    first_in_queue: float = 3.0  # the first request of the queue waits before adapters in use are drained for it
    weights: float = 0.1  # a client's steps wait so long together for weights that are loading, unless it waits for all
    loading: float = 600.0  # an admitted request waits so long for its adapter to load
    prefetch_gap: float = 0.01  # between two prefetches of one client
    expected_step: float = 30.0  # a prefetch is dropped so long after the step it was sent for is due
    shard_poll: float = 0.05  # between two polls for shards that are restarted, or started for a resize
    token_look: float = 0.5  # between two looks for changed tokens and tenants
    audit: float = 2.0  # a change waits so long for its audit entry to be written; then a later flush writes it
    resize_warm: float = 10.0  # new shards of a resize load idle adapters for so long; clients wait as long to move
    # the controller and its shards
    shard_silence: float = 10.0  # a shard that did not report for so long counts as down
    twin_silence: float = 2.0  # likewise, where its twin is up
    twin_wait: float = 3.0  # a controller that starts waits so long for the twins of shards that have registered
    shard_report: float = 0.5  # between two reports of a shard
    residency_report: float = 2e-3  # between two reports of layers that were loaded
    shard_leave: float = 1.0  # for the controller to confirm that a shard stops
    controller_start: float = 3.0  # a shard logs no outage in this time after its start
    controller_retry: float = 0.2  # between two attempts to reach the controller
    outage_reminder: float = 30.0  # between two log lines about one outage
    sweep: float = 0.5  # between two sweeps of the controller: leases, deadlines, health
    stall: float = 1.0  # a controller that heard no client for so long suspends lease expiry
    grace: float = 1.0  # for running calls when the controller stops
    rank_beat: float = 1.0  # between two renewals of a node's leased rank, or attempts to get one
    rank_rest: float = 3.0  # a controller that starts leases no rank before: nodes show it those that they have
    leader: float = 3.0  # without a sign of the leading controller for so long, its database lets another one lead
    leader_look: float = 0.2  # between two attempts of a standby to lead
    registry_look: float = 1.0  # between two looks for what other servers changed in the registry
    # events
    event_batch: float = 0.02  # an event waits so long for others
    event_beat: float = 0.5  # a topic without a batch for so long has a heartbeat
    event_silence: float = 2.0  # a reader without a message for so long asks by gRPC instead
    event_retry: float = 0.5  # between two attempts of a reader to follow a server
    # adapters
    note: float = 5.0  # for every shard to keep a change
    progress: float = 5.0  # between two log lines about registering
    replace: float = 600.0  # for every shard to load a new version from a followed directory
    replace_other: float = 60.0  # likewise, of a version that another server listed
    resolve_again: float = 10.0  # a name that --resolve did not find is not looked up again before
    watch_poll: float = 1.0  # between two scans of a followed directory
    watch_settle: float = 1.5  # files in it must be unchanged for so long
    load_retry: float = 1.0  # a shard retries a failed load on demand, not before
    block_patience: float = 5e-4  # between two blocks of a load while steps run
    preload_look: float = 0.5  # between two searches for something to preload
    # connections
    handshake: float = 5.0  # from a connection to a proven lease, whatever the transport
    quarantine: float = 60.0  # device memory of a client that went is kept so long before it is freed
    certificate_look: float = 10.0  # between two looks at renewed files that could not be used
    world_rest: float = 60.0  # an NVSHMEM place of a client that was cut off stays empty
    region_keep: float = 60.0  # slot memory that no step needed for so long goes back to the system
    send: float = 30.0  # for a shard to accept more bytes over TCP
    first_message: float = 5.0  # from a gRPC call to its first message
    grpc_idle: float = 60.0  # a gRPC connection without calls ends after so long
    connection_look: float = 0.25  # between two looks for connections that are too many
    http_request: float = 10.0  # from an HTTP connection, or its last answer, to the next answer
    file_piece: float = 30.0  # for a shard to take a piece of a file from node 0
    node0_away: float = 60.0  # a shard retries to get files while node 0 sends no byte
    node0_pause: float = 2.0  # the longest pause between two such attempts
    kernel_look: float = 2e-3  # between two looks of a shard's host at a kernel that serves by itself
    kernel_note: float = 1e-3  # between two looks for what that kernel says: refusals, and adapters that it lacks
    turn: float = 1e-3  # of one step in a shard's loop before other steps get a turn
    # processes and the database
    fork: float = 30.0  # for the fork server to answer; then it is replaced
    node_up: float = 120.0  # for a node's controller to listen
    restart_pause: float = 1.0  # before a child that lived for less is restarted
    restart_limit: float = 60.0  # a node ends when its child could not be restarted for so long
    stop: float = 5.0  # for children to stop; then they are killed
    stop_together: float = 1.0  # a child that was asked to stop may have been stopped with its node
    stuck: float = 10.0  # for a child to end after its node did
    hung: float = 30.0  # a shard whose loop makes no turn for so long ends itself, and is started again
    database_open: float = 10.0  # for the first transaction, with retries
    database: float = 10.0  # for any later one
    # engines
    call: float = 10.0  # of the connector to the controller
    release: float = 1.0  # of a call that gives something back; the next heartbeat repeats it
    release_gap: float = 2e-3  # a release waits so long for others of its engine's tick, and for the next request
    heartbeat: float = 1.0  # between two, or a quarter of the lease if that is shorter
    queue_look: float = 0.05  # between two looks at the queue where the server has no thread left to wait on
    queue_wait: float = 0.1  # of one call that waits for a place
    away_look: float = 0.05  # between two looks of waiting requests at a server that is away
    lookup: float = 0.2  # between two lookups of a name while the server is away
    outage_step: float = 1.0  # the first step of an outage waits for the server; later ones do not
    token_known: float = 2.0  # a gateway's token counts as good
    token_unknown: float = 0.5  # a gateway's token counts as bad

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) >= 0:
                raise ValueError(f"timings.{field.name}: got {getattr(self, field.name)}, expected seconds, at least 0")


DEFAULTS = Timings()
