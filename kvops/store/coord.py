"""
A group's keys in etcd: the operations of an election carried out, on a thread of their own.

The one place that knows the etcd client. Its calls are bounded; what did not answer in time may have happened.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import etcd3
import grpc
import msgspec

from kvops.errors import AuthFailed, ConfigError, Refused, Unreachable
from kvops.limits import DEADLINE_MS_MAX
from kvops.log import log
from kvops.store.clock import boot_ms
from kvops.store.election import (
    SILENCE,
    Campaign,
    Claim,
    Election,
    Grant,
    Look,
    Members,
    Op,
    Publish,
    Raise,
    Record,
    Renew,
    Revoke,
    Role,
    Seen,
)

TIMEOUT_S_MAX: Final = 1.0  # of one call; a quarter of a short lease
RETRY_S: Final = 1.0  # a member of etcd that failed is left alone for so long
RECONNECT_MS: Final = (100, 500)  # gRPC's first and longest pause between attempts to connect
CHECK_ATTEMPTS: Final = 3
JOIN_TIMEOUT_S: Final = 2.0

T = TypeVar("T", bound=msgspec.Struct)

_TROUBLE: Final = (etcd3.exceptions.Etcd3Exception, grpc.RpcError)


class _Owner(msgspec.Struct, frozen=True):
    """Whose keys these are, so that two groups of one name cannot share them unnoticed."""

    schema: int
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdAccess:
    """How to reach etcd."""

    endpoints: Sequence[str]  # host:port
    ca_file: str = ""  # "": without TLS
    cert_file: str = ""
    key_file: str = ""
    user: str = ""
    password: str = ""


class GroupKeys:
    """The keys of one group. For one thread."""

    def __init__(self, access: EtcdAccess, *, group: str, timeout_s: float = TIMEOUT_S_MAX) -> None:
        """
        Connect; asks nothing yet.

        Raises:
            ConfigError: A certificate cannot be read.
            Unreachable: With a password: nobody to give it to. AuthFailed when it is wrong.
        """
        self._group = group
        self._prefix = f"/kvops/{group}/"
        self._names = ", ".join(access.endpoints)
        self._client = self._connect(access, access.endpoints, timeout_s)
        self._txn = self._client.transactions
        # A renewal must not wait for a member that hangs: it is sent to all of them at once.
        self._each = [self._connect(access, [endpoint], timeout_s) for endpoint in access.endpoints]
        self._renewers = ThreadPoolExecutor(len(self._each), thread_name_prefix="renew")

    def _connect(self, access: EtcdAccess, addresses: Sequence[str], timeout_s: float) -> Any:
        credentials = None
        if access.ca_file:
            try:
                credentials = etcd3.MultiEndpointEtcd3Client.get_secure_creds(
                    access.ca_file, access.key_file or None, access.cert_file or None
                )
            except OSError as error:
                raise ConfigError(
                    f"{error.filename} for etcd cannot be read: {error.strerror}",
                    fix="see etcd_ca and the like",
                ) from None
        options = [
            ("grpc.initial_reconnect_backoff_ms", RECONNECT_MS[0]),
            ("grpc.min_reconnect_backoff_ms", RECONNECT_MS[0]),
            ("grpc.max_reconnect_backoff_ms", RECONNECT_MS[1]),
        ]
        endpoints = []
        for endpoint in addresses:
            host, _, port = endpoint.rpartition(":")
            endpoints.append(
                etcd3.Endpoint(
                    host,
                    int(port),
                    secure=credentials is not None,
                    creds=credentials,
                    time_retry=RETRY_S,
                    opts=options,
                )
            )
        try:
            return etcd3.MultiEndpointEtcd3Client(
                endpoints,
                timeout=timeout_s,
                user=access.user or None,
                password=access.password or None,
                failover=True,
            )
        except _TROUBLE as error:
            raise self._trouble(error) from None

    def close(self) -> None:
        """Hang up."""
        self._renewers.shutdown(wait=False, cancel_futures=True)
        for client in (self._client, *self._each):
            client.close()

    def check(self, secret: bytes) -> None:
        """
        Make sure that the keys are this group's, or nobody's yet.

        Raises:
            Refused: A group with that name and another secret owns them.
            Unreachable: etcd does not answer. AuthFailed when it turns us away.
        """
        mark = hmac.digest(secret, b"kvops etcd owner\0" + self._group.encode(), "sha256").hex()[:32]
        key, mine = self._prefix + "owner", msgspec.json.encode(_Owner(1, mark))
        last: Exception | None = None
        for _ in range(CHECK_ATTEMPTS * len(self._client.endpoints)):
            try:
                created, answers = self._client.transaction(
                    [self._txn.version(key) == 0], [self._txn.put(key, mine)], [self._txn.get(key)]
                )
            except _TROUBLE as error:
                last = error
                self._give_another_chance(error)
                continue
            if created or answers[0][0][0] == mine:
                return
            raise Refused(
                f"etcd at {self._names} holds a group {self._group!r} with another secret",
                fix=f"use another group name, install that group's secret, or delete {self._prefix} there",
            )
        assert last is not None
        raise self._trouble(last)

    def run(self, op: Op) -> object:
        """One operation's result, ``SILENCE`` when it may or may not have happened."""
        try:
            return self._run(op)
        except _TROUBLE as error:
            self._give_another_chance(error)
            log.debug("etcd.silent", operation=type(op).__name__, error=str(error))
            return SILENCE

    def _run(self, op: Op) -> object:
        match op:
            case Look():
                return self._look()
            case Grant():
                return int(self._client.lease(op.ttl_s).id)
            case Renew():
                return self._renew(op.lease)
            case Campaign():
                return self._campaign(op)
            case Record():
                return self._if_leader(op.claim, [self._put("members", op.members)])
            case Publish():
                return self._if_leader(op.claim, [self._put("view", op.claim, lease=op.lease)])
            case Raise():
                claim = msgspec.structs.replace(op.claim, term=op.term)
                return self._if_leader(
                    op.claim,
                    [
                        self._put("leader", claim, lease=op.lease),
                        self._txn.put(self._prefix + "term", str(op.term)),
                    ],
                )
            case Revoke():
                self._client.revoke_lease(op.lease)
                return True

    def _renew(self, lease: int) -> object:
        """Through every member at once; the first that confirms it decides."""
        asked = [self._renewers.submit(self._renew_at, client, lease) for client in self._each]
        results = set()
        for answered in as_completed(asked):
            result = answered.result()
            if result is True:
                return True
            results.add(result)
        return False if False in results else SILENCE

    @staticmethod
    def _renew_at(client: Any, lease: int) -> object:
        for endpoint in client.endpoints.values():
            endpoint.last_failed = 0  # there is no other one to go to
        try:
            answers = list(client.refresh_lease(lease))
        except _TROUBLE as error:
            gone = isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.NOT_FOUND
            return False if gone else SILENCE
        return bool(answers) and answers[0].TTL > 0

    def _put(self, name: str, value: msgspec.Struct, lease: int = 0) -> Any:
        return self._txn.put(self._prefix + name, msgspec.json.encode(value), lease=lease or None)

    def _look(self) -> Seen:
        names = ("leader", "members", "term")
        _, answers = self._client.transaction([], [self._txn.get(self._prefix + name) for name in names], [])
        rows = [rows[0] if rows else (None, None) for rows in answers]
        (leader, _), (members, members_meta), (term, term_meta) = rows
        return Seen(
            leader=None if leader is None else self._read(leader, Claim),
            members=None if members is None else self._read(members, Members),
            term=0 if term is None else int(term),
            members_revision=0 if members_meta is None else members_meta.mod_revision,
            term_revision=0 if term_meta is None else term_meta.mod_revision,
        )

    def _read(self, value: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(value, type=kind)
        except msgspec.DecodeError as error:
            raise etcd3.exceptions.Etcd3Exception(
                f"{self._prefix}{kind.__name__.lower()} in etcd cannot be read: {error}"
            ) from None

    def _campaign(self, op: Campaign) -> bool:
        txn, prefix = self._txn, self._prefix
        won, _ = self._client.transaction(
            [
                txn.version(prefix + "leader") == 0,
                txn.mod(prefix + "members") == op.seen.members_revision,
                txn.mod(prefix + "term") == op.seen.term_revision,
            ],
            [
                self._put("leader", op.claim, lease=op.lease),
                self._put("members", op.members),
                txn.put(prefix + "term", str(op.claim.term)),
            ],
            [],
        )
        return bool(won)

    def _if_leader(self, claim: Claim, operations: list[Any]) -> bool:
        """Only we can have written this very claim: its term was given to nobody else."""
        done, _ = self._client.transaction(
            [self._txn.value(self._prefix + "leader") == msgspec.json.encode(claim)], operations, []
        )
        return bool(done)

    def _give_another_chance(self, error: Exception) -> None:
        """A client that has given up every member would refuse even one that came back, and counts in wall time."""
        if isinstance(error, etcd3.exceptions.NoServerAvailableError):
            for endpoint in self._client.endpoints.values():
                endpoint.last_failed = 0

    def _trouble(self, error: Exception) -> Unreachable:
        code = error.code() if isinstance(error, grpc.Call) else None
        if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED) or (
            code is grpc.StatusCode.INVALID_ARGUMENT
        ):
            details = error.details() if isinstance(error, grpc.Call) else ""
            return AuthFailed(
                f"etcd at {self._names} turned us away: {details}", fix="see etcd_user and its password"
            )
        return Unreachable(
            f"etcd at {self._names} does not answer: {error or type(error).__name__}",
            fix="check the endpoints, and TLS: etcdctl --endpoints … endpoint health",
        )


