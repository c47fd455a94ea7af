from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PlacementPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLACEMENT_POLICY_UNSPECIFIED: _ClassVar[PlacementPolicy]
    PLACEMENT_POLICY_LOCAL_FIRST: _ClassVar[PlacementPolicy]
    PLACEMENT_POLICY_RANDOM: _ClassVar[PlacementPolicy]

class StoreState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STORE_STATE_UNSPECIFIED: _ClassVar[StoreState]
    STORE_STATE_ANNOUNCING: _ClassVar[StoreState]
    STORE_STATE_READY: _ClassVar[StoreState]
    STORE_STATE_SUSPECTED: _ClassVar[StoreState]
    STORE_STATE_DRAINING: _ClassVar[StoreState]
    STORE_STATE_GONE: _ClassVar[StoreState]

class HoldKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HOLD_KIND_UNSPECIFIED: _ClassVar[HoldKind]
    HOLD_KIND_CORDON: _ClassVar[HoldKind]
    HOLD_KIND_DRAIN: _ClassVar[HoldKind]

class HoldState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HOLD_STATE_UNSPECIFIED: _ClassVar[HoldState]
    HOLD_STATE_CORDONED: _ClassVar[HoldState]
    HOLD_STATE_MIGRATING: _ClassVar[HoldState]
    HOLD_STATE_DRAINING: _ClassVar[HoldState]
    HOLD_STATE_DRAINED: _ClassVar[HoldState]
    HOLD_STATE_LOST: _ClassVar[HoldState]
    HOLD_STATE_LIFTED: _ClassVar[HoldState]
PLACEMENT_POLICY_UNSPECIFIED: PlacementPolicy
PLACEMENT_POLICY_LOCAL_FIRST: PlacementPolicy
PLACEMENT_POLICY_RANDOM: PlacementPolicy
STORE_STATE_UNSPECIFIED: StoreState
STORE_STATE_ANNOUNCING: StoreState
STORE_STATE_READY: StoreState
STORE_STATE_SUSPECTED: StoreState
STORE_STATE_DRAINING: StoreState
STORE_STATE_GONE: StoreState
HOLD_KIND_UNSPECIFIED: HoldKind
HOLD_KIND_CORDON: HoldKind
HOLD_KIND_DRAIN: HoldKind
HOLD_STATE_UNSPECIFIED: HoldState
HOLD_STATE_CORDONED: HoldState
HOLD_STATE_MIGRATING: HoldState
HOLD_STATE_DRAINING: HoldState
HOLD_STATE_DRAINED: HoldState
HOLD_STATE_LOST: HoldState
HOLD_STATE_LIFTED: HoldState

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StepDownRequest(_message.Message):
    __slots__ = ("owner", "force")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    owner: str
    force: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, owner: _Optional[str] = ..., force: _Optional[_Iterable[str]] = ...) -> None: ...

class StepDownReply(_message.Message):
    __slots__ = ("term",)
    TERM_FIELD_NUMBER: _ClassVar[int]
    term: int
    def __init__(self, term: _Optional[int] = ...) -> None: ...

class PromoteRequest(_message.Message):
    __slots__ = ("owner", "force", "dry_run")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    owner: str
    force: _containers.RepeatedScalarFieldContainer[str]
    dry_run: bool
    def __init__(self, owner: _Optional[str] = ..., force: _Optional[_Iterable[str]] = ..., dry_run: bool = ...) -> None: ...

class PromoteReply(_message.Message):
    __slots__ = ("term", "members", "objects", "holds")
    TERM_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    term: int
    members: _containers.RepeatedScalarFieldContainer[str]
    objects: int
    holds: int
    def __init__(self, term: _Optional[int] = ..., members: _Optional[_Iterable[str]] = ..., objects: _Optional[int] = ..., holds: _Optional[int] = ...) -> None: ...

