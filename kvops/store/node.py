"""The store node's process: one event loop around ``NodeCore``, its sockets, its memory, its session."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
import uvloop
from numpy.typing import NDArray

from kvops import collector
from kvops.errors import KvopsError, Refused, Unreachable
from kvops.files import read_secret
from kvops.limits import CONNECTIONS_MAX, REGIONS_OF_ALL_MAX
from kvops.log import configure, log
from kvops.net.auth import Hello, Listener, Welcome
from kvops.net.etcd_query import parse_masters
from kvops.net.link import Address
from kvops.net.peer import Peers, WirePeer
from kvops.notify import notify, notify_ready
from kvops.store import messages as m
from kvops.store.clock import boot_id
from kvops.store.config import StoreConfig
from kvops.store.listen import Room, descriptor_room, listen_tcp, listen_unix
from kvops.store.node_core import NodeCore, Source
from kvops.store.numa import bind_process, read_placement
from kvops.store.segment import Segment
from kvops.store.session import SLOTS_PER_FRAME, Session
from kvops.store.store_peer import StorePeer
from kvops.store.topology import read_topology

TICK_S: Final = 0.05
ON_LOOP_TIMEOUT_S: Final = 2.0
FIRST_MOUNT_S: Final = 0.5  # the rest of the memory waits this long for the first of it to be of use
STOP_TIMEOUT_S: Final = 3.0


if TYPE_CHECKING:
    from kvops.metrics import Exposed, HttpServer
    from kvops.store.mover import Mover

Answer = TypeVar("Answer")


class Node:
    """One store node, from its sockets to its memory."""

    def __init__(self, config: StoreConfig) -> None:
        self.config = config
        connections, regions = descriptor_room(CONNECTIONS_MAX, REGIONS_OF_ALL_MAX)
        self.connections = Peers(connections)
        self.regions = Room(regions)  # registered memory of all writers
        self.segment: Segment
        self.core: NodeCore
        self._secret = read_secret(Path(config.secret_file))
        self.loop: asyncio.AbstractEventLoop
        self._stop = asyncio.Event()
        self._ticked = time.monotonic()
        self._addresses: dict[str, str] = {}
        self._http: socket.socket  # listens; answered once the first memory is in use
        self._mounted = threading.Event()
        self._session: Session | None = None
        self._mover: Mover | None = None
        self._exit_code = 0
        self.registered_bytes_total = 0
        self.elsewhere_bytes: int | None = None  # of the segment, on other NUMA nodes; None: not known

    def _asked_to_end(self) -> None:
        """The first time readers are waited for, the second time not."""
        if self._stop.is_set() and self._session is not None:
            self._session.hurry()
        self._stop.set()

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT."""
        self.loop = loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_end)
        incarnation = secrets.randbits(63) | 1
        if self.config.numa_bind:
            bind_process(read_topology(), self.config.numa_node)
        self.segment = Segment(
            self.config.segment_size_bytes,
            name=self.config.name,
            page_bytes=self.config.huge_page_bytes,
            numa_node=self.config.numa_node if self.config.numa_bind else None,
        )
        self.core = NodeCore(self.segment.memory, incarnation=incarnation)
        self.segment.populate_first()
        servers = await self._listen()
        session = Session(
            parse_masters(self.config.masters),
            secret=self._secret,
            hello=self._hello,
            owner=self,
        )
        self._session = session
        session.start()
        # First things first: while pages come, whoever needs a mapping waits for them.
        await asyncio.to_thread(self._mounted.wait, FIRST_MOUNT_S)
        workers = self.segment.populate(on_failure=self._no_memory, on_done=self._populated)
        ticks = loop.create_task(self._tick())
        metrics, http = await asyncio.to_thread(self._serve_http)
        self._mover = await asyncio.to_thread(self._make_mover)
        collector.settle()
        await self._stop.wait()
        notify("STOPPING=1")
        log.info("store.stopping")
        self._mover.stop()
        await asyncio.to_thread(session.stop, self.config.stop_grace_ms / 1_000)
        ticks.cancel()
        for server in servers:
            server.close()
        self.connections.abort()
        metrics.close()
        http.close()
        self.segment.close()
        for worker in workers:
            await asyncio.to_thread(worker.join, STOP_TIMEOUT_S)
        if self.config.unix_path:
            Path(self.config.unix_path).unlink(missing_ok=True)
        return self._exit_code

    async def _listen(self) -> list[asyncio.Server]:
        loop = self.loop
        listening = listen_tcp(Address.parse(self.config.listen))
        servers = [await loop.create_server(self._accept, sock=listening)]
        host, port = listening.getsockname()[:2]
        self._addresses["listen"] = f"{host}:{port}"
        if self.config.unix_path:
            servers.append(
                await loop.create_unix_server(self._accept, sock=listen_unix(self.config.unix_path))
            )
            self._addresses["unix"] = self.config.unix_path
        self._http = listen_tcp(Address.parse(self.config.http))
        host, port = self._http.getsockname()[:2]
        self._addresses["http"] = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return servers

    # What follows is imported when the first memory is in use: it is a tenth of all that a store loads, and
    # nobody asks for it so early. A scrape before that waits in the socket's queue; the master repeats its order to
    # move objects.

    def _serve_http(self) -> tuple[Exposed, HttpServer]:
        """Answer on the HTTP socket, which has been listening since before the first mount; with whole pages."""
        from kvops.metrics import expose, serve_http
        from kvops.store.node_metrics import readings

        return expose(readings(self)), serve_http(self._http, ready=self._is_ready)

    def _make_mover(self) -> Mover:
        from kvops.store.mover import Mover

        return Mover(
            self.config.masters,
            secret_file=Path(self.config.secret_file),
            group=self.config.group,
            name=self.config.name,
            host=self.config.host,
            owner=self,
        )

    def _accept(self) -> WirePeer:
        return StorePeer(self, Listener(self._secret, self.config.group))

    def _no_memory(self, error: Refused) -> None:
        log.error("segment.refused", error=error.what, fix=error.fix)
        if self.segment.populated_bytes == 0:
            self._exit_code = error.exit_code
            self.loop.call_soon_threadsafe(self._stop.set)

    def _populated(self) -> None:
        """All memory is there: say how long it took, and prove where it lies. In a thread of the segment's."""
        segment = self.segment
        placement = read_placement(segment.address)
        self.elsewhere_bytes = placement.elsewhere_bytes(self.config.numa_node) if placement else None
        log.info(
            "segment.populated",
            size_bytes=segment.size_bytes,
            page_bytes=segment.page_bytes,
            seconds=round(segment.populate_s, 3),
            numa_bound=self.config.numa_bind,
            bytes_by_numa_node=dict(placement.bytes_by_node) if placement else "the kernel does not say",
        )
        if self.config.numa_bind and self.elsewhere_bytes:
            log.error(
                "segment.misplaced",
                numa_node=self.config.numa_node,
                elsewhere_bytes=self.elsewhere_bytes,
                fix="free memory on that node (numactl -H), then restart this store",
            )

    async def _tick(self) -> None:
        while True:
            self._ticked = time.monotonic()
            await asyncio.sleep(TICK_S)

    def _is_ready(self) -> tuple[bool, str]:
        return (True, "") if self._mounted.is_set() else (False, "not mounted at the master yet")

    def welcome(self) -> Welcome:
        """What a client learns of us."""
        return Welcome(
            role="store",
            name=self.config.name,
            term=0,
            incarnation=self.core.incarnation,
            boot_id=boot_id(),
            unix_path=self.config.unix_path,
        )

    def _hello(self) -> Hello:
        return Hello(
            role="store",
            group=self.config.group,
            name=self.config.name,
            host=self.config.host,
            numa_node=self.config.numa_node,
            pid=os.getpid(),
            boot_id=boot_id(),
            nonce=os.urandom(16),
        )

    # The session's side; called on its thread.

    def _on_loop(self, ask: Callable[[], Answer]) -> Answer:
        future: Future[Answer] = Future()

        def answer() -> None:
            try:
                future.set_result(ask())
            except KvopsError as error:
                future.set_exception(error)

        self.loop.call_soon_threadsafe(answer)
        try:
            return future.result(ON_LOOP_TIMEOUT_S)
        except TimeoutError:
            raise Unreachable(f"the data loop stood still for {ON_LOOP_TIMEOUT_S} s", fix="") from None

    def mount(self) -> m.Mount:
        """What is offered to the master now."""
        config = self.config
        return m.Mount(
            name=config.name,
            host=config.host,
            numa_node=config.numa_node,
            incarnation=self.core.incarnation,
            boot_id=boot_id(),
            pid=os.getpid(),
            address=self._addresses["listen"],
            unix_path=config.unix_path if "shm" in config.transports else "",
            http_address=self._addresses["http"],
            capacity_bytes=self.segment.size_bytes,
            populated_bytes=self.segment.populated_bytes,
            highest_generation=self.core.highest_generation,
            objects=self.core.objects,
            transports=config.transports,
        )

    def beat(self) -> m.Beat:
        """How it goes."""
        return m.Beat(
            populated_bytes=self.segment.populated_bytes,
            objects=self.core.objects,
            used_bytes=self.core.used_bytes,
            loop_lag_ms=int((time.monotonic() - self._ticked) * 1_000),
            misplaced_bytes=(self.elsewhere_bytes or 0) if self.config.numa_bind else 0,
        )

    def announce(self, cursor: int) -> tuple[bytes, int]:
        """SLOT_ROW rows from a cursor on."""
        return self._on_loop(lambda: self.core.announce(cursor, SLOTS_PER_FRAME))

    def free(self, body: bytes, done: Callable[[bytes], None]) -> None:
        """Clear slots, on the loop that owns them."""
        self.loop.call_soon_threadsafe(lambda: done(self.core.free(body)))

    def floor(self, generation: int) -> None:
        """No put below this generation is under way."""
        self.loop.call_soon_threadsafe(self.core.raise_floor, generation)

    def migrate(self, number: int, bandwidth_bps: int) -> None:
        """Copy what is here to other stores."""
        if self._mover is not None:
            self._mover.told(number, bandwidth_bps)

    # The mover's side; called on its thread.

    def sources(self, rows: NDArray[np.void]) -> list[Source | None]:
        """What lies in these slots."""
        return self._on_loop(lambda: self.core.sources(rows))

    def migrated(self, number: int, unmoved: int) -> None:
        """All that could be copied for a hold has been."""
        if self._session is not None:
            self._session.migrated(number, unmoved)

    def mounted(self, store_id: int, term: int) -> None:
        """The master has taken us in: from the first time on we are ready."""
        log.info("store.mounted", id=store_id, term=term, **self._addresses)
        if not self._mounted.is_set():
            self._mounted.set()
            notify_ready(self._addresses, status=f"mounted as {store_id}, term {term}")


def serve(config: StoreConfig) -> int:
    """Run one store node in the foreground; its exit code."""
    configure(role=config.name, host=config.host, path=Path(config.log_file) if config.log_file else None)
    return uvloop.run(Node(config).run())
