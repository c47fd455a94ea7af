"""
An experiment as a file says it: the Chaos Toolkit's YAML with our part under ``kvops:``.

``title``, ``description``, ``tags``, ``configuration``, ``steady-state-hypothesis``, ``method``, ``rollbacks`` and
``controls`` mean what they mean there. A file without ``kvops:`` is *foreign*: it can be read and checked, and
``differences`` says what we would do otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, inspect

from kvops.chaos.history import Arm
from kvops.errors import ConfigError
from kvops.files import read_small, yaml_data
from kvops.limits import GIB, KIB, MIB

SCHEMA: Final = 1
SCHEMA_ID: Final = "https://json-schema.org/draft/2020-12/schema"
FAULT_MODULE: Final = "kvops.chaos.faults"  # an action that calls into it is a fault of ours
PROBE_MODULE: Final = "kvops.chaos.probes"  # … and a probe that does is asked
VARIABLE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_SIZES: Final = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}

Duration = (
    Annotated[float, Meta(ge=0, description="seconds")]
    | Annotated[str, Meta(pattern=r"^[0-9]+(\.[0-9]+)?(ms|s|m|h)$", description="such as 500ms, 10s, 2m")]
)
Size = Annotated[str, Meta(pattern=r"^[0-9]+(B|KiB|MiB|GiB)$", description="such as 64MiB")]
Share = Annotated[float, Meta(ge=0, le=1)]


def seconds(value: float | str) -> float:
    """A duration in seconds; ``value`` fits ``Duration``."""
    if not isinstance(value, str):
        return float(value)
    number = value.rstrip("mhs")
    return float(number) * _SECONDS[value[len(number) :]]


def size_bytes(value: str) -> int:
    """A size in bytes; ``value`` fits ``Size``."""
    number = value.rstrip("BKMGi")
    return int(number) * _SIZES[value[len(number) :]]


class _Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Refuses keys it does not know: a misspelt setting cannot be ignored in silence."""


class Provider(_Struct, frozen=True, kw_only=True):
    """What an activity calls, as the Chaos Toolkit has it."""

    type: Literal["python", "process", "http"]
    module: str = ""
    func: str = ""
    arguments: dict[str, Any] | list[Any] | str = {}
    secrets: list[str] = []
    path: str = ""
    url: str = ""
    method: str = ""
    headers: dict[str, Any] = {}
    timeout: Any = None
    verify_tls: bool = True
    max_retries: int = 0


class Pauses(_Struct, frozen=True, kw_only=True):
    """Waits around an activity."""

    before: Duration = 0.0
    after: Duration = 0.0


class Activity(_Struct, frozen=True, kw_only=True):
    """An action or a probe."""

    type: Literal["action", "probe"] = "action"
    name: str = ""
    ref: str = ""
    provider: Provider | None = None
    tolerance: Any = None
    background: bool = False
    pauses: Pauses = Pauses()
    controls: list[dict[str, Any]] = []
    timeout: float | None = None


class Hypothesis(_Struct, frozen=True, kw_only=True):
    """What is true while all is well: every probe is asked, before, during and after."""

    title: str
    probes: list[Activity] = []


class Environment(_Struct, frozen=True, kw_only=True):
    """Where the experiment may run at all."""

    must_match: str = "local"  # the group's environment
    forbid_labels: list[str] = msgspec.field(default_factory=lambda: ["prod", "production"])


class PoolSpec(_Struct, frozen=True, kw_only=True):
    """The pool that the experiment starts for itself, on this machine; or one that runs in a lab."""

    stores: Annotated[int, Meta(ge=1, le=16)] = 3
    masters: Annotated[int, Meta(ge=1, le=3)] = 1
    etcd: Annotated[int, Meta(ge=0, le=5)] = 0  # members
    groups: Annotated[int, Meta(ge=1, le=4)] = 1  # each with its own masters, stores and engines
    engines: Annotated[int, Meta(ge=1, le=16)] = 3  # of each group, each its own logical host
    segment_size: Size = "64MiB"
    placement: Literal["local-first", "random"] = "local-first"
    transports: list[Literal["shm", "tcp", "verbs"]] = msgspec.field(default_factory=lambda: ["shm", "tcp"])
    network: Literal["host", "lab"] = "host"  # lab: a network namespace for each member
    own_disk: Size = "0B"  # of a file system in memory for all files of the pool; 0B: where others are
    # Of a group that is up, in a lab or on hosts: nothing is started, stores and masters are as they are there.
    running: str = ""
    hosts: list[str] = []  # logical hosts of the stores of a group on hosts; none: host-0, host-1, …
    roles_needed: list[str] = []  # roles beyond these that must be there, such as router


