"""Faults that an operator makes: a wrong setting, restarts one after the other, a drain under load."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

import yaml

from kvops.chaos import outside
from kvops.chaos.faults.common import control_is_well, expect, must, new_token, not_here
from kvops.chaos.model import ALL_TRANSPORTS, Evidence, Here, Layer, Signal, Transport, fault
from kvops.chaos.probe import Ending, ask_target
from kvops.chaos.steps import MARK, EndMarked, RestartRole, RestoreFile, UndoStep, Undrain
from kvops.chaos.targets import Target, fellows
from kvops.errors import LeftBehind
from kvops.fleet.process import is_running, send_signal, wait_ended
from kvops.host import Host

END_TIMEOUT_S: Final = 10.0
SHOWN: Final = ("state", "capacity_bytes", "transports", "numa_node", "host")


def _group_only(target: Target) -> str | None:
    return None if isinstance(target.restart, RestartRole) else f"{target.name} is no member of a local group"


def _end(target: Target) -> None:
    for one in target.processes:
        send_signal(one, signal.SIGTERM)
    left = wait_ended(target.processes, timeout_s=END_TIMEOUT_S)
    must(not left, f"{target.name} did not end {END_TIMEOUT_S:g} s after SIGTERM")


@fault("rolling.restart")
@dataclass(frozen=True, slots=True, kw_only=True)
class Rolling:
    """Restart all members of a role one after the other, each when the one before it is ready: all come back empty."""

    target: Target
    control: Target
    members: tuple[Target, ...] = ()

    name: ClassVar[str]
    layer: ClassVar = Layer.LOAD
    transports: ClassVar[frozenset[Transport]] = ALL_TRANSPORTS
    certifies: ClassVar[str] = (
        "a roll-out under load: hits fall, recomputation stays within bounds, all recover"
    )
    does_not_certify: ClassVar[str] = "a roll-out that waits until each is warm again"
    conflicts: ClassVar[frozenset[str]] = frozenset({"process.", "net.", "rolling.", "config."})
    lasting: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.members:
            object.__setattr__(self, "members", tuple(fellows(self.target, self.target.role)))
        if any(one.name == self.control.name for one in self.members):  # all of them are restarted
            spared = [one for role in ("master", "store") for one in fellows(self.target, role)]
            spared = [one for one in spared if one.role != self.target.role]
            object.__setattr__(self, "control", (spared or [self.control])[0])

    @classmethod
    def here(cls) -> Here:
        return Here("kvops restart")

    def unavailable(self, host: Host) -> str | None:
        return _group_only(self.target) or not_here(host, self.target)

    def undo(self) -> list[UndoStep]:
        return [one.restart for one in self.members if one.restart is not None]

    def inject(self, host: Host) -> None:
        for one in self.members:
            _end(one)
            assert one.restart is not None
            one.restart.act()

    def verify(self, host: Host) -> Evidence:
        now = [one.now for one in self.members]
        old = [one.name for one in self.members if is_running(one.leader)]
        must(not old, f"{', '.join(old)} was not restarted")
        for one in now:
            must(one.processes and is_running(one.leader), f"{one.name} does not run")
            expect(ask_target(one, timeout_s=2.0, from_netns=one.netns), Ending.ANSWERED, target=one)
        names = ", ".join(one.name for one in now)
        return Evidence(
            signals=(
                Signal("/proc", f"{len(now)} new processes instead of {len(self.members)}"),
                Signal("requests", f"{names} answer"),
            ),
            control=control_is_well(self.control),
        )


@fault("store.drain_under_load")
@dataclass(frozen=True, slots=True, kw_only=True)
class DrainUnderLoad:
    """Take a store out of use while it is read: no lookup names it from the answer on, its leases run out."""

    target: Target
    control: Target

    name: ClassVar[str]
    layer: ClassVar = Layer.LOAD
    transports: ClassVar[frozenset[Transport]] = ALL_TRANSPORTS
    certifies: ClassVar[str] = (
        "a planned removal: readers finish, nothing is written there, hits fall by its share"
    )
    does_not_certify: ClassVar[str] = "an unplanned loss (process.kill)"
    conflicts: ClassVar[frozenset[str]] = frozenset({"store.", "process."})
    lasting: ClassVar[bool] = True

    @classmethod
    def here(cls) -> Here:
        return Here("kvops drain")

    def unavailable(self, host: Host) -> str | None:
        if self.target.role != "store":
            return f"{self.target.name} is no store"
        return _group_only(self.target) or not_here(host, self.target)

    def undo(self) -> list[UndoStep]:
        restart = self.target.restart
        if not isinstance(restart, RestartRole):
            return []  # unavailable() said so
        return [Undrain(state_dir=restart.state_dir, group=restart.group, store=self.target.name)]

    def _kvops(self, *words: str) -> dict[str, Any]:
        restart = self.target.restart
        assert isinstance(restart, RestartRole)
        said = outside.kvops_json(restart.state_dir, restart.group, *words)
        must(said is not None and "error" not in said, f"kvops {' '.join(words)} said {said}")
        assert said is not None
        return said

    def inject(self, host: Host) -> None:
        self._kvops("drain", self.target.name, "--no-wait", "--yes", "--reason", "kvops chaos")

    def verify(self, host: Host) -> Evidence:
        said = self._kvops("status")
        state = {one["name"]: one["state"] for one in said.get("stores", [])}
        holds = [one for one in said.get("holds", []) if self.target.name in one.get("stores", [])]
        must(holds, f"nothing holds {self.target.name}")
        must(
            state.get(self.target.name) not in ("ready", None),
            f"{self.target.name} is {state.get(self.target.name)}",
        )
        must(
            state.get(self.control.name, "ready") == "ready",
            f"{self.control.name} is {state.get(self.control.name)}",
        )
        # Its own process is well: it is the master that passes it over.
        seen = ask_target(self.target, timeout_s=2.0, from_netns=self.target.netns)
        return Evidence(
            signals=(
                Signal(
                    "kvops status",
                    f"{self.target.name} {state[self.target.name]}, hold #{holds[0]['number']}",
                ),
                Signal(f"request to {self.target.name}", str(seen)),
            ),
            control=control_is_well(self.control),
        )


@fault("config.bad_value")
@dataclass(frozen=True, slots=True, kw_only=True)
class BadValue:
    """Give one store a wrong setting and restart it: it refuses to start with it, or shows what it does."""

    target: Target
    control: Target
    key: str
    value: Any
    token: str = field(default_factory=new_token)
    seen: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    name: ClassVar[str]
    layer: ClassVar = Layer.CONFIG
    transports: ClassVar[frozenset[Transport]] = ALL_TRANSPORTS
    certifies: ClassVar[str] = "one instance with a mistake: it is refused, or does no harm to the others"
    does_not_certify: ClassVar[str] = "a mistake that reaches all instances at once"
    conflicts: ClassVar[frozenset[str]] = frozenset({"config.", "process.", "rolling.", "store."})
    lasting: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if "file" not in self.seen and self.target.config_file:
            self.seen["file"] = RestoreFile.of(Path(self.target.config_file))
            self.seen["row"] = self._row()

    def _row(self) -> dict[str, Any]:
        """What ``kvops status`` says of it, without what changes by itself."""
        restart = self.target.restart
        if not isinstance(restart, RestartRole):
            return {}
        said = outside.kvops_json(restart.state_dir, restart.group, "status") or {}
        for one in said.get("stores", []):
            if one["name"] == self.target.name:
                return {key: one.get(key) for key in SHOWN}
        return {}

    @classmethod
    def here(cls) -> Here:
        return Here("its configuration file, and kvops restart")

    def unavailable(self, host: Host) -> str | None:
        if self.target.role != "store":
            return f"{self.target.name} is no store"
        trouble = _group_only(self.target) or not_here(host, self.target)
        if trouble is None and not os.access(self.target.config_file, os.W_OK):
            return f"{self.target.config_file} cannot be written"
        return trouble

    def undo(self) -> list[UndoStep]:
        restart = self.target.restart
        if not isinstance(restart, RestartRole) or "file" not in self.seen:
            return []  # unavailable() said so
        return [self.seen["file"], EndMarked(token=self.token), restart]

    def inject(self, host: Host) -> None:
        path = Path(self.target.config_file)
        said = yaml.safe_load(path.read_text())
        said[self.key] = self.value
        _end(self.target)
        path.write_text(yaml.safe_dump(said, sort_keys=False))
        restart = self.target.restart
        assert isinstance(restart, RestartRole)  # unavailable() said so
        try:
            restart.act(more_env={MARK: self.token})
        except LeftBehind:
            pass  # it refuses to start with it: that is one way to deal with it

    def verify(self, host: Host) -> Evidence:
        found = yaml.safe_load(Path(self.target.config_file).read_text()).get(self.key)
        must(found == self.value, f"{self.key} is {found!r} in its file")
        must(not is_running(self.target.leader), f"{self.target.name} still runs as it was started before")
        now = self._row()
        changed = {
            key: (self.seen["row"].get(key), now.get(key))
            for key in SHOWN
            if self.seen["row"].get(key) != now.get(key)
        }
        must(changed, f"kvops status says of {self.target.name} what it said before")
        shown = ", ".join(f"{key} {was} → {is_now}" for key, (was, is_now) in changed.items())
        return Evidence(
            signals=(
                Signal(
                    "/proc", f"pid {self.target.leader.pid} is gone, its file has {self.key}: {self.value!r}"
                ),
                Signal("kvops status", shown),
            ),
            control=control_is_well(self.control),
        )
