"""
A group's keys in etcd: the operations of an election carried out, on a thread of their own.

The one place that knows the etcd client. Its calls are bounded; what did not answer in time may have happened.
"""

from __future__ import annotations

import hmac
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import etcd3
import grpc
import msgspec

from kvops.addresses import split_address
from kvops.errors import AuthFailed, ConfigError, KvopsError, Refused, Unreachable
from kvops.limits import DEADLINE_MS_MAX
from kvops.log import log
from kvops.net.link import Address
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
    Promote,
    Publish,
    Raise,
    Record,
    Renew,
    Revoke,
    Role,
    Seen,
)
from kvops.store.term import TERM_MAX

TIMEOUT_S_MAX: Final = 1.0  # of one call; a quarter of a short lease
RETRY_S: Final = 1.0  # a member of etcd that failed is left alone for so long
RECONNECT_MS: Final = (100, 500)  # gRPC's first and longest pause between attempts to connect
CHECK_ATTEMPTS: Final = 3
JOIN_TIMEOUT_S: Final = 2.0
LOGIN_PAUSE_S: Final = 1.0  # between two logins: etcd spends a tenth of a second of CPU on a password
_FORGOTTEN: Final = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INVALID_ARGUMENT)
"""What etcd says of a token that it does not know, of one that is outdated, of none: nothing was done."""