class Select(_Struct, frozen=True, kw_only=True):
    """Which members a fault may hit; what is not said matches all."""

    role: str = "store"
    group: str = ""
    name: str = ""
    host: str = ""
    leads: bool | None = None  # of masters: the leader, or those that do not lead


class Scope(_Struct, frozen=True, kw_only=True):
    """The declared blast radius: everything degraded outside it is a failure."""

    domain: str = "store"  # what one target is: store, host, group, master, etcd, link, engine
    select: Select = Select()
    mode: Literal["one", "all", "count", "percent"] = "one"
    value: Annotated[float, Meta(ge=0)] = 1
    max_capacity_fraction: Share = 0.34
    protect: list[str] = []  # roles or names that must not be hit


class Workload(_Struct, frozen=True, kw_only=True):
    """What real clients do meanwhile."""

    profile: Literal["agentic-prefix", "chat-prefix"] = "agentic-prefix"
    mode: Literal["open-loop"] = "open-loop"
    rps: Annotated[float, Meta(gt=0, le=10_000)] = 24
    arms: list[Arm] = msgspec.field(
        default_factory=lambda: [Arm.CACHE_OFF, Arm.BASELINE, Arm.CONTROL, Arm.FAULT]
    )
    windows: Annotated[str, Meta(pattern=r"^[1-9][0-9]{0,3}x[0-9]+(\.[0-9]+)?(ms|s|m)$")] = "5x12s"
    warmup: Duration = "4s"  # before each window, and not judged
    seed: int = 7
    page_size: Size = "32KiB"
    l2_size: Size = "0B"  # of each engine: without one, every hit is the pool's
    deadline: Duration = "200ms"  # of one call to the pool
    budget: Duration = "400ms"  # of a request's pool time: beyond it the request was later than declared
    register_rps: Annotated[float, Meta(ge=0, le=1000)] = (
        6  # puts, gets and removes of a few keys of each client
    )

    @property
    def blocks(self) -> int:
        """How many times each arm runs, interleaved."""
        return int(self.windows.partition("x")[0])

    @property
    def window_s(self) -> float:
        """How long each run is judged, in seconds."""
        return seconds(self.windows.partition("x")[2])


class Verify(_Struct, frozen=True, kw_only=True):
    """The proof that the fault is there."""

    active: Literal["default"] = "default"
    timeout: Duration = "5s"
    recheck: Duration = "2s"


class Guard(_Struct, frozen=True, kw_only=True):
    """A limit on harm: past it, or without telemetry, the experiment is aborted and undone."""

    probe: Literal["success_rate", "telemetry_age"]
    below: float | None = None
    above: Duration | None = None
    times: Annotated[int, Meta(ge=1, le=100)] = 3  # in a row
    every: Duration = "500ms"


class Deadlines(_Struct, frozen=True, kw_only=True):
    """How long each step may take; everything ends."""

    fault: Duration = "8s"
    undo: Duration = "5s"
    recover: Duration = "30s"
    total: Duration = "10m"
    lease: Duration = "3s"


class BreakerExpectation(_Struct, frozen=True, kw_only=True):
    """How breakers should react."""

    scope: Literal["node", "group", "none"] = "node"
    opens_within: Duration = "2s"


class Expect(_Struct, frozen=True, kw_only=True):
    """The bounds of PASS."""

    spread: Annotated[int, Meta(ge=0)] = 0
    containment_ratio: Annotated[float, Meta(gt=0)] = 1.2
    amplification: Annotated[float, Meta(ge=1)] = 1.1
    t_contain: Duration = "4s"
    t_recover: Duration = "15s"
    breaker: BreakerExpectation | None = None
    quorum_lost: bool = False  # the experiment means to lose it


