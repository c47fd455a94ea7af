"""The pool's own thread: probes, reports, give-ups and unmapping, all off the callers' path."""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from kvops.errors import KvopsError
from kvops.net import wire
from kvops.net.link import establish
from kvops.net.wire import Kind
from kvops.store import messages as m
from kvops.store.channel import PROBE_TIMEOUT_S, MasterChannel, StoreChannel, Trouble, now_ms
from kvops.store.model import Reason

QUEUE_MAX: Final = 256
IDLE_MS: Final = 60_000
GROUP_POLL_S: Final = 0.5


class Caretaker:
    """Started by the first thing there is to do; ends with the pool."""

    def __init__(
        self,
        master: MasterChannel,
        stores: Callable[[], list[StoreChannel]],
        refresh: Callable[[float], bool],
        group_changed: Callable[[bool], None],
    ) -> None:
        self._master = master
        self._stores = stores
        self._refresh = refresh
        self._group_changed = group_changed
        self._to_master: deque[tuple[Kind, bytes]] = deque(maxlen=QUEUE_MAX)  # the oldest falls out
        self._group_open = False
        self._closed = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wake_read = -1
        self._wake_write = -1

    # Called by the pool's callers; never blocks.

    def wake(self) -> None:
        """There may be something to do."""
        with self._lock:
            if self._closed:
                return
            if self._thread is None and not self._start():
                return  # out of descriptors or threads: whoever wakes us next tries again
            self._write()

    def _start(self) -> bool:
        try:
            self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return False
        thread = threading.Thread(target=self._run, name="kvops-caretaker", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            os.close(self._wake_read)
            os.close(self._wake_write)
            return False
        self._thread = thread
        return True

    def report(self, store_id: int, reason: Reason) -> None:
        """A store's breaker opened: the master counts the hosts that say so."""
        stores = self._stores()
        down = sum(not channel.usable for channel in stores)
        body = wire.encode(
            m.Report(store_id=store_id, reason=reason.value, stores=len(stores), stores_down=down)
        )
        self._to_master.append((Kind.REPORT, body))
        self.wake()

    def revoke(self, rows: bytes) -> None:
        """A put could not be ended in time: END_ROW rows to give up."""
        self._to_master.append((Kind.PUT_REVOKE, rows))
        self.wake()

    def watch_group(self) -> None:
        """The group's breaker is open: ask until it is not."""
        self._group_open = True
        self.wake()

    def close(self) -> None:
        """Stop, and wait for the thread's current probe at most."""
        with self._lock:
            self._closed = True
            thread = self._thread
            if thread is not None:
                self._write()
        if thread is not None and thread is not threading.current_thread():
            thread.join(2 * PROBE_TIMEOUT_S)
            if not thread.is_alive():
                os.close(self._wake_read)
                os.close(self._wake_write)

    def _write(self) -> None:
        try:
            os.write(self._wake_write, b"x")
        except BlockingIOError:
            pass  # it has been told often enough

    # The thread.

    def _run(self) -> None:
        while not self._closed:
            self._wait()
            if self._closed:
                return
            self._probe_master()
            self._deliver()
            for channel in self._stores():
                self._probe_store(channel)
            if self._group_open:
                self._ask_for_group()

    def _wait(self) -> None:
        """Until woken, a probe is due, or a mapped store's process ends."""
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        mapped = {}
        for channel in self._stores():
            link = channel.mapping_link
            fd = link.fileno() if link is not None else -1
            if fd >= 0:  # another thread may close it at any time; poll then says so at once
                mapped[fd] = channel
                poll.register(fd, select.POLLIN)
        timeout_s = GROUP_POLL_S if self._group_open else self._until_probe_s()
        for fd, _ in poll.poll(timeout_s * 1_000):
            if fd in mapped:
                mapped[fd].unmap()  # nothing is ever sent there unasked: its end is the only news
            elif fd == self._wake_read:
                os.read(self._wake_read, 4_096)

    def _until_probe_s(self) -> float:
        now = now_ms()
        breakers = (self._master.breaker, *(channel.breaker for channel in self._stores()))
        due = [at - now for breaker in breakers if (at := breaker.probe_due_ms()) is not None]
        return max(0, min(due, default=IDLE_MS)) / 1_000

    def _probe_master(self) -> None:
        breaker = self._master.breaker
        if not breaker.try_probe(now_ms=now_ms()):
            return
        try:
            self._master.attempt(Kind.EXISTS, b"", deadline=time.monotonic() + PROBE_TIMEOUT_S)
        except KvopsError:
            breaker.record_probe(False, now_ms=now_ms())
            return
        breaker.record_probe(True, now_ms=now_ms())
        self._refresh(time.monotonic() + PROBE_TIMEOUT_S)

    def _ask_for_group(self) -> None:
        """Nobody asks the master while the group's breaker is open, so we do: a lookup of nothing says how it is."""
        try:
            answer = self._master.call(Kind.LOOKUP, b"", deadline=time.monotonic() + PROBE_TIMEOUT_S)
        except Trouble:
            return
        self._group_open = m.LOOKUP_HEAD.unpack_from(answer)[1] == 0
        self._group_changed(self._group_open)

    def _probe_store(self, channel: StoreChannel) -> None:
        breaker = channel.breaker
        if not breaker.try_probe(now_ms=now_ms()):
            return
        try:
            link = channel.open_link()
            establish(link, deadline=time.monotonic() + PROBE_TIMEOUT_S)
        except KvopsError:
            breaker.record_probe(False, now_ms=now_ms())
            return
        breaker.record_probe(True, now_ms=now_ms())
        channel.put_back(link)

    def _deliver(self) -> None:
        while self._to_master and self._master.breaker.allow():
            kind, body = self._to_master[0]
            try:
                self._master.call(kind, body, deadline=time.monotonic() + PROBE_TIMEOUT_S)
            except Trouble:
                return
            self._to_master.popleft()