T_co = TypeVar("T_co")
P = TypeVar("P")

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
            ConfigError: A certificate cannot be used, or a user has no password.
        """
        self._group = group
        self._prefix = f"/kvops/{group}/"
        self._names = ", ".join(access.endpoints)
        self._access = access
        self._timeout_s = timeout_s
        self._logged_in_s = float("-inf")
        if access.user and not access.password:
            raise ConfigError(
                f"etcd_user {access.user} has no password", fix="name its file in etcd_password_file"
            )
        self._client = self._connect(access, access.endpoints, timeout_s)
        self._txn = self._client.transactions
        # A renewal must not wait for a member that hangs: it is sent to all of them at once.
        self._each = [self._connect(access, [endpoint], timeout_s) for endpoint in access.endpoints]
        self._renewers = ThreadPoolExecutor(len(self._each), thread_name_prefix="renew")

    def _connect(self, access: EtcdAccess, addresses: Sequence[str], timeout_s: float) -> Any:
        credentials = _credentials(access) if access.ca_file else None
        options = [
            ("grpc.initial_reconnect_backoff_ms", RECONNECT_MS[0]),
            ("grpc.min_reconnect_backoff_ms", RECONNECT_MS[0]),
            ("grpc.max_reconnect_backoff_ms", RECONNECT_MS[1]),
        ]
        endpoints = []
        for endpoint in addresses:
            host, port = split_address(endpoint)
            endpoints.append(
                etcd3.Endpoint(
                    host,
                    port,
                    secure=credentials is not None,
                    creds=credentials,
                    time_retry=RETRY_S,
                    opts=options,
                )
            )
        # Without its user and password: it would ask only one member, once and for ever, and hand the token to
        # gRPC in a way that gRPC refuses to use without TLS.
        return etcd3.MultiEndpointEtcd3Client(endpoints, timeout=timeout_s, failover=True)

    def _authorised(self, call: Callable[[], T_co]) -> T_co:
        """A call, made again after a login when etcd does not know our token: it forgets them with its process."""
        try:
            return call()
        except grpc.RpcError as error:
            code = error.code() if isinstance(error, grpc.Call) else None
            if not self._access.user or code not in _FORGOTTEN or not self._login():
                raise
        return call()

    def _login(self) -> bool:
        """Ask each member in turn for a token; whether there is a new one. ``grpc.RpcError`` when it is refused."""
        if time.monotonic() - self._logged_in_s < LOGIN_PAUSE_S:
            return False
        request = etcd3.etcdrpc.AuthenticateRequest(name=self._access.user, password=self._access.password)
        last: grpc.RpcError | None = None
        for endpoint in self._client.endpoints.values():
            try:
                stub = etcd3.etcdrpc.AuthStub(endpoint.channel)
                token = stub.Authenticate(request, self._timeout_s).token
            except grpc.RpcError as error:
                last = error
                code = error.code() if isinstance(error, grpc.Call) else None
                if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    continue  # nobody looked at the password: it may be shown again at once
                self._logged_in_s = time.monotonic()
                break
            self._logged_in_s = time.monotonic()
            self._client.metadata = (("token", token),)
            return True
        assert last is not None
        raise last

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
                created, answers = self._authorised(
                    lambda: self._client.transaction(
                        [self._txn.version(key) == 0], [self._txn.put(key, mine)], [self._txn.get(key)]
                    )
                )
            except _TROUBLE as error:
                last = error
                self._give_another_chance(error)
                continue
            if created or answers[0][0][0] == mine:
                return
            try:
                msgspec.json.decode(answers[0][0][0], type=_Owner)
            except ValueError as error:
                raise Refused(
                    f"{key} in etcd at {self._names} cannot be read: {error}",
                    fix=f"whose group is it? If yours: etcdctl del {key}, then start again",
                ) from None
            raise Refused(
                f"etcd at {self._names} holds a group {self._group!r} with another secret",
                fix=f"use another group name, install that group's secret, or delete {self._prefix} there",
            )
        assert last is not None
        raise self._trouble(last)

    def run(self, op: Op) -> object:
        """One operation's result, ``SILENCE`` when it may or may not have happened."""
        try:
            return self._authorised(lambda: self._run(op))
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
            case Promote():
                return self._promote(op)
            case Revoke():
                self._client.revoke_lease(op.lease)
                return True

    def _renew(self, lease: int) -> object:
        """Through every member at once; the first that confirms it decides."""
        asked = [self._renewers.submit(self._renew_at, client, lease) for client in self._each]
        gone = False
        forgotten: grpc.RpcError | None = None
        for answered in as_completed(asked):
            try:
                if answered.result():
                    return True
                gone = True
            except grpc.RpcError as error:
                code = error.code() if isinstance(error, grpc.Call) else None
                gone = gone or code is grpc.StatusCode.NOT_FOUND
                forgotten = error if code in _FORGOTTEN else forgotten
            except etcd3.exceptions.Etcd3Exception:
                pass  # that member is silent
        if forgotten is not None:
            raise forgotten
        return False if gone else SILENCE

    def _renew_at(self, client: Any, lease: int) -> bool:
        """Through one member; whether the lease was still there."""
        client.metadata = self._client.metadata
        for endpoint in client.endpoints.values():
            endpoint.last_failed = 0  # there is no other one to go to
        answers = list(client.refresh_lease(lease))
        return bool(answers) and answers[0].TTL > 0

    def _put(self, name: str, value: msgspec.Struct, lease: int = 0) -> Any:
        return self._txn.put(self._prefix + name, msgspec.json.encode(value), lease=lease or None)

    def _look(self) -> Seen:
        names = ("leader", "members", "term")
        _, answers = self._client.transaction([], [self._txn.get(self._prefix + name) for name in names], [])
        rows = [rows[0] if rows else (None, None) for rows in answers]
        (leader_text, _), (members_text, members_meta), (term_text, term_meta) = rows
        trouble: list[str] = []

        def read(name: str, text: bytes | None, parse: Callable[[bytes], P]) -> P | None:
            try:
                return None if text is None else parse(text)
            except (ValueError, KvopsError) as error:  # of msgspec, too
                trouble.append(f"{self._prefix}{name} in etcd cannot be read: {error}")
                return None

        leader = read("leader", leader_text, _parse_claim)
        members = read("members", members_text, _parse_members)
        term = read("term", term_text, _parse_term)
        if term is None and term_text is not None:
            # Whoever leads and whoever may follow were given theirs from it.
            term = max([claim.term for claim in (leader, members) if claim is not None], default=0)
        return Seen(
            leader=leader,
            members=members,
            term=term or 0,
            members_revision=0 if members_meta is None else members_meta.mod_revision,
            term_revision=0 if term_meta is None else term_meta.mod_revision,
            taken=leader_text is not None,
            trouble="; ".join(trouble),
        )

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

    def _promote(self, op: Promote) -> bool:
        done, _ = self._client.transaction(
            [
                self._txn.version(self._prefix + "leader") == 0,
                self._txn.mod(self._prefix + "members") == op.seen.members_revision,
            ],
            [self._put("members", op.members)],
            [],
        )
        return bool(done)

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
        # The client's own exceptions say nothing; what they were made of does.
        cause = error if isinstance(error, grpc.Call) else error.__context__
        code, details = (cause.code(), cause.details()) if isinstance(cause, grpc.Call) else (None, "")
        if code in (*_FORGOTTEN, grpc.StatusCode.PERMISSION_DENIED):
            return AuthFailed(
                f"etcd at {self._names} turned us away: {details}",
                fix="see etcd_user and the password in etcd_password_file",
            )
        return Unreachable(
            f"etcd at {self._names} does not answer: {details or error or type(error).__name__}",
            fix="check the endpoints, and TLS (etcd_ca): etcdctl --endpoints … endpoint health",
        )