class Trouble(_message.Message):
    __slots__ = ("code", "text", "fix")
    CODE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FIX_FIELD_NUMBER: _ClassVar[int]
    code: str
    text: str
    fix: str
    def __init__(self, code: _Optional[str] = ..., text: _Optional[str] = ..., fix: _Optional[str] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("group", "name", "host", "pid", "address", "role", "term", "uptime_s", "placement", "objects", "processing", "capacity_bytes", "used_bytes", "evicted_total", "lookups_total", "hits_total", "breaker_open", "stores", "clients", "holds", "sequence", "members", "promotable", "etcd_silent_ms", "troubles")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    PROCESSING_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVICTED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    HITS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BREAKER_OPEN_FIELD_NUMBER: _ClassVar[int]
    STORES_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    PROMOTABLE_FIELD_NUMBER: _ClassVar[int]
    ETCD_SILENT_MS_FIELD_NUMBER: _ClassVar[int]
    TROUBLES_FIELD_NUMBER: _ClassVar[int]
    group: str
    name: str
    host: str
    pid: int
    address: str
    role: str
    term: int
    uptime_s: float
    placement: PlacementPolicy
    objects: int
    processing: int
    capacity_bytes: int
    used_bytes: int
    evicted_total: int
    lookups_total: int
    hits_total: int
    breaker_open: bool
    stores: _containers.RepeatedCompositeFieldContainer[StoreInfo]
    clients: _containers.RepeatedCompositeFieldContainer[ClientInfo]
    holds: _containers.RepeatedCompositeFieldContainer[Hold]
    sequence: int
    members: _containers.RepeatedScalarFieldContainer[str]
    promotable: bool
    etcd_silent_ms: int
    troubles: _containers.RepeatedCompositeFieldContainer[Trouble]
    def __init__(self, group: _Optional[str] = ..., name: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., address: _Optional[str] = ..., role: _Optional[str] = ..., term: _Optional[int] = ..., uptime_s: _Optional[float] = ..., placement: _Optional[_Union[PlacementPolicy, str]] = ..., objects: _Optional[int] = ..., processing: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., evicted_total: _Optional[int] = ..., lookups_total: _Optional[int] = ..., hits_total: _Optional[int] = ..., breaker_open: bool = ..., stores: _Optional[_Iterable[_Union[StoreInfo, _Mapping]]] = ..., clients: _Optional[_Iterable[_Union[ClientInfo, _Mapping]]] = ..., holds: _Optional[_Iterable[_Union[Hold, _Mapping]]] = ..., sequence: _Optional[int] = ..., members: _Optional[_Iterable[str]] = ..., promotable: bool = ..., etcd_silent_ms: _Optional[int] = ..., troubles: _Optional[_Iterable[_Union[Trouble, _Mapping]]] = ...) -> None: ...

class Hold(_message.Message):
    __slots__ = ("number", "target", "host", "kind", "state", "reason", "owner", "since", "migrate", "bandwidth_bps", "stores", "objects_at_call", "bytes_at_call", "leases_left_ms", "swept", "left", "objects", "migrated", "migrated_bytes", "unmoved")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    MIGRATE_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTH_BPS_FIELD_NUMBER: _ClassVar[int]
    STORES_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_AT_CALL_FIELD_NUMBER: _ClassVar[int]
    BYTES_AT_CALL_FIELD_NUMBER: _ClassVar[int]
    LEASES_LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    SWEPT_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    MIGRATED_FIELD_NUMBER: _ClassVar[int]
    MIGRATED_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNMOVED_FIELD_NUMBER: _ClassVar[int]
    number: int
    target: str
    host: bool
    kind: HoldKind
    state: HoldState
    reason: str
    owner: str
    since: str
    migrate: bool
    bandwidth_bps: int
    stores: _containers.RepeatedScalarFieldContainer[str]
    objects_at_call: int
    bytes_at_call: int
    leases_left_ms: int
    swept: int
    left: int
    objects: int
    migrated: int
    migrated_bytes: int
    unmoved: int
    def __init__(self, number: _Optional[int] = ..., target: _Optional[str] = ..., host: bool = ..., kind: _Optional[_Union[HoldKind, str]] = ..., state: _Optional[_Union[HoldState, str]] = ..., reason: _Optional[str] = ..., owner: _Optional[str] = ..., since: _Optional[str] = ..., migrate: bool = ..., bandwidth_bps: _Optional[int] = ..., stores: _Optional[_Iterable[str]] = ..., objects_at_call: _Optional[int] = ..., bytes_at_call: _Optional[int] = ..., leases_left_ms: _Optional[int] = ..., swept: _Optional[int] = ..., left: _Optional[int] = ..., objects: _Optional[int] = ..., migrated: _Optional[int] = ..., migrated_bytes: _Optional[int] = ..., unmoved: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("targets", "reason", "owner", "migrate", "bandwidth_bps", "force", "dry_run")
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    MIGRATE_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTH_BPS_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    targets: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    owner: str
    migrate: bool
    bandwidth_bps: int
    force: _containers.RepeatedScalarFieldContainer[str]
    dry_run: bool
    def __init__(self, targets: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ..., owner: _Optional[str] = ..., migrate: bool = ..., bandwidth_bps: _Optional[int] = ..., force: _Optional[_Iterable[str]] = ..., dry_run: bool = ...) -> None: ...

class UndrainRequest(_message.Message):
    __slots__ = ("targets", "owner", "dry_run")
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    targets: _containers.RepeatedScalarFieldContainer[str]
    owner: str
    dry_run: bool
    def __init__(self, targets: _Optional[_Iterable[str]] = ..., owner: _Optional[str] = ..., dry_run: bool = ...) -> None: ...

class OkToStopRequest(_message.Message):
    __slots__ = ("targets",)
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    targets: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, targets: _Optional[_Iterable[str]] = ...) -> None: ...

class HoldsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HoldReply(_message.Message):
    __slots__ = ("holds", "checks", "unchanged", "capacity_bytes", "pool_bytes", "pool_used_bytes")
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    CHECKS_FIELD_NUMBER: _ClassVar[int]
    UNCHANGED_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    POOL_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    holds: _containers.RepeatedCompositeFieldContainer[Hold]
    checks: _containers.RepeatedCompositeFieldContainer[StopCheck]
    unchanged: _containers.RepeatedScalarFieldContainer[str]
    capacity_bytes: int
    pool_bytes: int
    pool_used_bytes: int
    def __init__(self, holds: _Optional[_Iterable[_Union[Hold, _Mapping]]] = ..., checks: _Optional[_Iterable[_Union[StopCheck, _Mapping]]] = ..., unchanged: _Optional[_Iterable[str]] = ..., capacity_bytes: _Optional[int] = ..., pool_bytes: _Optional[int] = ..., pool_used_bytes: _Optional[int] = ...) -> None: ...

class StopCheck(_message.Message):
    __slots__ = ("name", "ok", "text", "fix")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FIX_FIELD_NUMBER: _ClassVar[int]
    name: str
    ok: bool
    text: str
    fix: str
    def __init__(self, name: _Optional[str] = ..., ok: bool = ..., text: _Optional[str] = ..., fix: _Optional[str] = ...) -> None: ...

class StoreInfo(_message.Message):
    __slots__ = ("id", "name", "host", "numa_node", "incarnation", "boot_id", "pid", "address", "unix_path", "http_address", "state", "capacity_bytes", "populated_bytes", "used_bytes", "objects", "transports", "misplaced_bytes")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    NUMA_NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    UNIX_PATH_FIELD_NUMBER: _ClassVar[int]
    HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    POPULATED_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    MISPLACED_BYTES_FIELD_NUMBER: _ClassVar[int]
    id: int
    name: str
    host: str
    numa_node: int
    incarnation: int
    boot_id: str
    pid: int
    address: str
    unix_path: str
    http_address: str
    state: StoreState
    capacity_bytes: int
    populated_bytes: int
    used_bytes: int
    objects: int
    transports: _containers.RepeatedScalarFieldContainer[str]
    misplaced_bytes: int
    def __init__(self, id: _Optional[int] = ..., name: _Optional[str] = ..., host: _Optional[str] = ..., numa_node: _Optional[int] = ..., incarnation: _Optional[int] = ..., boot_id: _Optional[str] = ..., pid: _Optional[int] = ..., address: _Optional[str] = ..., unix_path: _Optional[str] = ..., http_address: _Optional[str] = ..., state: _Optional[_Union[StoreState, str]] = ..., capacity_bytes: _Optional[int] = ..., populated_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., objects: _Optional[int] = ..., transports: _Optional[_Iterable[str]] = ..., misplaced_bytes: _Optional[int] = ...) -> None: ...

class ClientInfo(_message.Message):
    __slots__ = ("name", "host", "pid", "connections")
    NAME_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    host: str
    pid: int
    connections: int
    def __init__(self, name: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., connections: _Optional[int] = ...) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ("since", "follow")
    SINCE_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    since: str
    follow: bool
    def __init__(self, since: _Optional[str] = ..., follow: bool = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("time", "event", "subject", "actor", "detail")
    TIME_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    time: str
    event: str
    subject: str
    actor: str
    detail: _containers.RepeatedCompositeFieldContainer[EventDetail]
    def __init__(self, time: _Optional[str] = ..., event: _Optional[str] = ..., subject: _Optional[str] = ..., actor: _Optional[str] = ..., detail: _Optional[_Iterable[_Union[EventDetail, _Mapping]]] = ...) -> None: ...

class EventDetail(_message.Message):
    __slots__ = ("key", "text", "number", "real", "flag")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REAL_FIELD_NUMBER: _ClassVar[int]
    FLAG_FIELD_NUMBER: _ClassVar[int]
    key: str
    text: str
    number: int
    real: float
    flag: bool
    def __init__(self, key: _Optional[str] = ..., text: _Optional[str] = ..., number: _Optional[int] = ..., real: _Optional[float] = ..., flag: bool = ...) -> None: ...