class Kvops(_Struct, frozen=True, kw_only=True):
    """Our part of an experiment."""

    schema: Literal[1] = 1
    owner: str = ""
    environment: Environment = Environment()
    pool: PoolSpec = PoolSpec()
    scope: Scope = Scope()
    workload: Workload = Workload()
    verify: Verify = Verify()
    guards: list[Guard] = msgspec.field(
        default_factory=lambda: [
            Guard(probe="success_rate", below=0.5),
            Guard(probe="telemetry_age", above="5s"),
        ]
    )
    deadlines: Deadlines = Deadlines()
    checkers: list[str] = []  # none named: all that apply
    expect: Expect = Expect()
    compose: bool = False  # several faults on one target are meant, in the order of the method


class Experiment(_Struct, frozen=True, kw_only=True):
    """One file."""

    title: str
    description: str
    version: str = ""
    tags: list[str] = []
    contributions: dict[str, Any] = {}
    configuration: dict[str, Any] = {}
    secrets: dict[str, Any] = {}
    steady_state_hypothesis: Hypothesis | None = msgspec.field(default=None, name="steady-state-hypothesis")
    method: list[Activity] = []
    rollbacks: list[Activity] = []
    controls: list[dict[str, Any]] = []
    extensions: list[dict[str, Any]] = []
    runtime: dict[str, Any] = {}
    kvops: Kvops | None = None

    @property
    def foreign(self) -> bool:
        """Whether it was written for the Chaos Toolkit alone."""
        return self.kvops is None

    @property
    def ours(self) -> Kvops:
        """Our part; the defaults for a foreign file."""
        return self.kvops if self.kvops is not None else Kvops()

    @property
    def faults(self) -> list[FaultCall]:
        """The faults of the method, in order."""
        return [
            FaultCall.of(activity, index) for index, activity in enumerate(self.method) if is_fault(activity)
        ]


class FaultCall(msgspec.Struct, frozen=True, kw_only=True):
    """One fault of a method: which, on what, with which arguments."""

    index: int  # in the method
    name: str  # such as process.pause
    target: str = ""  # a member's name; "": the scope decides
    arguments: dict[str, Any] = {}
    delay_s: float = 0.0  # after the fault before it

    @classmethod
    def of(cls, activity: Activity, index: int) -> FaultCall:
        """Read it from an action that ``is_fault`` accepts."""
        assert activity.provider is not None
        given = activity.provider.arguments
        arguments = dict(given) if isinstance(given, dict) else {}
        target = str(arguments.pop("target", ""))
        return cls(
            index=index,
            name=activity.provider.func.replace("_", ".", 1),
            target=target,
            arguments=arguments,
            delay_s=seconds(activity.pauses.before),
        )


def is_fault(activity: Activity) -> bool:
    """Whether an activity is a fault of ours."""
    provider = activity.provider
    return activity.type == "action" and provider is not None and provider.module == FAULT_MODULE


def is_probe(activity: Activity) -> bool:
    """Whether an activity is a probe that we ask."""
    provider = activity.provider
    return provider is not None and provider.module == PROBE_MODULE


def load(path: Path) -> Experiment:
    """
    Read an experiment file.

    Raises:
        ConfigError: It cannot be read, is not YAML, or does not fit; every misspelt key is named, with the nearest
            that exists.
    """
    return parse(read_small(path, too_large="name an experiment file"), source=str(path))


def parse(raw: bytes | str, *, source: str) -> Experiment:
    """
    Decode an experiment; ``source`` names it in errors.

    Raises:
        ConfigError: As for ``load``.
    """
    data = yaml_data(raw, source=source)
    if not isinstance(data, dict):
        raise ConfigError(f"{source} holds no experiment", fix="it begins with title: and description:")
    problems = list(unknown_keys(data, Experiment))
    if problems:
        raise ConfigError(f"{source}: {'; '.join(problems)}", fix="correct the file; nothing was touched")
    try:
        configuration = _configuration(data.get("configuration") or {})
        filled = {
            key: value if key == "configuration" else substitute(value, configuration)
            for key, value in data.items()
        }
        return msgspec.convert(filled, Experiment)
    except (msgspec.ValidationError, KeyError) as error:
        text = str(error) if isinstance(error, msgspec.ValidationError) else str(error.args[0])
        raise ConfigError(f"{source}: {text}", fix="correct the file; nothing was touched") from error


