from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Adapter(_message.Message):
    __slots__ = ("name", "version", "handle", "uri", "lora_rank", "bytes", "state", "resident_layers", "warnings", "error", "holders", "invocation", "layers", "shards", "pinned", "slo_class", "versions")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    LORA_RANK_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_LAYERS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    INVOCATION_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    SLO_CLASS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    handle: int
    uri: str
    lora_rank: int
    bytes: int
    state: str
    resident_layers: int
    warnings: _containers.RepeatedScalarFieldContainer[str]
    error: str
    holders: int
    invocation: Invocation
    layers: int
    shards: _containers.RepeatedCompositeFieldContainer[ShardLayers]
    pinned: bool
    slo_class: str
    versions: _containers.RepeatedCompositeFieldContainer[AdapterVersion]
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., handle: _Optional[int] = ..., uri: _Optional[str] = ..., lora_rank: _Optional[int] = ..., bytes: _Optional[int] = ..., state: _Optional[str] = ..., resident_layers: _Optional[int] = ..., warnings: _Optional[_Iterable[str]] = ..., error: _Optional[str] = ..., holders: _Optional[int] = ..., invocation: _Optional[_Union[Invocation, _Mapping]] = ..., layers: _Optional[int] = ..., shards: _Optional[_Iterable[_Union[ShardLayers, _Mapping]]] = ..., pinned: bool = ..., slo_class: _Optional[str] = ..., versions: _Optional[_Iterable[_Union[AdapterVersion, _Mapping]]] = ...) -> None: ...

class ShardLayers(_message.Message):
    __slots__ = ("shard", "ready", "layers", "host", "remote")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    REMOTE_FIELD_NUMBER: _ClassVar[int]
    shard: int
    ready: int
    layers: int
    host: int
    remote: bool
    def __init__(self, shard: _Optional[int] = ..., ready: _Optional[int] = ..., layers: _Optional[int] = ..., host: _Optional[int] = ..., remote: bool = ...) -> None: ...

class Invocation(_message.Message):
    __slots__ = ("tokens", "text")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    text: str
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ...) -> None: ...

class AddAdapterRequest(_message.Message):
    __slots__ = ("name", "uri", "wait_seconds", "slo_class")
    NAME_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SLO_CLASS_FIELD_NUMBER: _ClassVar[int]
    name: str
    uri: str
    wait_seconds: float
    slo_class: str
    def __init__(self, name: _Optional[str] = ..., uri: _Optional[str] = ..., wait_seconds: _Optional[float] = ..., slo_class: _Optional[str] = ...) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ("page_token", "page_size", "on_behalf_of")
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    ON_BEHALF_OF_FIELD_NUMBER: _ClassVar[int]
    page_token: str
    page_size: int
    on_behalf_of: str
    def __init__(self, page_token: _Optional[str] = ..., page_size: _Optional[int] = ..., on_behalf_of: _Optional[str] = ...) -> None: ...

class GetAdapterRequest(_message.Message):
    __slots__ = ("name", "registered", "on_behalf_of")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    ON_BEHALF_OF_FIELD_NUMBER: _ClassVar[int]
    name: str
    registered: bool
    on_behalf_of: str
    def __init__(self, name: _Optional[str] = ..., registered: bool = ..., on_behalf_of: _Optional[str] = ...) -> None: ...

