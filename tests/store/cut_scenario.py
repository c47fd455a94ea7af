"""
Runs alone in a network namespace of its own: the way between the leading master and etcd is cut, one direction.

Every master reaches etcd by another address of loopback, so that a packet filter can tell them apart.
``python -m tests.store.cut_scenario requests|answers`` ends with 0 when all went as it must.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing

from kvops.errors import KvopsError
from kvops.files import read_secret
from kvops.store.client import Pool
from kvops.store.control import ControlClient
from kvops.store.model import MasterStatus
from tests.etcd import EtcdCluster
from tests.pool import LocalPool, Member
from tests.waiting import until

MASTERS = 3
DATA = os.urandom(4_096)
KEYS = [f"cut-{number}" for number in range(100)]


def address(number: int) -> str:
    """Where one master finds etcd."""
    return f"127.0.0.{number + 2}"


def cut(number: int, direction: str) -> None:
    """Drop what this master asks etcd, or what etcd answers it."""
    match = f"ip daddr {address(number)}" if direction == "requests" else f"ip saddr {address(number)}"
    rules = f"""
table inet cut {{
  chain out {{
    type filter hook output priority 0; policy accept;
    {match} tcp flags & (fin | rst) == 0 drop
  }}
}}
"""
    subprocess.run(["nft", "-f", "-"], input=rules.encode(), check=True)


def mend() -> None:
    subprocess.run(["nft", "delete", "table", "inet", "cut"], check=True)


def status(pool: LocalPool, master: Member) -> MasterStatus | None:
    with ControlClient(master.addresses["control"], read_secret(pool.secret_file), timeout_s=2) as client:
        try:
            return client.status()
        except KvopsError:
            return None


def leader(pool: LocalPool, *, after: int = 0) -> tuple[int, MasterStatus]:
    """Who leads a term after that one."""

    def find() -> tuple[int, MasterStatus] | None:
        for number, master in enumerate(pool.masters):
            said = status(pool, master)
            if said is not None and said.role == "leader" and said.term > after:
                return number, said
        return None

    return until(find, "somebody leads")  # type: ignore[no-any-return]


def kept(client: Pool) -> int:
    found = [client.get(key) for key in KEYS]
    assert all(data in (None, DATA) for data in found), "wrong bytes"
    return sum(data is not None for data in found)


def main(direction: str) -> None:
    with closing(EtcdCluster(everywhere=True)) as etcd:
        ports = [endpoint.rpartition(":")[2] for endpoint in etcd.endpoints]
        ways = [[f"{address(number)}:{port}" for port in ports] for number in range(MASTERS)]
        with closing(LocalPool(masters=MASTERS, etcd=ways)) as pool:
            until(lambda: len(leader(pool)[1].members) == MASTERS, "both standbys are in the set")
            client = pool.connect(deadline_ms=300)
            data = [DATA] * len(KEYS)
            until(lambda: all(o.ok for o in client.batch_put_from(KEYS, data, deadline_ms=5_000)), "stored")
            before, said = leader(pool)
            cut(before, direction)
            after, _ = leader(pool, after=said.term)
            assert after != before, "whoever is cut off does not lead"
            former = until(lambda: status(pool, pool.masters[before]), "it answers its operators")
            assert former.role == "standby", "it has stopped by itself, although it hears clients and stores"
            until(lambda: client.put("after", DATA).ok, "a put works again")
            until(lambda: kept(client) == len(KEYS), "everything is there")
            mend()
            until(lambda: len(leader(pool)[1].members) == MASTERS, "it has come back")


if __name__ == "__main__":
    main(sys.argv[1])
