"""Several masters by a real etcd: killed, stopped, stepped down, cut off, and everything acknowledged is kept."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from kvops.errors import KvopsError, NotLeader, Refused
from kvops.files import read_secret
from kvops.store.client import Pool
from kvops.store.control import ControlClient
from kvops.store.model import MasterStatus, Reason
from tests.etcd import EtcdCluster, needs_etcd
from tests.pool import CALL_MS, LEASE_TTL_S, ROOT, LocalPool, Member
from tests.waiting import WAIT_S, until

pytestmark = [needs_etcd, pytest.mark.process]
DATA = os.urandom(4_096)
DEADLINE_MS = 300


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdCluster]:
    with closing(EtcdCluster()) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def shared(etcd: EtcdCluster) -> Iterator[LocalPool]:
    with closing(LocalPool(masters=3, etcd=etcd.endpoints)) as pool:
        yield pool


@pytest.fixture
def pool(shared: LocalPool, etcd: EtcdCluster) -> LocalPool:
    """Three masters, all of them well, and two that could lead next."""
    etcd.heal()
    shared.heal()
    until(lambda: len(leader(shared)[1].members) == 3, "both standbys are in the set")
    return shared


def status(pool: LocalPool, master: Member) -> MasterStatus | None:
    with ControlClient(master.addresses["control"], read_secret(pool.secret_file), timeout_s=2) as client:
        try:
            return client.status()
        except KvopsError:
            return None


def operate(pool: LocalPool, master: Member) -> ControlClient:
    """A master's control service, for a caller that has time."""
    return ControlClient(master.addresses["control"], read_secret(pool.secret_file), timeout_s=WAIT_S)


def leader(pool: LocalPool) -> tuple[Member, MasterStatus]:
    """Who leads, and what it says; waits until somebody does."""

    def find() -> tuple[Member, MasterStatus] | None:
        found = [(one, status(pool, one)) for one in pool.masters if one.alive and not one.stopped]
        leads = [(one, said) for one, said in found if said is not None and said.role == "leader"]
        return max(leads, key=lambda row: row[1].term, default=None)

    return until(find, "somebody leads")  # type: ignore[no-any-return]


def fill(client: Pool, prefix: str, count: int = 100) -> list[str]:
    """Keys that were acknowledged, and read once: everything that a reader asks is connected."""
    keys = [f"{prefix}-{i}" for i in range(count)]
    until(lambda: all(o.ok for o in client.batch_put_from(keys, [DATA] * count, deadline_ms=5_000)), "stored")
    until(lambda: kept(client, keys) == count, "readable")
    return keys


def works(client: Pool, key: str) -> bool:
    return client.put(key, DATA).ok


def kept(client: Pool, keys: list[str]) -> int:
    """How many of these read as they were put; a wrong byte fails."""
    buffers = [bytearray(len(DATA)) for _ in keys]
    outcomes = client.batch_get_into(keys, buffers, deadline_ms=CALL_MS)
    assert all(data == DATA for data, outcome in zip(buffers, outcomes, strict=True) if outcome.ok)
    return sum(outcome.ok for outcome in outcomes)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_everything_acknowledged_outlives_the_leader(pool: LocalPool, how: signal.Signals) -> None:
    """A standby leads, with every object; a leader that wakes up later answers nobody and follows."""
    client = pool.connect(deadline_ms=DEADLINE_MS)
    keys = fill(client, f"outlives-{how}")
    before, said = leader(pool)

    before.send(how)
    until(lambda: works(client, f"after-{how}"), "a put works again")
    until(lambda: kept(client, keys) == len(keys), "everything is there")
    assert leader(pool)[1].term > said.term
    pool.heal()
    until(lambda: (again := status(pool, before)) and again.role == "standby", "it follows")
    with pytest.raises(NotLeader), operate(pool, before) as control:
        control.drain(["store-0"])


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("count", [1, 2], ids=["one", "both"])
def test_standbys_that_are_gone_close_nobody_out(pool: LocalPool, how: signal.Signals, count: int) -> None:
    """Writers wait a moment and go on; whoever may lead next has everything that they were told is stored."""
    client = pool.connect(deadline_ms=200)
    keys = fill(client, f"standbys-{how}-{count}", 20)
    lead, _ = leader(pool)
    outcomes: list[tuple[str, Reason]] = []

    def write(number: int) -> None:
        for index in range(20):
            key = f"standbys-{how}-{count}-{number}-{index}"
            outcomes.append((key, client.put(key, DATA).reason))

    for one in [one for one in pool.masters if one is not lead][:count]:
        one.send(how)
    writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(WAIT_S)

    assert Reason.BREAKER_OPEN not in {reason for _, reason in outcomes}
    until(lambda: works(client, f"standbys-{how}-{count}-after"), "a put works")
    until(lambda: len(leader(pool)[1].members) == 3 - count, "the set is smaller")
    if count == 1:
        lead.send(signal.SIGKILL)
        until(lambda: works(client, f"standbys-{how}-{count}-led"), "a put works again")
    keys += [key for key, reason in outcomes if reason is Reason.STORED]
    until(lambda: kept(client, keys) == len(keys), "everything is there")


