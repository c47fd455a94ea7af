"""The life of a group on this machine."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvops.errors import AlreadyRunning, Refused, Unreachable, UsageError
from kvops.files import write_yaml
from kvops.fleet import etcd, preflight
from kvops.fleet.bring_up import BringUp, Tell
from kvops.fleet.group_folder import GroupFolder
from kvops.fleet.group_state import GroupState, Member
from kvops.fleet.process import send_signal, wait_ended
from kvops.fleet.programs import Command, serve_command
from kvops.fleet.start_plan import StartPlan
from kvops.fleet.take_down import TERM_GRACE_S, Stopped, take_down
from kvops.signals import signals_held
from kvops.timestamps import utc_now

if TYPE_CHECKING:
    from kvops.store.config import MasterConfig, StoreConfig

ETCD_TTL_S: Final = 2  # of a leader's lease in an etcd that is not ours: its election takes a second
UNDO_GRACE_S: Final = 3.0  # from SIGTERM to SIGKILL when a start failed: nobody uses these processes yet


class LocalGroup(GroupFolder):
    """One group under one state folder: its files, and its processes. Methods that change it take its lock."""

    def __init__(self, state_dir: Path, name: str, *, command: Command = serve_command) -> None:
        """
        Name a group; nothing is read or made yet.

        Raises:
            UsageError: No group can have this name.
        """
        super().__init__(state_dir, name)
        self._command = command

    def start(self, plan: StartPlan, *, timeout_s: float, tell: Tell = lambda name, text: None) -> GroupState:
        """
        Start every member and return when all are ready. On any trouble, Ctrl-C included, all are stopped
        again.

        Raises:
            AlreadyRunning: Members of this group run.
            Refused: A limit, or an address in use, is in the way.
            StartFailed: A member ended.
            Unreachable: A member was not ready in time.
        """
        with self.lock():
            former = self.read()
            running = [member.name for member in former.members if member.running] if former else []
            if running:
                missing = [member.name for member in former.members if not member.running] if former else []
                stop = f"stop it first: {self.kvops} stop"
                raise AlreadyRunning(
                    f"group {self.name} runs already: {', '.join(running)}",
                    fix=f"start what is missing: {self.kvops} restart {' '.join(missing)}; or {stop}"
                    if missing
                    else stop,
                )
            self._preflight(plan)
            self.prepare()
            state = GroupState(
                group=self.name,
                placement=plan.placement,
                transports=list(plan.transports),
                segment_size_bytes=plan.segment_size_bytes,
                started=utc_now(),
                huge_page_bytes=plan.huge_page_bytes,
                members=plan.members(),
            )
            self.write(state)
            up = self._bring_up(timeout_s, tell)
            with self._undone_on_trouble():
                endpoints = list(plan.etcd) or self._write_etcd_configs(state)
                state = up.start(state, state.named("etcd"))
                for number, name in enumerate(state.named("master")):
                    write_yaml(self.config_file(name), self._master_config(plan, name, number, endpoints))
                state = up.start(state, state.named("master"))
                for member in state.members:
                    if member.role == "store":
                        write_yaml(self.config_file(member.name), self._store_config(plan, state, member))
                return up.start(state, state.named("store"))

    def restart(
        self,
        names: Sequence[str],
        *,
        timeout_s: float,
        now: bool = False,
        tell: Tell = lambda name, text: None,
    ) -> GroupState:
        """
        Stop members (all when none is named) and start them again as they were; ended ones are just started.

        The master keeps its addresses, so that clients find it again. Members that were not named keep
        running, whatever happens.

        Raises:
            UsageError: No such member.
            StartFailed: One ended while starting; those named are stopped then.
        """
        with self.lock():
            state = self.require()
            chosen = [state.member(name) for name in names] or state.members
            take_down(self, state, chosen, now=now, tell=tell)
            state = self.require()
            up = self._bring_up(timeout_s, tell)
            self.prepare()
            with self._undone_on_trouble(only=[member.name for member in chosen]):
                for role in ("etcd", "master", "store"):
                    some = [member.name for member in chosen if member.role == role]
                    if some:
                        state = up.start(state, some)
            return state

    def restart_steps(self, members: Sequence[Member], *, now: bool = False) -> list[str]:
        """Exactly what ``restart`` would do to these members, one line a step."""
        verb = "SIGKILL" if now else "SIGTERM"
        return [
            f"send {verb} to {one.name} (pid {one.pid}) and wait for its end"
            for one in members
            if one.running
        ] + [
            f"run {one.role} with {self.config_file(one.name)} and wait until it is ready" for one in members
        ]

    def stop(
        self, *, now: bool = False, grace_s: float = TERM_GRACE_S, tell: Tell = lambda name, text: None
    ) -> list[Stopped]:
        """
        End every member: stores first, then masters, each asked (SIGTERM) and after ``grace_s`` made to
        (SIGKILL).

        ``now`` kills them at once. Stopping what does not run is a success that does nothing.

        Raises:
            LeftBehind: A process did not end even when killed.
        """
        if self.read() is None:
            return []
        with self.lock():
            state = self.read()
            if state is None:
                return []
            stopped = take_down(self, state, state.members, now=now, grace_s=grace_s, tell=tell)
            self.remove_sockets()
            return stopped

    def forget(self) -> None:
        """
        Remove what is known of a group that does not run: state, logs, secret.

        Raises:
            Refused: A member runs.
        """
        if not self.folder.exists():
            return
        with self.lock():
            state = self.read()
            running = [member.name for member in state.members if member.running] if state else []
            if running:
                raise Refused(f"{', '.join(running)} of group {self.name} runs", fix=f"{self.kvops} stop")
            shutil.rmtree(self.folder, ignore_errors=True)

    def act(self, action: str, name: str, *, timeout_s: float = 60.0) -> str:
        """
        Do something to one member, as events of a replay do; returns what was done.

        Args:
            action: ``kill`` (SIGKILL), ``stop`` (SIGTERM), ``pause``, ``resume``, ``start``.
            name: The member.
            timeout_s: How long a start may take.

        Raises:
            UsageError: No such action or member.
            Unreachable: It does not run.
        """
        signals = {
            "kill": signal.SIGKILL,
            "stop": signal.SIGTERM,
            "pause": signal.SIGSTOP,
            "resume": signal.SIGCONT,
        }
        member = self.require().member(name)
        if action == "start":
            if member.running:
                return f"{name} runs already (pid {member.pid})"
            started = self.restart([name], timeout_s=timeout_s).member(name)
            return f"{name} started (pid {started.pid})"
        if action not in signals:
            raise UsageError(f"{action!r} is not an action", fix=f"use {', '.join([*signals, 'start'])}")
        identity = member.identity
        if identity is None or not send_signal(identity, signals[action]):
            raise Unreachable(f"{name} does not run", fix=f"start it: {self.kvops} restart {name}")
        if action in ("kill", "stop"):
            wait_ended([identity], timeout_s=TERM_GRACE_S)  # collects it, when it is a child of ours
        return f"{name} got {signals[action].name} (pid {member.pid})"

    def steps(self, plan: StartPlan) -> list[str]:
        """Exactly what ``start`` would do, one line a step."""
        steps = [f"make {self.folder} (mode 0700)", f"make {self.runtime_dir()} (mode 0700) for sockets"]
        if not self.secret_file.exists():
            steps.append(f"write {self.secret_file} (mode 0600): 32 random bytes")
        for member in plan.members():
            config_file = self.config_file(member.name)
            steps.append(f"write {config_file}")
            steps.append(f"run   {shlex.join(self._command(member.role, config_file))}")
            steps.append(f"wait  until {member.name} is ready; log in {self.log_file(member.name)}")
        return steps

    # Pieces of the above; the lock is held

    def _preflight(self, plan: StartPlan) -> None:
        plan.check()
        if plan.etcd_members:
            etcd.program()
        preflight.refuse(plan.findings())

    def _bring_up(self, timeout_s: float, tell: Tell) -> BringUp:
        return BringUp(self, command=self._command, deadline=time.monotonic() + timeout_s, tell=tell)

    def _write_etcd_configs(self, state: GroupState) -> list[str]:
        """Configure an etcd of our own, empty at every start; its endpoints."""
        names = state.named("etcd")
        folders = [self.member_folder(name) for name in names]
        for folder in folders:
            shutil.rmtree(folder / "data", ignore_errors=True)
        token = f"{self.name}-{os.urandom(6).hex()}"
        configurations = etcd.configurations(
            names,
            [folder / "data" for folder in folders],
            token=token,
            addresses=[self._etcd_address(name) for name in names],
        )
        for name, configuration in zip(names, configurations, strict=True):
            write_yaml(self.config_file(name), configuration)
        return [etcd.endpoint(configuration) for configuration in configurations]

    def _etcd_address(self, name: str) -> str:
        """Where a member of an etcd of ours listens."""
        return "127.0.0.1"

    def _master_config(
        self, plan: StartPlan, name: str, number: int, endpoints: Sequence[str]
    ) -> MasterConfig:
        from kvops.store.config import MasterConfig
        from kvops.store.model import PlacementPolicy

        return MasterConfig(
            group=self.name,
            name=name,
            host=f"host-{number}",
            secret_file=str(self.secret_file.absolute()),
            state_dir=str(self.member_folder(name)),
            listen=plan.master_address("listen", number),
            control=plan.master_address("control", number),
            http=plan.master_address("http", number),
            unix_path=str(self.runtime_dir() / f"{name}.sock"),
            placement=PlacementPolicy(plan.placement),
            etcd=list(endpoints),
            etcd_ttl_s=plan.etcd_ttl_s or (etcd.LEASE_TTL_S if plan.etcd_members else ETCD_TTL_S),
            etcd_ca=plan.etcd_ca,
            etcd_cert=plan.etcd_cert,
            etcd_key=plan.etcd_key,
            etcd_user=plan.etcd_user,
            etcd_password_file=plan.etcd_password_file,
        )

    def _store_config(self, plan: StartPlan, state: GroupState, member: Member) -> StoreConfig:
        from kvops.store.config import StoreConfig

        masters = [other.addresses["listen"] for other in state.members if other.role == "master"]
        return StoreConfig(
            group=self.name,
            name=member.name,
            host=member.host,
            numa_node=member.numa_node,
            numa_bind=bool(plan.numa_nodes),
            huge_page_bytes=plan.huge_page_bytes,
            masters=masters,
            secret_file=str(self.secret_file.absolute()),
            state_dir=str(self.member_folder(member.name)),
            listen=f"{plan.store_host}:0",
            http=f"{plan.http.rpartition(':')[0]}:0",
            unix_path=str(self.runtime_dir() / f"{member.name}.sock"),
            segment_size_bytes=plan.segment_size_bytes,
            transports=list(plan.transports),
        )

    @contextmanager
    def _undone_on_trouble(self, *, only: Sequence[str] | None = None) -> Iterator[None]:
        """Stop what was started (``only`` these members) when the block does not end well."""
        try:
            yield
        except BaseException:
            with signals_held():  # a second Ctrl-C must not leave processes behind
                state = self.read()
                if state is not None:
                    some = [member for member in state.members if only is None or member.name in only]
                    take_down(self, state, some, grace_s=UNDO_GRACE_S, tell=lambda name, text: None)
            raise
