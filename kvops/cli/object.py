"""``kvops object``: single objects of a pool, by hand."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click

from kvops.cli import options
from kvops.cli.clients import connect_pool, leader_status
from kvops.cli.context import Target, resolve
from kvops.cli.guard import confirm
from kvops.cli.options import DURATION_MS, PATH, Settings
from kvops.cli.output import Column, Output
from kvops.errors import ConfigError, KvopsError, Refused, Unreachable, UsageError
from kvops.fleet.preflight import human_objects
from kvops.limits import MIB, OBJECT_BYTES_MAX

FIRST_READ_BYTES: Final = MIB  # most objects fit; the outcome of a larger one names its size
PAGE_ROWS_MAX: Final = 10_000

# CLI exit codes of what a pool says of a key: "no" 1, "could not tell" 3, "refused" 5.
_UNREACHED: Final = ("TIMEOUT", "STORE_DOWN", "MASTER_DOWN", "BREAKER_OPEN")
_REFUSED: Final = ("NO_SPACE", "REFUSED")
_REMOVED: Final = {"HIT": "REMOVED", "MISS": "ABSENT"}  # a remove in its own words
_FIX: Final = {
    "EXISTS": "another writer is putting it; try again",
    "MISS": "it was never put, has been evicted, or was lost with its store: kvops events",
    "TIMEOUT": "see kvops status; --timeout waits longer",
    "STORE_DOWN": "see kvops status",
    "MASTER_DOWN": "see kvops status",
    "BREAKER_OPEN": "see kvops status and kvops events",
    "CORRUPT": "kvops object rm drops it, so that it can be put anew; if many are, drain its store: bad memory",
    "STALE": "its memory was given to another object meanwhile; try again",
    "NO_SPACE": "see kvops object stats: it needs room on as many ready stores as --replicas says",
    "REFUSED": "see kvops logs",
}

LS_COLUMNS: Final = (
    Column("key"),
    Column("size_bytes", "bytes"),
    Column("store"),
    Column("depth", "count", wide=True),
    Column("tenant", wide=True),
)


class NotThere(KvopsError):
    """The answer about a key is no."""


@options.group("object")
def command() -> None:
    r"""
    Get, put, list and remove single objects.

    \b
    Example:
      kvops object put greeting hello.txt && kvops object get greeting
    """


def _namespace(function: Any) -> Any:
    return click.option("--namespace", metavar="HEX", help="Namespace digest of the keys, 32 hex digits.")(
        function
    )


@contextmanager
def _pool(settings: Settings, namespace: str | None) -> Iterator[tuple[Target, Any]]:
    target = resolve(settings)
    pool = connect_pool(target, timeout_s=settings.timeout_s(), namespace=namespace)
    try:
        yield target, pool
    finally:
        pool.close()


def _trouble(key: str, outcome: Any, *, doing: str) -> KvopsError:
    reason = str(outcome.reason)
    what = f"cannot {doing} {key!r}: {reason}" + (f" ({outcome.store})" if outcome.store else "")
    fix = _FIX.get(reason, "see kvops status")
    if reason in _UNREACHED:
        return Unreachable(what, fix=fix)
    return Refused(what, fix=fix) if reason in _REFUSED else NotThere(what, fix=fix)


def _absent(key: str) -> NotThere:
    return NotThere(f"there is no object {key!r}", fix=_FIX["MISS"])


@command.command("get")
@click.argument("key")
@click.argument("file", type=PATH, required=False)
@_namespace
@click.pass_obj
def get(settings: Settings, key: str, file: Path | None, namespace: str | None) -> int:
    r"""
    Write an object's bytes to FILE, or to stdout ("-").

    Binary is refused on a terminal. Exit code 1: there is no such object. 3: the pool could not tell.

    \b
    Examples:
      kvops object get greeting
      kvops object get page-17 page.bin
    """
    with _pool(settings, namespace) as (_, pool):
        buffer = bytearray(FIRST_READ_BYTES)
        outcome = pool.batch_get_into([key], [memoryview(buffer)])[0]
        if str(outcome.reason) == "REFUSED" and FIRST_READ_BYTES < outcome.size_bytes <= OBJECT_BYTES_MAX:
            buffer = bytearray(outcome.size_bytes)
            outcome = pool.batch_get_into([key], [memoryview(buffer)])[0]
    if not outcome.ok:
        raise _absent(key) if str(outcome.reason) == "MISS" else _trouble(key, outcome, doing="get")
    data = memoryview(buffer)[: outcome.size_bytes]
    if file is not None and str(file) != "-":
        try:
            file.write_bytes(data)
        except OSError as error:
            raise ConfigError(f"cannot write {file}: {error.strerror}", fix="name another file") from error
        if settings.output in ("json", "jsonl"):
            Output(settings).document(
                {"key": key, "size_bytes": len(data), "store": outcome.store, "file": str(file)}
            )
        return 0
    if sys.stdout.isatty() and not _is_text(data):
        raise UsageError(
            f"object {key!r} is binary: it would garble the terminal", fix=f"kvops object get {key} FILE"
        )
    stream = sys.stdout.buffer
    stream.write(data)
    stream.flush()
    return 0


def _is_text(data: memoryview) -> bool:
    try:
        text = bytes(data).decode()
    except UnicodeDecodeError:
        return False
    return all(char.isprintable() or char in "\n\t\r" for char in text)


@command.command("put")
@click.argument("key")
@click.argument("file", type=PATH, required=False)
@click.option(
    "--replicas", type=click.IntRange(1, 8), default=1, show_default=True, help="Copies, on distinct hosts."
)
@click.option("--ttl", type=DURATION_MS, help="Forget it after this long.")
@click.option("--soft-pin", is_flag=True, help="Evict it last.")
@click.option("--hard-pin", is_flag=True, help="Never evict it.")
@click.option("--yes", is_flag=True, help="Do not ask, even for a protected group.")
@click.option("--dry-run", is_flag=True, help="Print the exact steps and do nothing.")
@_namespace
@click.pass_obj
def put(
    settings: Settings,
    key: str,
    file: Path | None,
    replicas: int,
    ttl: int | None,
    soft_pin: bool,
    hard_pin: bool,
    yes: bool,
    dry_run: bool,
    namespace: str | None,
) -> int:
    r"""
    Put FILE, or stdin ("-"), as an object. An object that is there already stays as it is (EXISTS).

    \b
    Examples:
      kvops object put greeting hello.txt
      tar c . | kvops object put backup - --ttl 1h
    """
    data = _read_input(file)
    out = Output(settings)
    target = resolve(settings)
    if dry_run:
        step = f"put {len(data):,} B as {key!r} into {target.name}, replicas: {replicas}"
        out.document({"group": target.name, "dry_run": True, "steps": [step]})
        out.line(step)
        return 0
    confirm(target, f"puts {len(data):,} B as {key!r}", yes=yes)
    from kvops.store.model import PutOptions

    how = PutOptions(replicas=replicas, ttl_ms=ttl or 0, soft_pin=soft_pin, hard_pin=hard_pin)
    with _pool(settings, namespace) as (_, pool):
        outcome = pool.batch_put_from([key], [memoryview(data)], options=how)[0]
    if not outcome.ok:
        if str(outcome.reason) == "NO_SPACE" and (away := _all_away(settings, target)):
            raise Unreachable(
                f"cannot put {key!r}: STORE_DOWN: no store takes objects ({away})", fix="see kvops status"
            )
        raise _trouble(key, outcome, doing="put")
    reason = str(outcome.reason)
    if out.structured:
        row = {"key": key, "outcome": reason, "size_bytes": len(data), "store": outcome.store}
        out.document(row | {"replicas": outcome.replicas, "replicas_asked": replicas})
    else:
        out.note(f"{reason}  {key}  {len(data):,} B  {where(outcome, replicas)}".rstrip())
    return 0


def _all_away(settings: Settings, target: Target) -> str:
    """Where no store takes objects, how each of them is; "" where one does, or nobody can tell."""
    try:
        status = leader_status(target, timeout_s=settings.timeout_s())
    except KvopsError:
        return ""
    if any(store.state == "ready" for store in status.stores):
        return ""
    return ", ".join(f"{store.name} {store.state}" for store in status.stores) or "there is none"


def where(outcome: Any, asked: int) -> str:
    """Where a put went, for people: the store, and how many replicas were written when several were asked for."""
    store = outcome.store or ""
    if asked == 1 or not outcome.replicas:
        return store
    others = f" and {outcome.replicas - 1} more" if outcome.replicas > 1 else ""
    return f"{outcome.replicas} of {asked} replicas: {store}{others}"


def _read_input(file: Path | None) -> bytes:
    if file is None or str(file) == "-":
        if file is None and sys.stdin.isatty():
            raise UsageError("nothing to put: stdin is a terminal", fix="name a FILE, or - to type it in")
        data = sys.stdin.buffer.read(OBJECT_BYTES_MAX + 1)
    else:
        try:
            with file.open("rb") as stream:
                data = stream.read(OBJECT_BYTES_MAX + 1)
        except OSError as error:
            raise UsageError(f"cannot read {file}: {error.strerror}", fix="check the path") from error
    if len(data) > OBJECT_BYTES_MAX:
        raise UsageError(f"an object has at most {OBJECT_BYTES_MAX:,} B", fix="split it")
    return data


@command.command("stat")
@click.argument("keys", nargs=-1, required=True, metavar="KEY…")
@_namespace
@click.pass_obj
def stat(settings: Settings, keys: tuple[str, ...], namespace: str | None) -> int:
    r"""
    Show what the pool knows of objects. Takes no lease and touches no LRU. Exit code 1: one is not there.

    \b
    Example:
      kvops object stat greeting -o json
    """
    out = Output(settings)
    with _pool(settings, namespace) as (target, pool):
        found = {key: pool.stat(key) for key in keys}
    rows = [{"key": key, **row} for key, row in found.items() if row is not None]
    absent = [key for key, row in found.items() if row is None]
    out.header(target.label, f"{len(rows)} of {len(found)} there")
    if out.structured:
        out.rows("objects", LS_COLUMNS, rows, group=target.name, absent=absent)
    else:
        columns = [Column("key"), Column("size_bytes", "bytes")]
        more = dict.fromkeys(name for row in rows for name in row if name not in ("key", "size_bytes"))
        out.table([*columns, *map(Column, more)], rows)
        for key in absent:
            out.note(f"there is no object {key!r}")
    return 1 if absent else 0


@command.command("rm")
@click.argument("keys", nargs=-1, required=True, metavar="KEY…")
@click.option("--yes", is_flag=True, help="Do not ask, even for a protected group.")
@click.option("--dry-run", is_flag=True, help="Print the exact steps and do nothing.")
@_namespace
@click.pass_obj
def rm(settings: Settings, keys: tuple[str, ...], yes: bool, dry_run: bool, namespace: str | None) -> int:
    r"""
    Remove objects. A leased one is hidden at once, its memory freed when the lease ends.

    Exit code 1: one was not there.

    \b
    Example:
      kvops object rm greeting
    """
    out = Output(settings)
    target = resolve(settings)
    if dry_run:
        steps = [f"remove {key!r} from {target.name}" for key in keys]
        out.document({"group": target.name, "dry_run": True, "steps": steps})
        for step in steps if not out.structured else ():
            click.echo(step)
        return 0
    confirm(target, f"removes {len(keys)} object{'' if len(keys) == 1 else 's'}", yes=yes)
    rows = []
    trouble: KvopsError | None = None
    with _pool(settings, namespace) as (_, pool):
        for key in keys:
            outcome = pool.remove(key)
            reason = str(outcome.reason)
            rows.append({"key": key, "removed": outcome.ok, "reason": _REMOVED.get(reason, reason)})
            if not outcome.ok and reason != "MISS":
                trouble = trouble or _trouble(key, outcome, doing="remove")
    if trouble is not None:
        raise trouble
    count = sum(bool(row["removed"]) for row in rows)
    if out.human:
        out.header(target.label, f"{count} of {len(rows)} removed")
        results = [
            {"key": row["key"], "result": "removed" if row["removed"] else "not there"} for row in rows
        ]
        out.table((Column("key"), Column("result")), results)
    else:
        out.rows("removed", (Column("key"), Column("removed"), Column("reason")), rows, group=target.name)
    return 0 if count == len(rows) else 1


@command.command("ls")
@click.option("--prefix", default="", help="Only keys that begin so.")
@click.option("--store", help="Only objects on this store.")
@click.option(
    "--limit", type=click.IntRange(1, PAGE_ROWS_MAX), default=1000, show_default=True, help="Rows of a page."
)
@click.option("--cursor", default="", help="Go on where a former page ended.")
@_namespace
@click.pass_obj
def ls(
    settings: Settings, prefix: str, store: str | None, limit: int, cursor: str, namespace: str | None
) -> int:
    r"""
    List objects, page by page. Takes no lease and touches no LRU.

    \b
    Examples:
      kvops object ls --prefix llama/ --limit 50
      kvops object ls --store store-2 -o name
    """
    out = Output(settings)
    with _pool(settings, namespace) as (target, pool):
        rows, following = pool.ls(prefix=prefix, store=store, limit=limit, cursor=cursor)
    out.header(target.label, _counted(rows) + (", more follow" if following else ""))
    out.rows("objects", LS_COLUMNS, rows, group=target.name, cursor=following)
    if following and not out.structured:
        out.note(f"more: add --cursor {following}")
    return 0


def _counted(rows: Sequence[dict[str, Any]]) -> str:
    """How many objects there are, and how many copies, a row each, where that is more."""
    count = len({row["key"] for row in rows})
    objects = f"{count:,} object{'' if count == 1 else 's'}"
    return objects if count == len(rows) else f"{objects}, {len(rows):,} copies"


STATS_COLUMNS: Final = (
    Column("name"),
    Column("state"),
    Column("objects", "count"),
    Column("used_bytes", "bytes"),
    Column("capacity_bytes", "bytes"),
)


@command.command("stats")
@click.pass_obj
def stats(settings: Settings) -> int:
    r"""
    Show counts and sizes of the pool and of each store, as its leader has them.

    \b
    Example:
      kvops object stats -o json
    """
    out = Output(settings)
    target = resolve(settings)
    status = leader_status(target, timeout_s=settings.timeout_s())
    found: dict[str, Any] = {
        "objects": status.objects,
        "processing": status.processing,
        "used_bytes": status.used_bytes,
        "capacity_bytes": status.capacity_bytes,
        "evicted_total": status.evicted_total,
        "lookups_total": status.lookups_total,
        "hits_total": status.hits_total,
        "hit_ratio": round(status.hits_total / status.lookups_total, 4) if status.lookups_total else None,
    }
    stores = [
        {
            "name": store.name,
            "host": store.host,
            "state": str(store.state),
            "objects": store.objects,
            "used_bytes": store.used_bytes,
            "capacity_bytes": store.capacity_bytes,
        }
        for store in status.stores
    ]
    if out.structured:
        out.document({"group": target.name, **found, "stores": stores})
        return 0
    ratio = "-" if found["hit_ratio"] is None else f"{found['hit_ratio']:.1%}"
    out.header(
        target.label,
        f"{human_objects(status.objects)}, {status.processing:,} being put, {status.evicted_total:,} evicted, "
        f"hits {ratio} of {status.lookups_total:,} lookups",
    )
    total = {
        "name": "pool",
        "state": "",
        **{key: found[key] for key in ("objects", "used_bytes", "capacity_bytes")},
    }
    out.table(STATS_COLUMNS, [total, *stores])
    return 0