def test_writers_go_on_through_a_change_of_leaders_and_lose_nothing(pool: LocalPool) -> None:
    """Under load: every put that was called stored is there afterwards, and no call outlived its deadline."""
    client = pool.connect(deadline_ms=DEADLINE_MS)
    stored: list[str] = []
    ended, stop = threading.Event(), threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            if client.put(f"load-{number}", DATA).reason is Reason.STORED:
                stored.append(f"load-{number}")
        ended.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        until(lambda: len(stored) > 50, "puts are under way")
        leader(pool)[0].send(signal.SIGKILL)
        here = len(stored)
        until(lambda: len(stored) > here + 50, "puts are under way again")
    finally:
        stop.set()
        writer.join(WAIT_S)
    assert ended.is_set()
    until(lambda: kept(client, stored) == len(stored), "everything is there")


def test_an_operator_can_let_another_one_lead(pool: LocalPool) -> None:
    """step-down hands over at once, and the one that led stands back."""
    client = pool.connect(deadline_ms=DEADLINE_MS)
    keys = fill(client, "step-down", 20)
    before, said = leader(pool)
    with operate(pool, before) as control:
        assert control.step_down(owner="test") == said.term

    until(lambda: works(client, "stepped"), "a put works again")
    assert leader(pool)[0] is not before
    until(lambda: kept(client, keys) == 20, "everything is there")


def test_a_hold_outlives_its_leader(pool: LocalPool) -> None:
    """A drain that was acknowledged is the next leader's too: its store is named by no lookup."""
    client = pool.connect(host="host-1")
    keys = fill(client, "hold", 20)
    first, _ = leader(pool)
    with operate(pool, first) as control:
        control.drain(["store-1"], reason="test")
    first.send(signal.SIGKILL)
    until(lambda: works(client, "held"), "a put works again")
    _, said = leader(pool)
    try:
        assert [hold.target for hold in said.holds] == ["store-1"]
        found = [client.stat(key) for key in keys]
        assert all(stat is None or stat["store"] != "store-1" for stat in found)
    finally:
        until(lambda: lifted(pool, "store-1"), "the hold is lifted")


def lifted(pool: LocalPool, store: str) -> bool:
    """Whether whoever leads now has lifted a hold; raises when that one leads no more."""
    with operate(pool, leader(pool)[0]) as control:
        control.undrain([store])
    return True


def test_without_etcd_the_leader_stops_and_comes_back(pool: LocalPool, etcd: EtcdCluster) -> None:
    """It serves while its lease can be argued; then calls are misses at once; when etcd is back it all goes on."""
    client = pool.connect(deadline_ms=DEADLINE_MS)
    keys = fill(client, "no-etcd", 20)

    def served() -> bool:
        """Whether all was read before the lease was over, which a busy machine may have renewed late."""
        etcd.heal()
        until(lambda: works(client, f"etcd-is-there-{time.monotonic_ns()}"), "a put works")
        for number in range(3):
            etcd.send(number, signal.SIGSTOP)
        return kept(client, keys) == 20

    until(served, "it is served for as long as the lease is certain")
    until(lambda: not works(client, "nobody-leads"), "the leader has stopped")
    etcd.heal()

    until(lambda: works(client, "etcd-is-back"), "a put works again")
    until(lambda: kept(client, keys) == 20, "everything is there")