class Coordinator:
    """
    Runs a master's election.

    Args:
        keys: The group's; used by this thread alone from ``start`` on.
        election: Ours.
        ticked_ms: When the master's loop last ticked.
        changed: Called on the thread whenever something the master goes by has changed.
    """

    def __init__(
        self,
        keys: GroupKeys,
        election: Election,
        *,
        ticked_ms: Callable[[], int],
        changed: Callable[[], None],
    ) -> None:
        self.election = election
        self.lock = threading.Lock()
        """Held for whatever is done with ``election`` beside reading ``lease_until_ms``."""
        self.silent_since_ms = 0  # etcd has not answered since; 0: it does
        self._keys = keys
        self._ticked_ms = ticked_ms
        self._changed = changed
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="election", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Give the lease back if there is one, so that another may lead at once; bounded."""
        with self.lock:
            self.election.resign()
        self._stopping = True
        self._wake.set()
        self._thread.join(JOIN_TIMEOUT_S)

    def wake(self) -> None:
        """Something in ``election`` was changed from outside."""
        self._wake.set()

    def _run(self) -> None:
        shown: object = None
        while True:
            with self.lock:
                op = self.election.next(boot_ms(), ticked_ms=self._ticked_ms())
            if self._stopping and not isinstance(op, Revoke):
                break
            if isinstance(op, int):
                wait_ms = min(max(op - boot_ms(), 1), DEADLINE_MS_MAX)
                if self._wake.wait(wait_ms / 1_000):
                    self._wake.clear()
            else:
                sent_ms = boot_ms()
                result = self._keys.run(op)
                now_ms = boot_ms()
                with self.lock:
                    self.election.done(op, result, sent_ms=sent_ms, now_ms=now_ms)
                if result is not SILENCE:
                    self.silent_since_ms = 0
                elif not self.silent_since_ms:
                    self.silent_since_ms = now_ms
            now = self._shown()
            if now != shown:
                shown = now
                self._changed()
        self._keys.close()

    def _shown(self) -> tuple[Role, int, int, Seen, frozenset[str]]:
        election = self.election
        return election.role, election.won, election.term, election.seen, election.members
