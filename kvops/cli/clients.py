"""How commands reach a group: its masters' control service, and the pool; nothing else makes either."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvops.cli.context import Target, resolve
from kvops.cli.options import Settings
from kvops.errors import KvopsError, Unreachable, UsageError
from kvops.fleet.health import Judgement, Known, Life, judge, last_change, mounted_at, trouble_since

if TYPE_CHECKING:
    from kvops.store.model import Event, HoldReply, MasterStatus, Promotion

LOOK_PAUSE_S: Final = 0.2  # between looks at what is awaited
LOOK_TIMEOUT_S: Final = 5.0  # of one look


class Control(Protocol):
    """One master's control service."""

    def status(self) -> MasterStatus: ...
    def events(self, since: str | None = None, *, follow: bool = False) -> Iterator[Event]: ...
    def drain(
        self,
        targets: Sequence[str],
        *,
        reason: str = "",
        owner: str = "",
        migrate: bool = False,
        bandwidth_bps: int = 0,
        force: Sequence[str] = (),
        dry_run: bool = False,
    ) -> HoldReply: ...
    def cordon(
        self,
        targets: Sequence[str],
        *,
        reason: str = "",
        owner: str = "",
        force: Sequence[str] = (),
        dry_run: bool = False,
    ) -> HoldReply: ...
    def undrain(self, targets: Sequence[str], *, owner: str = "", dry_run: bool = False) -> HoldReply: ...
    def ok_to_stop(self, targets: Sequence[str]) -> HoldReply: ...
    def holds(self) -> HoldReply: ...
    def step_down(self, *, owner: str, force: Sequence[str] = ()) -> int: ...
    def promote(self, *, owner: str, force: Sequence[str] = (), dry_run: bool = False) -> Promotion: ...
    def close(self) -> None: ...


def control_client(address: str, secret: bytes, *, timeout_s: float) -> Control:
    """Ask the master at ``address``."""
    from kvops.store.control import ControlClient

    client: Control = ControlClient(address, secret, timeout_s)
    return client


def connect_pool(target: Target, *, timeout_s: float, namespace: str | None = None) -> Any:
    """
    The pool of a group, ready for use.

    Raises:
        Unreachable: The group does not run.
    """
    masters = target.require_masters()
    import kvops  # the client loads numpy: only for commands that use the pool

    more: dict[str, Any] = {}
    if namespace is not None:
        try:
            more["namespace"] = bytes.fromhex(namespace)
        except ValueError:
            raise UsageError(f"{namespace!r} is not a namespace digest", fix="write 32 hex digits") from None
    return kvops.connect(
        masters,
        deadline_ms=max(1, int(timeout_s * 1000)),
        secret_file=target.secret_file,
        group=target.name,
        name="kvops",
        **more,
    )


def known_processes(target: Target) -> list[Known]:
    """The processes a group should have, and whether they run, as far as can be seen from here."""
    if target.state is None:
        return [
            Known(name=address, role="master", address=address, control=address) for address in target.control
        ]
    known = []
    for member in target.state.members:
        life = Life.ENDED
        if member.running:
            life = Life.STOPPED if member.stopped else Life.RUNNING
        known.append(
            Known(
                name=member.name,
                role=member.role,
                host=member.host,
                numa_node=member.numa_node,
                pid=member.pid,
                life=life,
                since=target.local.first_seen(member, str(life)) if target.local is not None else None,
                address=member.addresses.get("listen", ""),
                control=member.addresses.get("control", ""),
                http=member.addresses.get("http", ""),
            )
        )
    return known


def look(target: Target, *, timeout_s: float) -> Judgement:
    """
    Ask every master of a group at once, and judge. Changes nothing; takes no longer than ``timeout_s`` or so.

    Raises:
        AuthFailed: A master answered and does not share our secret: that is no question of health.
        ConfigError: The secret cannot be read.
    """
    from kvops.errors import AuthFailed

    if target.local is None and not target.control:
        raise UsageError(
            f"context {target.name} names no control address", fix="add control: [HOST:PORT] to it"
        )
    known = known_processes(target)
    # A stopped process would only let us wait.
    asked = [
        one
        for one in known
        if one.role == "master" and one.control and one.life in (Life.RUNNING, Life.UNKNOWN)
    ]
    answers: dict[str, MasterStatus] = {}
    events: list[Event] = []
    if asked:
        secret = target.secret()

        def ask(one: Known) -> tuple[str, MasterStatus | None, list[Event]]:
            with closing(control_client(one.control, secret, timeout_s=timeout_s)) as client:
                try:
                    status = client.status()
                except AuthFailed:
                    raise
                except Unreachable:
                    return one.name, None, []
                try:
                    return one.name, status, list(client.events())
                except KvopsError:
                    return one.name, status, []  # only "since when" is lost

        with ThreadPoolExecutor(max_workers=min(8, len(asked))) as threads:
            for name, status, some in threads.map(ask, asked):
                if status is not None:
                    answers[name] = status
                events += some
    stopped_since = None
    if target.state is not None and target.local is not None and not any(m.pid for m in target.state.members):
        stopped_since = target.local.changed()
    events.sort(key=lambda event: event.time)
    return judge(
        group=target.name,
        environment=target.environment,
        known=known,
        answers=answers,
        since=last_change(events),
        trouble=trouble_since(events),
        stopped_since=stopped_since,
        mounts=mounted_at(events),
        now=datetime.now(UTC),
    )


def look_until(
    settings: Settings, done: Callable[[Judgement], bool], *, timeout_s: float
) -> tuple[Target, Judgement]:
    """
    Look at the group that is meant, again and again, until what is seen will do or time is over.

    Returns:
        The group and the last judgement; the caller sees from it whether it was in time.
    """
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while True:
        target = resolve(settings)
        left_s = deadline - time.monotonic()
        judgement = look(target, timeout_s=min(LOOK_TIMEOUT_S, max(0.1, left_s)))
        left_s = deadline - time.monotonic()
        if done(judgement) or left_s <= 0:
            return target, judgement
        pause.wait(min(LOOK_PAUSE_S, left_s))


def leader_status(target: Target, *, timeout_s: float) -> MasterStatus:
    """
    What the group's leader knows of it.

    Raises:
        Unreachable: The group does not run, or no leader answered in time.
    """
    with leader(target, timeout_s=timeout_s) as (_, status):
        return status


@contextmanager
def leader(target: Target, *, timeout_s: float) -> Iterator[tuple[Control, MasterStatus]]:
    """
    The leader's control service, and what it just said of the group.

    Raises:
        Unreachable: The group does not run, or no leader answered in time.
    """
    if target.local is not None:
        target.require_masters()
    elif not target.control:
        raise UsageError(
            f"context {target.name} names no control address", fix="add control: [HOST:PORT] to it"
        )
    trouble: KvopsError = Unreachable(f"no master of {target.name} leads", fix="see kvops status")
    for address in target.control:
        with closing(control_client(address, target.secret(), timeout_s=timeout_s)) as client:
            try:
                status = client.status()
            except Unreachable as error:
                trouble = error
                continue
            if status.role == "leader":
                yield client, status
                return
    raise trouble