def _configuration(given: Mapping[str, Any]) -> dict[str, Any]:
    """Values of ``configuration``; those that come from the environment are their defaults, never a secret."""
    values: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, dict) and "type" in value:
            if "default" not in value:
                raise KeyError(f"configuration.{name} has no default, and is not read from elsewhere")
            values[name] = value["default"]
        else:
            values[name] = value
    return values


def substitute(value: Any, configuration: Mapping[str, Any]) -> Any:
    """Replace ``${name}``: alone, it becomes the value itself, with its type; inside text, its text."""
    if isinstance(value, str):
        whole = VARIABLE.fullmatch(value)
        if whole:
            return _lookup(whole[1], configuration)
        return VARIABLE.sub(lambda match: str(_lookup(match[1], configuration)), value)
    if isinstance(value, dict):
        return {key: substitute(inner, configuration) for key, inner in value.items()}
    if isinstance(value, list):
        return [substitute(inner, configuration) for inner in value]
    return value


def _lookup(name: str, configuration: Mapping[str, Any]) -> Any:
    if name not in configuration:
        near = get_close_matches(name, list(configuration), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise KeyError(f"${{{name}}} is not in configuration{hint}")
    return configuration[name]


def unknown_keys(data: Any, kind: Any, path: str = "$") -> Iterator[str]:
    """Every key that has no place in ``kind``, with the nearest that has."""
    yield from _unknown(data, kind if isinstance(kind, inspect.Type) else inspect.type_info(kind), path)


def _unknown(data: Any, info: inspect.Type, path: str) -> Iterator[str]:
    if isinstance(info, inspect.UnionType):
        for inner in info.types:
            if isinstance(inner, inspect.StructType) == isinstance(data, dict):
                yield from _unknown(data, inner, path)
    elif isinstance(info, inspect.StructType) and isinstance(data, dict):
        fields = {field.encode_name: field.type for field in info.fields}
        for key, value in data.items():
            if key in fields:
                yield from _unknown(value, fields[key], f"{path}.{key}")
                continue
            near = get_close_matches(str(key), list(fields), n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(fields)}"
            yield f"{path} has no {key!r}{hint}"
    elif isinstance(info, inspect.ListType) and isinstance(data, list):
        for index, value in enumerate(data):
            yield from _unknown(value, info.item_type, f"{path}[{index}]")


def json_schema() -> dict[str, Any]:
    """The JSON schema of an experiment file, made from the types that read it."""
    document: dict[str, Any] = {
        "$schema": SCHEMA_ID,
        "title": "kvops experiment",
        **msgspec.json.schema(Experiment),
    }
    return document


def differences(experiment: Experiment) -> list[str]:
    """What we do otherwise than the Chaos Toolkit with this file; empty for one that asks for nothing of it."""
    found: list[str] = []
    if experiment.foreign:
        found.append("no kvops: block: scope, workload, guards and deadlines are the defaults")
    for where, activities in (("method", experiment.method), ("rollbacks", experiment.rollbacks)):
        for number, activity in enumerate(activities):
            name = activity.name or f"{where}[{number}]"
            provider = activity.provider
            if provider is None or is_fault(activity):
                continue
            if where == "method":
                called = provider.module or provider.path or provider.url
                found.append(
                    f"{name}: {provider.type} {called} is not called; "
                    f"only actions of {FAULT_MODULE} are injected, as only they can be proven and undone"
                )
            if activity.timeout is not None:
                found.append(f"{name}: timeout is enforced here; the Chaos Toolkit passes over it")
    if experiment.rollbacks:
        found.append("rollbacks are not run: what was injected is undone always, from a ledger")
    if experiment.controls:
        found.append("controls are not run")
    strategy = experiment.runtime.get("rollbacks", {})
    if isinstance(strategy, dict) and strategy.get("strategy", "always") != "always":
        found.append(f"runtime.rollbacks.strategy {strategy['strategy']}: here undo is always done")
    hypothesis = experiment.steady_state_hypothesis
    for number, probe in enumerate(hypothesis.probes if hypothesis is not None else []):
        if not is_probe(probe):
            name = probe.name or f"steady-state-hypothesis[{number}]"
            found.append(f"{name}: is not asked; only probes of {PROBE_MODULE} are, of what clients saw")
    if hypothesis is not None and experiment.foreign:
        found.append("a hypothesis that is not met before the method ends the run with exit code 10, not 0")
    return found