def test_one_member_of_etcd_may_die(pool: LocalPool, etcd: EtcdCluster) -> None:
    """The leader renews its lease through the others: nobody notices."""
    client = pool.connect()
    _, said = leader(pool)
    etcd.send((etcd.leader() + 1) % 3, signal.SIGKILL)
    over = time.monotonic() + 1.5 * LEASE_TTL_S
    number = 0
    while time.monotonic() < over:
        assert works(client, f"etcd-{number}")
        number += 1
        threading.Event().wait(0.03)

    assert leader(pool)[1].term == said.term


def test_the_leader_of_etcd_may_hang(pool: LocalPool, etcd: EtcdCluster) -> None:
    """While etcd elects another one nothing can be renewed; whatever comes of that, all is well soon, and whole."""
    client = pool.connect(deadline_ms=DEADLINE_MS)
    keys = fill(client, "etcd-leader", 20)
    etcd.send(etcd.leader(), signal.SIGSTOP)
    threading.Event().wait(LEASE_TTL_S + 0.5)  # longer than the lease

    until(lambda: works(client, "etcd-elected"), "a put works")
    until(lambda: kept(client, keys) == 20, "everything is there")


def test_a_group_of_the_same_name_with_another_secret_is_refused(etcd: EtcdCluster, pool: LocalPool) -> None:
    """Two groups never share keys in etcd unnoticed."""
    from kvops.store.coord import EtcdAccess, GroupKeys

    keys = GroupKeys(EtcdAccess(endpoints=etcd.endpoints), group="local")
    with closing(keys), pytest.raises(Refused, match="another secret"):
        keys.check(b"x" * 32)


def test_clients_find_the_leader_through_etcd(pool: LocalPool, etcd: EtcdCluster) -> None:
    """With nothing but etcd's addresses, one of them dead, and also after the leader they knew has died."""
    address = "etcd://127.0.0.1:9," + ",".join(etcd.endpoints) + "/local"
    client = pool.connect(address=address, deadline_ms=2_000)
    keys = fill(client, "through-etcd", 5)
    leader(pool)[0].send(signal.SIGKILL)

    until(lambda: works(client, "through-etcd"), "a put works again")
    until(lambda: kept(client, keys) == 5, "everything is there")


def test_a_group_that_etcd_does_not_know_is_a_miss_in_time(pool: LocalPool, etcd: EtcdCluster) -> None:
    """Nobody leads it: calls end by their deadline and say so."""
    client = pool.connect(address=f"etcd://{etcd.endpoints[0]}/nobody", deadline_ms=200)

    assert client.put("k", DATA).reason in (Reason.MASTER_DOWN, Reason.TIMEOUT)


@pytest.mark.parametrize("direction", ["requests", "answers"])
def test_a_leader_cut_off_from_etcd_in_one_direction_stops_by_itself(direction: str) -> None:
    """Clients and stores still reach it: it must not lead on, and another one keeps all that it acknowledged."""
    if os.getuid() != 0 or not (shutil.which("nft") and shutil.which("ip")):
        pytest.skip("needs root, and nft and ip: apt-get install nftables iproute2")
    namespace = f"kvops-cut-{os.getpid()}"
    folder = tempfile.mkdtemp(prefix="kvops-")
    subprocess.run(["ip", "netns", "add", namespace], check=True)
    try:
        subprocess.run(["ip", "-n", namespace, "link", "set", "lo", "up"], check=True)
        scenario = [sys.executable, "-m", "tests.store.cut_scenario", direction]
        done = subprocess.run(
            ["ip", "netns", "exec", namespace, *scenario],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": folder},
            capture_output=True,
            text=True,
            timeout=4 * WAIT_S,
        )
        assert done.returncode == 0, done.stderr[-2_000:]
    finally:
        subprocess.run(["ip", "netns", "delete", namespace], check=True)
        shutil.rmtree(folder, ignore_errors=True)
