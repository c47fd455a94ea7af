"""A simulated process: it can be killed, paused and slowed down, and its host can lose power."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from kvops.chaos.sim.clock import Call, Host
from kvops.chaos.sim.net import End, Payload
from kvops.net import wire
from kvops.net.auth import Hello

if TYPE_CHECKING:
    from kvops.chaos.sim.world import World


class Process:
    """
    One life of one process; after a kill another object takes its place.

    While it is paused, what happens to it is put off, and follows in order when it goes on; its clock does not
    stop meanwhile.
    """

    def __init__(self, world: World, name: str, host: Host, rng: Random) -> None:
        self.world = world
        self.name = name
        self.host = host
        self.rng = rng
        self.alive = True
        self.paused = False
        self.slow_us = 0  # every frame it sends is late by this much
        self.deferred: list[tuple[Call, tuple[Any, ...]]] = []
        self.ends: dict[End, None] = {}
        self._pauses = 0
        self._scheduler = world.scheduler

    def hello_as(self, role: str) -> bytes:
        """The HELLO body of this process."""
        return wire.encode(
            Hello(
                role=role,
                group="sim",
                name=self.name,
                host=self.host.name,
                numa_node=0,
                pid=1,
                boot_id=self.host.name,
                nonce=bytes(16),
            )
        )

    def now_ms(self) -> int:
        """Its host's boot-time clock."""
        return self.host.boot_ms(self._scheduler.now_us)

    def timer(self, after_us: int, call: Call, *args: Any) -> None:
        """Call after so much of its host's time, unless it has ended by then."""
        scheduler = self._scheduler
        scheduler.at(scheduler.now_us + int(after_us / self.host.rate), self._fire, call, args)

    def _fire(self, call: Call, args: tuple[Any, ...]) -> None:
        if not self.alive:
            return
        if self.paused:
            self.deferred.append((self._fire, (call, args)))
        else:
            call(*args)

    def start(self) -> None:
        """Begin."""
        raise NotImplementedError

    def accept(self, end: End, kind: int, request: int, body: bytes, payload: Payload) -> None:
        """The first frame of a stream that somebody opened."""
        end.close()

    def kill(self) -> None:
        """SIGKILL: the kernel closes its streams; some of what it had sent is lost with them."""
        for end in list(self.ends):
            end.close(abrupt=self.rng.random() < 0.5)
        self.end()

    def power_off(self) -> None:
        """Its host is gone: nobody is told."""
        for end in list(self.ends):
            end.vanish(unsent_too=True)
        self.end()

    def end(self) -> None:
        """Whatever way it ended: nothing of it happens any more."""
        self.alive = False
        self.deferred.clear()
        self.ends.clear()

    def pause(self) -> None:
        """SIGSTOP."""
        self._pauses += 1
        self.paused = True

    def resume(self) -> None:
        """SIGCONT: what was put off follows at once."""
        self._pauses -= 1
        if self._pauses or not self.alive:
            return
        self.paused = False
        scheduler = self.world.scheduler
        deferred, self.deferred = self.deferred, []
        for call, args in deferred:
            scheduler.at(scheduler.now_us, call, *args)