def _credentials(access: EtcdAccess) -> grpc.ChannelCredentials:
    """TLS by these files, read here: gRPC would report a bad one on its own stderr alone, at every attempt."""
    files = {"etcd_ca": access.ca_file, "etcd_cert": access.cert_file, "etcd_key": access.key_file}
    contents: dict[str, bytes | None] = {}
    try:
        for name, file in files.items():
            contents[name] = Path(file).read_bytes() if file else None
    except OSError as error:
        raise ConfigError(
            f"{name} {file} cannot be read: {error.strerror}", fix="see its path and its mode"
        ) from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    used = f"etcd_ca {access.ca_file}"
    try:
        context.load_verify_locations(cafile=access.ca_file)
        if access.cert_file or access.key_file:
            used = f"etcd_cert {access.cert_file}, etcd_key {access.key_file}"
            context.load_cert_chain(access.cert_file, access.key_file or None)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(
            f"{used}: not what etcd's TLS needs: {error}", fix="give PEM files; a certificate with its key"
        ) from None
    return grpc.ssl_channel_credentials(contents["etcd_ca"], contents["etcd_key"], contents["etcd_cert"])


def _parse_claim(text: bytes) -> Claim:
    claim = msgspec.json.decode(text, type=Claim)
    Address.parse(claim.address)
    return msgspec.structs.replace(claim, term=_checked_term(claim.term))


def _parse_members(text: bytes) -> Members:
    members = msgspec.json.decode(text, type=Members)
    _checked_term(members.term)
    return members


def _parse_term(text: bytes) -> int:
    return _checked_term(int(text))


def _checked_term(term: int) -> int:
    if not 0 <= term <= TERM_MAX:
        raise ValueError(f"term {term} is not between 0 and {TERM_MAX}")
    return term


class Coordinator:
    """
    Runs a master's election.

    Args:
        keys: The group's; used by this thread alone from ``start`` on.
        election: Ours.
        ticked_ms: When the master's loop last ticked.
        changed: Called on the thread whenever something the master goes by has changed.
        failed: Called on the thread when it ends by what is a bug: nobody renews the lease from then on.
    """

    def __init__(
        self,
        keys: GroupKeys,
        election: Election,
        *,
        ticked_ms: Callable[[], int],
        changed: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self.election = election
        self.lock = threading.Lock()
        """Held for whatever is done with ``election`` beside reading ``lease_until_ms``."""
        self.silent_since_ms = 0  # etcd has not answered since; 0: it does
        self._keys = keys
        self._ticked_ms = ticked_ms
        self._changed = changed
        self._failed = failed
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
        try:
            self._elect()
        except Exception as error:  # noqa: BLE001 (a thread's end would be noticed by nobody, and here nobody leads then)
            self._failed(error)

    def _elect(self) -> None:
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
