"""What ``kvops start`` is asked for on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from kvops.errors import UsageError
from kvops.fleet import preflight
from kvops.fleet.group_state import Member
from kvops.limits import GIB

STORES_MAX: Final = 64  # on one machine
MASTERS_MAX: Final = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPlan:
    """A group as it shall be."""

    stores: int = 1
    segment_size_bytes: int = GIB
    placement: str = "local-first"
    transports: tuple[str, ...] = ("shm", "tcp")
    listen: str = "127.0.0.1:0"  # the master's wire
    control: str = "127.0.0.1:0"  # the master's gRPC
    http: str = "127.0.0.1:0"  # the master's metrics
    huge_page_bytes: int = 0  # 0: the kernel's usual pages
    numa_nodes: tuple[int, ...] = ()  # store i is bound to the i-th, over and over; none: unbound
    one_host: bool = False  # the stores share a failure domain; else each is a logical host of its own
    masters: int = 1  # several need etcd
    etcd: tuple[str, ...] = ()  # host:port of one that runs
    etcd_members: int = 0  # … or how many members of one of our own
    etcd_ttl_s: int = 0  # of the leader's lease; 0: what suits that etcd
    etcd_ca: str = ""  # absolute paths, as a master is given them; "" for none
    etcd_cert: str = ""
    etcd_key: str = ""
    etcd_user: str = ""
    etcd_password_file: str = ""

    def members(self) -> list[Member]:
        """Who will be in the group."""
        nodes = self.numa_nodes or (0,)
        return [
            *(Member(name=f"etcd-{i}", role="etcd", host=f"host-{i}") for i in range(self.etcd_members)),
            *(Member(name=f"master-{i}", role="master", host=f"host-{i}") for i in range(self.masters)),
            *(
                Member(
                    name=f"store-{i}",
                    role="store",
                    host="host-0" if self.one_host else f"host-{i}",
                    numa_node=nodes[i % len(nodes)],
                )
                for i in range(self.stores)
            ),
        ]

    def master_address(self, what: Literal["listen", "control", "http"], number: int) -> str:
        """Where one of several masters listens: the next port for each, or any."""
        host, _, port = {"listen": self.listen, "control": self.control, "http": self.http}[what].rpartition(
            ":"
        )
        return f"{host}:{int(port) + number if int(port) else 0}"

    @property
    def store_host(self) -> str:
        """Where stores bind: beside the master, any free port."""
        return self.listen.rpartition(":")[0]

    def check(self) -> None:
        """
        Make sure that there can be such a group at all.

        Raises:
            UsageError: There cannot.
        """
        if not 0 <= self.stores <= STORES_MAX:
            raise UsageError(f"{self.stores} stores on one machine", fix=f"use 0 to {STORES_MAX}")
        if not 1 <= self.masters <= MASTERS_MAX:
            raise UsageError(f"{self.masters} masters on one machine", fix=f"use 1 to {MASTERS_MAX}")
        if self.masters > 1 and not (self.etcd or self.etcd_members):
            raise UsageError(
                f"{self.masters} masters need etcd to elect a leader",
                fix="add --etcd HOST:PORT, or --etcd auto",
            )

    def findings(self) -> list[preflight.Finding]:
        """What a start would be refused for, and what was found in order; nothing is changed."""
        from kvops.addresses import split_address

        kinds: tuple[Literal["listen", "control", "http"], ...] = ("listen", "control", "http")
        addresses = [
            (f"master-{number} ({what})", *split_address(self.master_address(what, number)))
            for number in range(self.masters)
            for what in kinds
        ]
        needs = preflight.Needs(
            stores=self.stores,
            segment_size_bytes=self.segment_size_bytes,
            processes=self.stores + self.masters + self.etcd_members,
            huge_page_bytes=self.huge_page_bytes,
            numa_nodes=self.numa_nodes,
        )
        facts = preflight.read_memory_facts()
        return [preflight.judge_addresses(addresses), *preflight.judge_limits(facts, needs)]