class ListAdaptersReply(_message.Message):
    __slots__ = ("adapters", "refused", "next_page_token", "dtype")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    refused: _containers.RepeatedCompositeFieldContainer[Refusal]
    next_page_token: str
    dtype: str
    def __init__(self, adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., refused: _Optional[_Iterable[_Union[Refusal, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., dtype: _Optional[str] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("name", "uri", "code", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    uri: str
    code: str
    reason: str
    def __init__(self, name: _Optional[str] = ..., uri: _Optional[str] = ..., code: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Refusals(_message.Message):
    __slots__ = ("refusals", "serial")
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    refusals: bytes
    serial: int
    def __init__(self, refusals: _Optional[bytes] = ..., serial: _Optional[int] = ...) -> None: ...

class RemoveAdapterRequest(_message.Message):
    __slots__ = ("name", "drain_seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DRAIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    drain_seconds: float
    def __init__(self, name: _Optional[str] = ..., drain_seconds: _Optional[float] = ...) -> None: ...

class RemoveAdapterReply(_message.Message):
    __slots__ = ("holders",)
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    holders: int
    def __init__(self, holders: _Optional[int] = ...) -> None: ...

class PinAdapterRequest(_message.Message):
    __slots__ = ("name", "wait_seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    wait_seconds: float
    def __init__(self, name: _Optional[str] = ..., wait_seconds: _Optional[float] = ...) -> None: ...

class UnpinAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UpdateAdapterRequest(_message.Message):
    __slots__ = ("name", "uri", "wait_seconds", "drain_seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DRAIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    uri: str
    wait_seconds: float
    drain_seconds: float
    def __init__(self, name: _Optional[str] = ..., uri: _Optional[str] = ..., wait_seconds: _Optional[float] = ..., drain_seconds: _Optional[float] = ...) -> None: ...

class RollbackAdapterRequest(_message.Message):
    __slots__ = ("name", "version", "wait_seconds", "drain_seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DRAIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    wait_seconds: float
    drain_seconds: float
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., wait_seconds: _Optional[float] = ..., drain_seconds: _Optional[float] = ...) -> None: ...

class AdapterVersion(_message.Message):
    __slots__ = ("version", "uri", "added", "listed")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    LISTED_FIELD_NUMBER: _ClassVar[int]
    version: str
    uri: str
    added: float
    listed: bool
    def __init__(self, version: _Optional[str] = ..., uri: _Optional[str] = ..., added: _Optional[float] = ..., listed: bool = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("instance", "served_names", "place", "slo_class", "pushes", "merged")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    SERVED_NAMES_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    SLO_CLASS_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    MERGED_FIELD_NUMBER: _ClassVar[int]
    instance: str
    served_names: _containers.RepeatedScalarFieldContainer[str]
    place: Place
    slo_class: str
    pushes: bool
    merged: str
    def __init__(self, instance: _Optional[str] = ..., served_names: _Optional[_Iterable[str]] = ..., place: _Optional[_Union[Place, _Mapping]] = ..., slo_class: _Optional[str] = ..., pushes: bool = ..., merged: _Optional[str] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("client", "epoch", "key", "lease_seconds", "spec_json", "layout", "dtype", "coordination", "max_step_rows", "endpoints", "server", "hidden_adapters", "adapters", "wire", "place", "generation", "slo_class", "base_weights", "replicas", "replica", "failover_us")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    COORDINATION_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_ROWS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    WIRE_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SLO_CLASS_FIELD_NUMBER: _ClassVar[int]
    BASE_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    FAILOVER_US_FIELD_NUMBER: _ClassVar[int]
    client: int
    epoch: int
    key: bytes
    lease_seconds: float
    spec_json: str
    layout: str
    dtype: str
    coordination: str
    max_step_rows: int
    endpoints: _containers.RepeatedCompositeFieldContainer[Endpoint]
    server: str
    hidden_adapters: _containers.RepeatedScalarFieldContainer[str]
    adapters: int
    wire: str
    place: Place
    generation: int
    slo_class: str
    base_weights: str
    replicas: int
    replica: int
    failover_us: int
    def __init__(self, client: _Optional[int] = ..., epoch: _Optional[int] = ..., key: _Optional[bytes] = ..., lease_seconds: _Optional[float] = ..., spec_json: _Optional[str] = ..., layout: _Optional[str] = ..., dtype: _Optional[str] = ..., coordination: _Optional[str] = ..., max_step_rows: _Optional[int] = ..., endpoints: _Optional[_Iterable[_Union[Endpoint, _Mapping]]] = ..., server: _Optional[str] = ..., hidden_adapters: _Optional[_Iterable[str]] = ..., adapters: _Optional[int] = ..., wire: _Optional[str] = ..., place: _Optional[_Union[Place, _Mapping]] = ..., generation: _Optional[int] = ..., slo_class: _Optional[str] = ..., base_weights: _Optional[str] = ..., replicas: _Optional[int] = ..., replica: _Optional[int] = ..., failover_us: _Optional[int] = ...) -> None: ...

class Place(_message.Message):
    __slots__ = ("world", "rank", "size", "uid", "slots")
    WORLD_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    world: int
    rank: int
    size: int
    uid: bytes
    slots: int
    def __init__(self, world: _Optional[int] = ..., rank: _Optional[int] = ..., size: _Optional[int] = ..., uid: _Optional[bytes] = ..., slots: _Optional[int] = ...) -> None: ...

class WorldRequest(_message.Message):
    __slots__ = ("proof",)
    PROOF_FIELD_NUMBER: _ClassVar[int]
    proof: Proof
    def __init__(self, proof: _Optional[_Union[Proof, _Mapping]] = ...) -> None: ...

class Endpoint(_message.Message):
    __slots__ = ("shard", "host", "shm", "tcp", "device", "certificate")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    SHM_FIELD_NUMBER: _ClassVar[int]
    TCP_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    shard: int
    host: str
    shm: str
    tcp: str
    device: str
    certificate: bytes
    def __init__(self, shard: _Optional[int] = ..., host: _Optional[str] = ..., shm: _Optional[str] = ..., tcp: _Optional[str] = ..., device: _Optional[str] = ..., certificate: _Optional[bytes] = ...) -> None: ...

class Proof(_message.Message):
    __slots__ = ("client", "epoch", "count", "mac")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    client: int
    epoch: int
    count: int
    mac: bytes
    def __init__(self, client: _Optional[int] = ..., epoch: _Optional[int] = ..., count: _Optional[int] = ..., mac: _Optional[bytes] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("proof", "settled", "lacking", "waits", "generation")
    PROOF_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    LACKING_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    proof: Proof
    settled: _containers.RepeatedScalarFieldContainer[int]
    lacking: _containers.RepeatedScalarFieldContainer[int]
    waits: _containers.RepeatedCompositeFieldContainer[PhaseStats]
    generation: int
    def __init__(self, proof: _Optional[_Union[Proof, _Mapping]] = ..., settled: _Optional[_Iterable[int]] = ..., lacking: _Optional[_Iterable[int]] = ..., waits: _Optional[_Iterable[_Union[PhaseStats, _Mapping]]] = ..., generation: _Optional[int] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("forgot", "endpoints", "move", "pause")
    FORGOT_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    forgot: bool
    endpoints: _containers.RepeatedCompositeFieldContainer[Endpoint]
    move: Move
    pause: float
    def __init__(self, forgot: bool = ..., endpoints: _Optional[_Iterable[_Union[Endpoint, _Mapping]]] = ..., move: _Optional[_Union[Move, _Mapping]] = ..., pause: _Optional[float] = ...) -> None: ...

class Move(_message.Message):
    __slots__ = ("generation", "layout", "endpoints")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    layout: str
    endpoints: _containers.RepeatedCompositeFieldContainer[Endpoint]
    def __init__(self, generation: _Optional[int] = ..., layout: _Optional[str] = ..., endpoints: _Optional[_Iterable[_Union[Endpoint, _Mapping]]] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("proof", "unanswered")
    PROOF_FIELD_NUMBER: _ClassVar[int]
    UNANSWERED_FIELD_NUMBER: _ClassVar[int]
    proof: Proof
    unanswered: bool
    def __init__(self, proof: _Optional[_Union[Proof, _Mapping]] = ..., unanswered: bool = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("proof", "needs")
    PROOF_FIELD_NUMBER: _ClassVar[int]
    NEEDS_FIELD_NUMBER: _ClassVar[int]
    proof: Proof
    needs: _containers.RepeatedCompositeFieldContainer[Need]
    def __init__(self, proof: _Optional[_Union[Proof, _Mapping]] = ..., needs: _Optional[_Iterable[_Union[Need, _Mapping]]] = ...) -> None: ...

class PrefetchReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AcquireRequest(_message.Message):
    __slots__ = ("proof", "names", "ticket", "on_behalf_of", "pace_us")
    PROOF_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ON_BEHALF_OF_FIELD_NUMBER: _ClassVar[int]
    PACE_US_FIELD_NUMBER: _ClassVar[int]
    proof: Proof
    names: _containers.RepeatedScalarFieldContainer[str]
    ticket: int
    on_behalf_of: str
    pace_us: int
    def __init__(self, proof: _Optional[_Union[Proof, _Mapping]] = ..., names: _Optional[_Iterable[str]] = ..., ticket: _Optional[int] = ..., on_behalf_of: _Optional[str] = ..., pace_us: _Optional[int] = ...) -> None: ...

class HeldAdapter(_message.Message):
    __slots__ = ("name", "handle", "sites", "version", "invocation")
    NAME_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    SITES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INVOCATION_FIELD_NUMBER: _ClassVar[int]
    name: str
    handle: int
    sites: _containers.RepeatedScalarFieldContainer[int]
    version: str
    invocation: Invocation
    def __init__(self, name: _Optional[str] = ..., handle: _Optional[int] = ..., sites: _Optional[_Iterable[int]] = ..., version: _Optional[str] = ..., invocation: _Optional[_Union[Invocation, _Mapping]] = ...) -> None: ...

class AcquireReply(_message.Message):
    __slots__ = ("adapters", "position", "reason", "loading", "expected_us")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_US_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[HeldAdapter]
    position: int
    reason: str
    loading: bool
    expected_us: int
    def __init__(self, adapters: _Optional[_Iterable[_Union[HeldAdapter, _Mapping]]] = ..., position: _Optional[int] = ..., reason: _Optional[str] = ..., loading: bool = ..., expected_us: _Optional[int] = ...) -> None: ...

class AwaitRequest(_message.Message):
    __slots__ = ("proof", "tickets", "seconds")
    PROOF_FIELD_NUMBER: _ClassVar[int]
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    proof: Proof
    tickets: _containers.RepeatedScalarFieldContainer[int]
    seconds: float
    def __init__(self, proof: _Optional[_Union[Proof, _Mapping]] = ..., tickets: _Optional[_Iterable[int]] = ..., seconds: _Optional[float] = ...) -> None: ...

class AwaitReply(_message.Message):
    __slots__ = ("tickets",)
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    tickets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tickets: _Optional[_Iterable[int]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("proof", "tickets")
    PROOF_FIELD_NUMBER: _ClassVar[int]
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    proof: Proof
    tickets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, proof: _Optional[_Union[Proof, _Mapping]] = ..., tickets: _Optional[_Iterable[int]] = ...) -> None: ...

class CancelReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("proof", "handles")
    PROOF_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    proof: Proof
    handles: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, proof: _Optional[_Union[Proof, _Mapping]] = ..., handles: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HoldRequest(_message.Message):
    __slots__ = ("proof", "entries")
    PROOF_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    proof: Proof
    entries: _containers.RepeatedCompositeFieldContainer[HoldEntry]
    def __init__(self, proof: _Optional[_Union[Proof, _Mapping]] = ..., entries: _Optional[_Iterable[_Union[HoldEntry, _Mapping]]] = ...) -> None: ...

class HoldEntry(_message.Message):
    __slots__ = ("release", "cancel", "acquire", "request", "traceparent")
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    ACQUIRE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    release: ReleaseRequest
    cancel: CancelRequest
    acquire: AcquireRequest
    request: str
    traceparent: str
    def __init__(self, release: _Optional[_Union[ReleaseRequest, _Mapping]] = ..., cancel: _Optional[_Union[CancelRequest, _Mapping]] = ..., acquire: _Optional[_Union[AcquireRequest, _Mapping]] = ..., request: _Optional[str] = ..., traceparent: _Optional[str] = ...) -> None: ...

class HoldReply(_message.Message):
    __slots__ = ("answers",)
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[HoldAnswer]
    def __init__(self, answers: _Optional[_Iterable[_Union[HoldAnswer, _Mapping]]] = ...) -> None: ...

class HoldAnswer(_message.Message):
    __slots__ = ("acquired", "code", "message")
    ACQUIRED_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    acquired: AcquireReply
    code: str
    message: str
    def __init__(self, acquired: _Optional[_Union[AcquireReply, _Mapping]] = ..., code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ("proof", "handles")
    PROOF_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    proof: Proof
    handles: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, proof: _Optional[_Union[Proof, _Mapping]] = ..., handles: _Optional[_Iterable[int]] = ...) -> None: ...

class RestoreReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BorrowRequest(_message.Message):
    __slots__ = ("proof", "holder")
    PROOF_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    proof: Proof
    holder: Proof
    def __init__(self, proof: _Optional[_Union[Proof, _Mapping]] = ..., holder: _Optional[_Union[Proof, _Mapping]] = ...) -> None: ...

class BorrowReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("seconds", "shard")
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    shard: int
    def __init__(self, seconds: _Optional[float] = ..., shard: _Optional[int] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("held",)
    HELD_FIELD_NUMBER: _ClassVar[int]
    held: int
    def __init__(self, held: _Optional[int] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResizeRequest(_message.Message):
    __slots__ = ("layout", "seconds")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    layout: str
    seconds: float
    def __init__(self, layout: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class ResizeReply(_message.Message):
    __slots__ = ("generation", "moved", "ended", "seconds")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    moved: int
    ended: int
    seconds: float
    def __init__(self, generation: _Optional[int] = ..., moved: _Optional[int] = ..., ended: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class ResizeStatus(_message.Message):
    __slots__ = ("state", "layout", "done", "total")
    STATE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    state: str
    layout: str
    done: int
    total: int
    def __init__(self, state: _Optional[str] = ..., layout: _Optional[str] = ..., done: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ShardStatus(_message.Message):
    __slots__ = ("shard", "stage", "ep_rank", "state", "node", "pid", "restarts", "stats", "lost_since", "replica")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    EP_RANK_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    LOST_SINCE_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    shard: int
    stage: int
    ep_rank: int
    state: str
    node: int
    pid: int
    restarts: int
    stats: ShardStats
    lost_since: float
    replica: int
    def __init__(self, shard: _Optional[int] = ..., stage: _Optional[int] = ..., ep_rank: _Optional[int] = ..., state: _Optional[str] = ..., node: _Optional[int] = ..., pid: _Optional[int] = ..., restarts: _Optional[int] = ..., stats: _Optional[_Union[ShardStats, _Mapping]] = ..., lost_since: _Optional[float] = ..., replica: _Optional[int] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("model", "layout", "ready", "clients", "adapters", "shards", "pid", "run", "reason", "refused", "warned", "joined", "active", "queued", "num_refused", "generation", "num_loading", "loading", "slo_classes", "draining", "replicas", "degraded", "version", "now", "resize", "leader_epoch")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    WARNED_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NUM_LOADING_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    SLO_CLASSES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    RESIZE_FIELD_NUMBER: _ClassVar[int]
    LEADER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    model: str
    layout: str
    ready: bool
    clients: int
    adapters: int
    shards: _containers.RepeatedCompositeFieldContainer[ShardStatus]
    pid: int
    run: str
    reason: str
    refused: _containers.RepeatedCompositeFieldContainer[Refusal]
    warned: int
    joined: _containers.RepeatedCompositeFieldContainer[ClientStatus]
    active: int
    queued: int
    num_refused: int
    generation: int
    num_loading: int
    loading: _containers.RepeatedCompositeFieldContainer[LoadingStatus]
    slo_classes: _containers.RepeatedCompositeFieldContainer[SloClassStatus]
    draining: _containers.RepeatedCompositeFieldContainer[DrainingStatus]
    replicas: int
    degraded: str
    version: str
    now: float
    resize: ResizeStatus
    leader_epoch: int
    def __init__(self, model: _Optional[str] = ..., layout: _Optional[str] = ..., ready: bool = ..., clients: _Optional[int] = ..., adapters: _Optional[int] = ..., shards: _Optional[_Iterable[_Union[ShardStatus, _Mapping]]] = ..., pid: _Optional[int] = ..., run: _Optional[str] = ..., reason: _Optional[str] = ..., refused: _Optional[_Iterable[_Union[Refusal, _Mapping]]] = ..., warned: _Optional[int] = ..., joined: _Optional[_Iterable[_Union[ClientStatus, _Mapping]]] = ..., active: _Optional[int] = ..., queued: _Optional[int] = ..., num_refused: _Optional[int] = ..., generation: _Optional[int] = ..., num_loading: _Optional[int] = ..., loading: _Optional[_Iterable[_Union[LoadingStatus, _Mapping]]] = ..., slo_classes: _Optional[_Iterable[_Union[SloClassStatus, _Mapping]]] = ..., draining: _Optional[_Iterable[_Union[DrainingStatus, _Mapping]]] = ..., replicas: _Optional[int] = ..., degraded: _Optional[str] = ..., version: _Optional[str] = ..., now: _Optional[float] = ..., resize: _Optional[_Union[ResizeStatus, _Mapping]] = ..., leader_epoch: _Optional[int] = ...) -> None: ...

class DrainingStatus(_message.Message):
    __slots__ = ("name", "version", "clients", "serves", "merged_in")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    SERVES_FIELD_NUMBER: _ClassVar[int]
    MERGED_IN_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    clients: _containers.RepeatedScalarFieldContainer[int]
    serves: str
    merged_in: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., clients: _Optional[_Iterable[int]] = ..., serves: _Optional[str] = ..., merged_in: _Optional[_Iterable[int]] = ...) -> None: ...

class LoadingStatus(_message.Message):
    __slots__ = ("name", "requests", "expected_us")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_US_FIELD_NUMBER: _ClassVar[int]
    name: str
    requests: int
    expected_us: int
    def __init__(self, name: _Optional[str] = ..., requests: _Optional[int] = ..., expected_us: _Optional[int] = ...) -> None: ...

class SloClassStatus(_message.Message):
    __slots__ = ("name", "slo", "queued")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SLO_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    name: str
    slo: str
    queued: int
    def __init__(self, name: _Optional[str] = ..., slo: _Optional[str] = ..., queued: _Optional[int] = ...) -> None: ...

class ClientStatus(_message.Message):
    __slots__ = ("client", "instance", "adapters", "transports", "silent_seconds", "held", "slo_class")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    SILENT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    SLO_CLASS_FIELD_NUMBER: _ClassVar[int]
    client: int
    instance: str
    adapters: _containers.RepeatedScalarFieldContainer[str]
    transports: _containers.RepeatedScalarFieldContainer[str]
    silent_seconds: float
    held: int
    slo_class: str
    def __init__(self, client: _Optional[int] = ..., instance: _Optional[str] = ..., adapters: _Optional[_Iterable[str]] = ..., transports: _Optional[_Iterable[str]] = ..., silent_seconds: _Optional[float] = ..., held: _Optional[int] = ..., slo_class: _Optional[str] = ...) -> None: ...

class ShardStats(_message.Message):
    __slots__ = ("steps", "failed", "entries", "request_bytes", "response_bytes", "wait_ns", "compute_ns", "weight_bytes", "clients", "followers", "attached", "device", "free_bytes", "total_bytes", "host_bytes", "host_total_bytes", "loads", "loaded_bytes", "evictions", "disk", "preloads", "preload_hits", "phases", "load_times", "tenants")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_NS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    FOLLOWERS_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    LOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    PRELOADS_FIELD_NUMBER: _ClassVar[int]
    PRELOAD_HITS_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    LOAD_TIMES_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    failed: int
    entries: int
    request_bytes: int
    response_bytes: int
    wait_ns: int
    compute_ns: int
    weight_bytes: int
    clients: int
    followers: int
    attached: _containers.RepeatedCompositeFieldContainer[Attached]
    device: str
    free_bytes: int
    total_bytes: int
    host_bytes: int
    host_total_bytes: int
    loads: int
    loaded_bytes: int
    evictions: int
    disk: DiskStats
    preloads: int
    preload_hits: int
    phases: _containers.RepeatedCompositeFieldContainer[PhaseStats]
    load_times: _containers.RepeatedCompositeFieldContainer[PhaseStats]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantStats]
    def __init__(self, steps: _Optional[int] = ..., failed: _Optional[int] = ..., entries: _Optional[int] = ..., request_bytes: _Optional[int] = ..., response_bytes: _Optional[int] = ..., wait_ns: _Optional[int] = ..., compute_ns: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., clients: _Optional[int] = ..., followers: _Optional[int] = ..., attached: _Optional[_Iterable[_Union[Attached, _Mapping]]] = ..., device: _Optional[str] = ..., free_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., host_bytes: _Optional[int] = ..., host_total_bytes: _Optional[int] = ..., loads: _Optional[int] = ..., loaded_bytes: _Optional[int] = ..., evictions: _Optional[int] = ..., disk: _Optional[_Union[DiskStats, _Mapping]] = ..., preloads: _Optional[int] = ..., preload_hits: _Optional[int] = ..., phases: _Optional[_Iterable[_Union[PhaseStats, _Mapping]]] = ..., load_times: _Optional[_Iterable[_Union[PhaseStats, _Mapping]]] = ..., tenants: _Optional[_Iterable[_Union[TenantStats, _Mapping]]] = ...) -> None: ...

class TenantStats(_message.Message):
    __slots__ = ("tenant", "steps", "failed", "entries", "request_bytes", "response_bytes", "wait_ns", "compute_ns")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_NS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    steps: int
    failed: int
    entries: int
    request_bytes: int
    response_bytes: int
    wait_ns: int
    compute_ns: int
    def __init__(self, tenant: _Optional[str] = ..., steps: _Optional[int] = ..., failed: _Optional[int] = ..., entries: _Optional[int] = ..., request_bytes: _Optional[int] = ..., response_bytes: _Optional[int] = ..., wait_ns: _Optional[int] = ..., compute_ns: _Optional[int] = ...) -> None: ...

class PhaseStats(_message.Message):
    __slots__ = ("phase", "counts", "sum_ns")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUM_NS_FIELD_NUMBER: _ClassVar[int]
    phase: str
    counts: _containers.RepeatedScalarFieldContainer[int]
    sum_ns: int
    def __init__(self, phase: _Optional[str] = ..., counts: _Optional[_Iterable[int]] = ..., sum_ns: _Optional[int] = ...) -> None: ...

class DiskStats(_message.Message):
    __slots__ = ("bytes", "total_bytes", "fetches", "fetched_bytes", "fetch_seconds", "fetch_failures", "evictions")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    FETCHES_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FETCH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FETCH_FAILURES_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    total_bytes: int
    fetches: int
    fetched_bytes: int
    fetch_seconds: float
    fetch_failures: int
    evictions: int
    def __init__(self, bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., fetches: _Optional[int] = ..., fetched_bytes: _Optional[int] = ..., fetch_seconds: _Optional[float] = ..., fetch_failures: _Optional[int] = ..., evictions: _Optional[int] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("client", "transport")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    client: int
    transport: str
    def __init__(self, client: _Optional[int] = ..., transport: _Optional[str] = ...) -> None: ...

class Registration(_message.Message):
    __slots__ = ("shard", "node", "pid", "agreement_digest", "endpoint", "order_address", "instance", "epoch", "run", "kept", "registered", "restarts", "last_handle", "last_client", "gone", "refused", "pool_bytes", "active", "order_badge", "proof", "generation", "place")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    AGREEMENT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    ORDER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    LAST_HANDLE_FIELD_NUMBER: _ClassVar[int]
    LAST_CLIENT_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    ORDER_BADGE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    shard: int
    node: int
    pid: int
    agreement_digest: str
    endpoint: Endpoint
    order_address: str
    instance: str
    epoch: int
    run: str
    kept: int
    registered: bool
    restarts: int
    last_handle: int
    last_client: int
    gone: _containers.RepeatedScalarFieldContainer[int]
    refused: Refusals
    pool_bytes: int
    active: _containers.RepeatedScalarFieldContainer[int]
    order_badge: bytes
    proof: bytes
    generation: int
    place: Place
    def __init__(self, shard: _Optional[int] = ..., node: _Optional[int] = ..., pid: _Optional[int] = ..., agreement_digest: _Optional[str] = ..., endpoint: _Optional[_Union[Endpoint, _Mapping]] = ..., order_address: _Optional[str] = ..., instance: _Optional[str] = ..., epoch: _Optional[int] = ..., run: _Optional[str] = ..., kept: _Optional[int] = ..., registered: bool = ..., restarts: _Optional[int] = ..., last_handle: _Optional[int] = ..., last_client: _Optional[int] = ..., gone: _Optional[_Iterable[int]] = ..., refused: _Optional[_Union[Refusals, _Mapping]] = ..., pool_bytes: _Optional[int] = ..., active: _Optional[_Iterable[int]] = ..., order_badge: _Optional[bytes] = ..., proof: _Optional[bytes] = ..., generation: _Optional[int] = ..., place: _Optional[_Union[Place, _Mapping]] = ...) -> None: ...

class Kept(_message.Message):
    __slots__ = ("load", "layers", "loaded", "grant")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    load: Load
    layers: int
    loaded: bool
    grant: Grant
    def __init__(self, load: _Optional[_Union[Load, _Mapping]] = ..., layers: _Optional[int] = ..., loaded: bool = ..., grant: _Optional[_Union[Grant, _Mapping]] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("command", "code", "message")
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    command: int
    code: str
    message: str
    def __init__(self, command: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Residency(_message.Message):
    __slots__ = ("handle", "layers", "host_layers", "bytes", "measured", "remote", "coming", "expected_us", "error_code", "error")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    HOST_LAYERS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    REMOTE_FIELD_NUMBER: _ClassVar[int]
    COMING_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_US_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    handle: int
    layers: int
    host_layers: int
    bytes: int
    measured: bool
    remote: bool
    coming: bool
    expected_us: int
    error_code: str
    error: str
    def __init__(self, handle: _Optional[int] = ..., layers: _Optional[int] = ..., host_layers: _Optional[int] = ..., bytes: _Optional[int] = ..., measured: bool = ..., remote: bool = ..., coming: bool = ..., expected_us: _Optional[int] = ..., error_code: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class Residencies(_message.Message):
    __slots__ = ("moved",)
    MOVED_FIELD_NUMBER: _ClassVar[int]
    moved: _containers.RepeatedCompositeFieldContainer[Residency]
    def __init__(self, moved: _Optional[_Iterable[_Union[Residency, _Mapping]]] = ...) -> None: ...

class ClientGone(_message.Message):
    __slots__ = ("client", "epoch")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    client: int
    epoch: int
    def __init__(self, client: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class ShardReports(_message.Message):
    __slots__ = ("reports",)
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    reports: _containers.RepeatedCompositeFieldContainer[ShardReport]
    def __init__(self, reports: _Optional[_Iterable[_Union[ShardReport, _Mapping]]] = ...) -> None: ...

class ShardReport(_message.Message):
    __slots__ = ("registration", "done", "residencies", "client_gone", "stats", "kept", "leaving", "hello")
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    RESIDENCIES_FIELD_NUMBER: _ClassVar[int]
    CLIENT_GONE_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    registration: Registration
    done: Done
    residencies: Residencies
    client_gone: ClientGone
    stats: ShardStats
    kept: Kept
    leaving: bool
    hello: ShardHello
    def __init__(self, registration: _Optional[_Union[Registration, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., residencies: _Optional[_Union[Residencies, _Mapping]] = ..., client_gone: _Optional[_Union[ClientGone, _Mapping]] = ..., stats: _Optional[_Union[ShardStats, _Mapping]] = ..., kept: _Optional[_Union[Kept, _Mapping]] = ..., leaving: bool = ..., hello: _Optional[_Union[ShardHello, _Mapping]] = ...) -> None: ...

class ShardHello(_message.Message):
    __slots__ = ("shard", "node", "nonce")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    shard: int
    node: int
    nonce: bytes
    def __init__(self, shard: _Optional[int] = ..., node: _Optional[int] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class ControllerChallenge(_message.Message):
    __slots__ = ("nonce", "proof")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    proof: bytes
    def __init__(self, nonce: _Optional[bytes] = ..., proof: _Optional[bytes] = ...) -> None: ...

class NodeReport(_message.Message):
    __slots__ = ("hello", "claim", "failed")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    hello: ShardHello
    claim: RankClaim
    failed: ShardsFailed
    def __init__(self, hello: _Optional[_Union[ShardHello, _Mapping]] = ..., claim: _Optional[_Union[RankClaim, _Mapping]] = ..., failed: _Optional[_Union[ShardsFailed, _Mapping]] = ...) -> None: ...

class NodeCommand(_message.Message):
    __slots__ = ("challenge", "lease", "layouts")
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    LAYOUTS_FIELD_NUMBER: _ClassVar[int]
    challenge: ControllerChallenge
    lease: RankLease
    layouts: NodeLayouts
    def __init__(self, challenge: _Optional[_Union[ControllerChallenge, _Mapping]] = ..., lease: _Optional[_Union[RankLease, _Mapping]] = ..., layouts: _Optional[_Union[NodeLayouts, _Mapping]] = ...) -> None: ...

class NodeLayouts(_message.Message):
    __slots__ = ("layouts",)
    LAYOUTS_FIELD_NUMBER: _ClassVar[int]
    layouts: _containers.RepeatedCompositeFieldContainer[NodeLayout]
    def __init__(self, layouts: _Optional[_Iterable[_Union[NodeLayout, _Mapping]]] = ...) -> None: ...

class NodeLayout(_message.Message):
    __slots__ = ("generation", "layout")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    generation: int
    layout: str
    def __init__(self, generation: _Optional[int] = ..., layout: _Optional[str] = ...) -> None: ...

class ShardsFailed(_message.Message):
    __slots__ = ("generation", "reason")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    generation: int
    reason: str
    def __init__(self, generation: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class RankClaim(_message.Message):
    __slots__ = ("node", "rank", "epoch", "nodes", "leaves", "proof", "agreement_digest")
    NODE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    AGREEMENT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    node: bytes
    rank: int
    epoch: int
    nodes: int
    leaves: bool
    proof: bytes
    agreement_digest: str
    def __init__(self, node: _Optional[bytes] = ..., rank: _Optional[int] = ..., epoch: _Optional[int] = ..., nodes: _Optional[int] = ..., leaves: bool = ..., proof: _Optional[bytes] = ..., agreement_digest: _Optional[str] = ...) -> None: ...

class RankLease(_message.Message):
    __slots__ = ("rank", "epoch")
    RANK_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    rank: int
    epoch: int
    def __init__(self, rank: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("client", "epoch", "key", "instance", "served_names", "tenant", "weight", "token", "pe", "generation", "slo_class", "step_us", "merged")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    SERVED_NAMES_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SLO_CLASS_FIELD_NUMBER: _ClassVar[int]
    STEP_US_FIELD_NUMBER: _ClassVar[int]
    MERGED_FIELD_NUMBER: _ClassVar[int]
    client: int
    epoch: int
    key: bytes
    instance: str
    served_names: _containers.RepeatedScalarFieldContainer[str]
    tenant: str
    weight: float
    token: str
    pe: int
    generation: int
    slo_class: str
    step_us: int
    merged: str
    def __init__(self, client: _Optional[int] = ..., epoch: _Optional[int] = ..., key: _Optional[bytes] = ..., instance: _Optional[str] = ..., served_names: _Optional[_Iterable[str]] = ..., tenant: _Optional[str] = ..., weight: _Optional[float] = ..., token: _Optional[str] = ..., pe: _Optional[int] = ..., generation: _Optional[int] = ..., slo_class: _Optional[str] = ..., step_us: _Optional[int] = ..., merged: _Optional[str] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("handle", "path", "version", "stamp", "record", "listed", "eager", "pinned", "size", "sent", "asked")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STAMP_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    LISTED_FIELD_NUMBER: _ClassVar[int]
    EAGER_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    handle: int
    path: str
    version: str
    stamp: str
    record: bytes
    listed: bool
    eager: bool
    pinned: bool
    size: int
    sent: bool
    asked: bool
    def __init__(self, handle: _Optional[int] = ..., path: _Optional[str] = ..., version: _Optional[str] = ..., stamp: _Optional[str] = ..., record: _Optional[bytes] = ..., listed: bool = ..., eager: bool = ..., pinned: bool = ..., size: _Optional[int] = ..., sent: bool = ..., asked: bool = ...) -> None: ...

class ShardProof(_message.Message):
    __slots__ = ("shard", "count", "mac")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    shard: int
    count: int
    mac: bytes
    def __init__(self, shard: _Optional[int] = ..., count: _Optional[int] = ..., mac: _Optional[bytes] = ...) -> None: ...

class FilesRequest(_message.Message):
    __slots__ = ("proof", "version")
    PROOF_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    proof: ShardProof
    version: str
    def __init__(self, proof: _Optional[_Union[ShardProof, _Mapping]] = ..., version: _Optional[str] = ...) -> None: ...

class File(_message.Message):
    __slots__ = ("name", "bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    bytes: int
    def __init__(self, name: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class FilesReply(_message.Message):
    __slots__ = ("files",)
    FILES_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[File]
    def __init__(self, files: _Optional[_Iterable[_Union[File, _Mapping]]] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("proof", "version", "name", "begin")
    PROOF_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    proof: ShardProof
    version: str
    name: str
    begin: int
    def __init__(self, proof: _Optional[_Union[ShardProof, _Mapping]] = ..., version: _Optional[str] = ..., name: _Optional[str] = ..., begin: _Optional[int] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class Prefetch(_message.Message):
    __slots__ = ("client", "needs")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    NEEDS_FIELD_NUMBER: _ClassVar[int]
    client: int
    needs: _containers.RepeatedCompositeFieldContainer[Need]
    def __init__(self, client: _Optional[int] = ..., needs: _Optional[_Iterable[_Union[Need, _Mapping]]] = ...) -> None: ...

class Need(_message.Message):
    __slots__ = ("handle", "in_us")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    IN_US_FIELD_NUMBER: _ClassVar[int]
    handle: int
    in_us: int
    def __init__(self, handle: _Optional[int] = ..., in_us: _Optional[int] = ...) -> None: ...

class Active(_message.Message):
    __slots__ = ("more", "fewer", "anew", "trace")
    class TraceEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MORE_FIELD_NUMBER: _ClassVar[int]
    FEWER_FIELD_NUMBER: _ClassVar[int]
    ANEW_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    more: _containers.RepeatedScalarFieldContainer[int]
    fewer: _containers.RepeatedScalarFieldContainer[int]
    anew: bool
    trace: _containers.ScalarMap[str, str]
    def __init__(self, more: _Optional[_Iterable[int]] = ..., fewer: _Optional[_Iterable[int]] = ..., anew: bool = ..., trace: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Holds(_message.Message):
    __slots__ = ("client", "more", "fewer", "anew")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    FEWER_FIELD_NUMBER: _ClassVar[int]
    ANEW_FIELD_NUMBER: _ClassVar[int]
    client: int
    more: _containers.RepeatedScalarFieldContainer[int]
    fewer: _containers.RepeatedScalarFieldContainer[int]
    anew: bool
    def __init__(self, client: _Optional[int] = ..., more: _Optional[_Iterable[int]] = ..., fewer: _Optional[_Iterable[int]] = ..., anew: bool = ...) -> None: ...

class Uses(_message.Message):
    __slots__ = ("active", "holds")
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    active: Active
    holds: _containers.RepeatedCompositeFieldContainer[Holds]
    def __init__(self, active: _Optional[_Union[Active, _Mapping]] = ..., holds: _Optional[_Iterable[_Union[Holds, _Mapping]]] = ...) -> None: ...

class Borrow(_message.Message):
    __slots__ = ("client", "holder")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    client: int
    holder: int
    def __init__(self, client: _Optional[int] = ..., holder: _Optional[int] = ...) -> None: ...

class Follow(_message.Message):
    __slots__ = ("address", "badge", "certificate")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BADGE_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    address: str
    badge: bytes
    certificate: bytes
    def __init__(self, address: _Optional[str] = ..., badge: _Optional[bytes] = ..., certificate: _Optional[bytes] = ...) -> None: ...

class Claim(_message.Message):
    __slots__ = ("epoch", "run", "restarts", "registered", "generation")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    run: str
    restarts: int
    registered: bool
    generation: int
    def __init__(self, epoch: _Optional[int] = ..., run: _Optional[str] = ..., restarts: _Optional[int] = ..., registered: bool = ..., generation: _Optional[int] = ...) -> None: ...

class ShardCommands(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[ShardCommand]
    def __init__(self, commands: _Optional[_Iterable[_Union[ShardCommand, _Mapping]]] = ...) -> None: ...

class ShardCommand(_message.Message):
    __slots__ = ("id", "grant", "revoke", "load", "drop", "follow", "claim", "note", "refused", "prefetch", "pin", "borrow", "place", "bring", "stop", "challenge", "uses")
    ID_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    REVOKE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    BORROW_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    BRING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    id: int
    grant: Grant
    revoke: int
    load: Load
    drop: int
    follow: Follow
    claim: Claim
    note: Load
    refused: Refusals
    prefetch: Prefetch
    pin: int
    borrow: Borrow
    place: Place
    bring: int
    stop: bool
    challenge: ControllerChallenge
    uses: Uses
    def __init__(self, id: _Optional[int] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., revoke: _Optional[int] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., drop: _Optional[int] = ..., follow: _Optional[_Union[Follow, _Mapping]] = ..., claim: _Optional[_Union[Claim, _Mapping]] = ..., note: _Optional[_Union[Load, _Mapping]] = ..., refused: _Optional[_Union[Refusals, _Mapping]] = ..., prefetch: _Optional[_Union[Prefetch, _Mapping]] = ..., pin: _Optional[int] = ..., borrow: _Optional[_Union[Borrow, _Mapping]] = ..., place: _Optional[_Union[Place, _Mapping]] = ..., bring: _Optional[int] = ..., stop: bool = ..., challenge: _Optional[_Union[ControllerChallenge, _Mapping]] = ..., uses: _Optional[_Union[Uses, _Mapping]] = ...) -> None: ...

class OpenEventsRequest(_message.Message):
    __slots__ = ("reader_key",)
    READER_KEY_FIELD_NUMBER: _ClassVar[int]
    reader_key: bytes
    def __init__(self, reader_key: _Optional[bytes] = ...) -> None: ...

class OpenEventsReply(_message.Message):
    __slots__ = ("endpoint", "epoch", "topics", "server_key")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    SERVER_KEY_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    epoch: int
    topics: _containers.RepeatedCompositeFieldContainer[TopicSequence]
    server_key: bytes
    def __init__(self, endpoint: _Optional[str] = ..., epoch: _Optional[int] = ..., topics: _Optional[_Iterable[_Union[TopicSequence, _Mapping]]] = ..., server_key: _Optional[bytes] = ...) -> None: ...

class TopicSequence(_message.Message):
    __slots__ = ("topic", "sequence")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    topic: str
    sequence: int
    def __init__(self, topic: _Optional[str] = ..., sequence: _Optional[int] = ...) -> None: ...

class ReplayEventsRequest(_message.Message):
    __slots__ = ("topic", "since")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    topic: str
    since: int
    def __init__(self, topic: _Optional[str] = ..., since: _Optional[int] = ...) -> None: ...

class ReplayEventsReply(_message.Message):
    __slots__ = ("batches", "lost")
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    batches: _containers.RepeatedCompositeFieldContainer[ReplayedBatch]
    lost: bool
    def __init__(self, batches: _Optional[_Iterable[_Union[ReplayedBatch, _Mapping]]] = ..., lost: bool = ...) -> None: ...

class ReplayedBatch(_message.Message):
    __slots__ = ("sequence", "payload")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    payload: bytes
    def __init__(self, sequence: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class WhoIsRequest(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: str
    def __init__(self, token: _Optional[str] = ...) -> None: ...

class Caller(_message.Message):
    __slots__ = ("tenant", "role", "token")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    role: str
    token: str
    def __init__(self, tenant: _Optional[str] = ..., role: _Optional[str] = ..., token: _Optional[str] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("id", "tenant", "role", "note", "text", "created", "revoked", "overlap_until")
    ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_UNTIL_FIELD_NUMBER: _ClassVar[int]
    id: str
    tenant: str
    role: str
    note: str
    text: str
    created: float
    revoked: float
    overlap_until: float
    def __init__(self, id: _Optional[str] = ..., tenant: _Optional[str] = ..., role: _Optional[str] = ..., note: _Optional[str] = ..., text: _Optional[str] = ..., created: _Optional[float] = ..., revoked: _Optional[float] = ..., overlap_until: _Optional[float] = ...) -> None: ...

class CreateTokenRequest(_message.Message):
    __slots__ = ("tenant", "role", "note")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    role: str
    note: str
    def __init__(self, tenant: _Optional[str] = ..., role: _Optional[str] = ..., note: _Optional[str] = ...) -> None: ...

class RotateTokenRequest(_message.Message):
    __slots__ = ("id", "overlap_seconds")
    ID_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    id: str
    overlap_seconds: float
    def __init__(self, id: _Optional[str] = ..., overlap_seconds: _Optional[float] = ...) -> None: ...

class RevokeTokenRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class ListTokensRequest(_message.Message):
    __slots__ = ("page_token",)
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_token: str
    def __init__(self, page_token: _Optional[str] = ...) -> None: ...

class ListTokensReply(_message.Message):
    __slots__ = ("tokens", "next_page_token")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    next_page_token: str
    def __init__(self, tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class Tenant(_message.Message):
    __slots__ = ("name", "weight", "max_adapters", "max_bytes", "max_active", "max_rate", "slo_class", "removed")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    MAX_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    MAX_RATE_FIELD_NUMBER: _ClassVar[int]
    SLO_CLASS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    name: str
    weight: float
    max_adapters: int
    max_bytes: int
    max_active: int
    max_rate: float
    slo_class: str
    removed: float
    def __init__(self, name: _Optional[str] = ..., weight: _Optional[float] = ..., max_adapters: _Optional[int] = ..., max_bytes: _Optional[int] = ..., max_active: _Optional[int] = ..., max_rate: _Optional[float] = ..., slo_class: _Optional[str] = ..., removed: _Optional[float] = ...) -> None: ...

class RemoveTenantRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ListTenantsRequest(_message.Message):
    __slots__ = ("page_token",)
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_token: str
    def __init__(self, page_token: _Optional[str] = ...) -> None: ...

class ListTenantsReply(_message.Message):
    __slots__ = ("tenants", "next_page_token")
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[Tenant]
    next_page_token: str
    def __init__(self, tenants: _Optional[_Iterable[_Union[Tenant, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ShareRequest(_message.Message):
    __slots__ = ("name", "tenant", "stop")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    name: str
    tenant: str
    stop: bool
    def __init__(self, name: _Optional[str] = ..., tenant: _Optional[str] = ..., stop: bool = ...) -> None: ...

class ShareReply(_message.Message):
    __slots__ = ("name", "tenants", "all")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    name: str
    tenants: _containers.RepeatedScalarFieldContainer[str]
    all: bool
    def __init__(self, name: _Optional[str] = ..., tenants: _Optional[_Iterable[str]] = ..., all: bool = ...) -> None: ...

class AuditRequest(_message.Message):
    __slots__ = ("after", "most")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    after: int
    most: int
    def __init__(self, after: _Optional[int] = ..., most: _Optional[int] = ...) -> None: ...

class AuditReply(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[AuditEntry]
    def __init__(self, entries: _Optional[_Iterable[_Union[AuditEntry, _Mapping]]] = ...) -> None: ...

class AuditEntry(_message.Message):
    __slots__ = ("serial", "at", "tenant", "role", "token", "call", "subject", "outcome", "reason")
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    serial: int
    at: float
    tenant: str
    role: str
    token: str
    call: str
    subject: str
    outcome: str
    reason: str
    def __init__(self, serial: _Optional[int] = ..., at: _Optional[float] = ..., tenant: _Optional[str] = ..., role: _Optional[str] = ..., token: _Optional[str] = ..., call: _Optional[str] = ..., subject: _Optional[str] = ..., outcome: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...
