"""The load of an experiment: client processes that all begin a stretch of requests at one moment."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from kvops.chaos.client import ClientSpec, now_ns
from kvops.chaos.experiment import PoolSpec, Workload, seconds, size_bytes
from kvops.chaos.history import Arm
from kvops.chaos.pool import engine_names, group_names, logical_hosts
from kvops.chaos.profiles import schedule
from kvops.errors import ConfigError, Unreachable
from kvops.fleet.programs import daemon_environment
from kvops.signals import signals_held

READY_TIMEOUT_S: Final = 60.0
LEAD_S: Final = 0.3  # from "go" to the first moment: every client has read it by then
STOP_TIMEOUT_S: Final = 3.0
TAIL_S: Final = 5.0  # after its last request a client may still write back, for so long


@dataclass(slots=True)
class Client:
    """One client process."""

    spec: ClientSpec
    process: subprocess.Popen[bytes]
    log: IO[bytes]

    def last_words(self) -> str:
        """The end of what it wrote to standard error."""
        try:
            lines = Path(self.log.name).read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return lines[-1] if lines else "it said nothing"


@dataclass(slots=True)
class Stretch:
    """One arm of one block, under way."""

    arm: Arm
    block: int
    seed: int
    warmup_s: float
    window_s: float
    clients: list[Client]
    start_ns: int = 0  # of the stretch; the window begins after the warm-up
    histories: list[Path] = field(default_factory=list)

    @property
    def window_start_ns(self) -> int:
        """When what happens begins to count."""
        return self.start_ns + round(self.warmup_s * 1e9)

    @property
    def window_end_ns(self) -> int:
        """When it ends to count."""
        return self.window_start_ns + round(self.window_s * 1e9)

    def go(self) -> None:
        """All clients begin, at one moment a little from now."""
        self.start_ns = now_ns() + round(LEAD_S * 1e9)
        for client in self.clients:
            assert client.process.stdin is not None
            try:
                client.process.stdin.write(f"go {self.start_ns}\n".encode())
                client.process.stdin.flush()
            except OSError as error:
                raise Unreachable(
                    f"client {client.spec.name} ended before the load began: {client.last_words()}",
                    fix="check the machine's free memory",
                ) from error

    def dead(self) -> list[str]:
        """Names of clients that have ended with trouble."""
        return [one.spec.name for one in self.clients if one.process.poll() not in (None, 0)]

    def finish(self) -> list[str]:
        """
        Wait until every client has ended by itself; they do when their requests are done.

        Returns:
            Names of those that had requests in hand long after the window, and were told to stop: what they had
            is on record as never answered.

        Raises:
            Unreachable: One died.
        """
        late: list[str] = []
        left_ns = self.window_end_ns - now_ns()
        deadline = time.monotonic() + max(0.0, left_ns / 1e9) + TAIL_S + STOP_TIMEOUT_S
        for client in self.clients:
            try:
                code = client.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                late.append(client.spec.name)
                client.process.terminate()
                try:
                    code = client.process.wait(STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    client.process.kill()
                    client.process.wait()
                    continue
            if code:
                raise Unreachable(
                    f"client {client.spec.name} ended with {code}: {client.last_words()}",
                    fix="look for what ended it: a full disk, or the kernel (out of memory)",
                )
        return late


@contextmanager
def stretch(
    pool: PoolSpec,
    workload: Workload,
    *,
    arm: Arm,
    block: int,
    window_s: float,
    folder: Path,
    options: Mapping[str, Mapping[str, Any]],
    pool_factory: str = "",
) -> Iterator[Stretch]:
    """
    Start the clients of one stretch and wait until they are ready; none is left afterwards.

    Args:
        pool: Whose groups and engines.
        workload: What they do.
        arm: Under which name; ``cache-off`` leaves the pool out.
        block: From 0; the same block has the same requests in every arm.
        window_s: How long to judge, after the warm-up.
        folder: Of the histories.
        options: Of each group's pool clients.
        pool_factory: Another way to make a pool client, as ``module:function``.

    Raises:
        Unreachable: A client was not ready in time.
    """
    seed = workload.seed * 1_000 + block
    warmup_s = seconds(workload.warmup)
    one = Stretch(arm=arm, block=block, seed=seed, warmup_s=warmup_s, window_s=window_s, clients=[])
    try:
        for spec in client_specs(
            pool,
            workload,
            arm=arm,
            block=block,
            seed=seed,
            duration_s=warmup_s + window_s,
            folder=folder,
            options=options,
            pool_factory=pool_factory,
        ):
            one.histories.append(Path(spec.history))
            with signals_held():  # a process that runs and is not in the list would be left behind
                one.clients.append(_spawn(spec, folder))
        _wait_ready(one.clients)
        yield one
    finally:
        _end(one.clients)


def client_specs(
    pool: PoolSpec,
    workload: Workload,
    *,
    arm: Arm,
    block: int,
    seed: int,
    duration_s: float,
    folder: Path,
    options: Mapping[str, Mapping[str, Any]],
    pool_factory: str = "",
) -> list[ClientSpec]:
    """What each client of a stretch is told."""
    # A pool that was there before may hold what a former run put under the same names.
    run = f"{folder.name}/" if pool.running else ""
    page_bytes = size_bytes(workload.page_size)
    l2_pages = size_bytes(workload.l2_size) // page_bytes
    deadline_ms = round(seconds(workload.deadline) * 1000)
    hosts = logical_hosts(pool)
    specs: list[ClientSpec] = []
    for number, group in enumerate(group_names(pool)):
        plan = schedule(
            workload.profile,
            rps=workload.rps,
            duration_s=duration_s,
            engines=pool.engines,
            l2_pages=l2_pages,
            seed=seed + 500_000 * number,
            prefix=f"{group}-",
        )
        names = engine_names(pool, group)
        for index, name in enumerate(names):
            factory = {"pool_factory": pool_factory} if pool_factory else {}
            specs.append(
                ClientSpec(
                    name=name,
                    group=group,
                    host=hosts[index % len(hosts)],
                    arm=arm,
                    block=block,
                    history=str(folder / f"{arm.value}-{block}-{name}.jsonl"),
                    plan=[one for one in plan if one.engine == index],
                    warmup_s=seconds(workload.warmup),
                    duration_s=duration_s,
                    seed=seed,
                    key_prefix=f"{run}{arm.value}/{block}/{group}/",
                    page_bytes=page_bytes,
                    l2_pages=l2_pages,
                    deadline_ms=deadline_ms,
                    budget_ms=seconds(workload.budget) * 1000,
                    register_rps=workload.register_rps,
                    peers=[other for other in names if other != name],
                    pool_options={**options.get(group, {}), "deadline_ms": deadline_ms},
                    without_pool=arm is Arm.CACHE_OFF,
                    **factory,
                )
            )
    return specs


def _spawn(spec: ClientSpec, folder: Path) -> Client:
    spec_file = folder / f"{spec.arm.value}-{spec.block}-{spec.name}.spec"
    try:
        spec_file.write_bytes(msgspec.json.encode(spec))
        log = spec_file.with_suffix(".err").open("wb")
    except OSError as error:
        raise ConfigError(f"cannot write {spec_file}: {error.strerror}", fix="make room for runs") from error
    env = daemon_environment() | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    # A session of its own: Ctrl-C reaches the runner alone, which then undoes before it lets clients go.
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "kvops.chaos.client", str(spec_file), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env=env,
        start_new_session=True,
    )
    return Client(spec=spec, process=process, log=log)


def _wait_ready(clients: list[Client]) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    waiting = {one.process.stdout.fileno(): one for one in clients if one.process.stdout is not None}
    poll = select.poll()
    for handle in waiting:
        poll.register(handle, select.POLLIN)
    while waiting:
        left_ms = max(0.0, deadline - time.monotonic()) * 1000
        ready = poll.poll(left_ms)
        if not ready:
            names = ", ".join(one.spec.name for one in waiting.values())
            raise Unreachable(f"clients {names} were not ready in time", fix="use fewer engines")
        for handle, _ in ready:
            client = waiting.pop(handle)
            poll.unregister(handle)
            if os.read(handle, 64) != b"ready\n":
                raise Unreachable(
                    f"client {client.spec.name} did not start: {client.last_words()}",
                    fix="check the machine's free memory",
                )


def _end(clients: list[Client]) -> None:
    for client in clients:
        if client.process.poll() is None:
            client.process.terminate()
    until = time.monotonic() + STOP_TIMEOUT_S
    for client in clients:
        try:
            client.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            client.process.kill()
            client.process.wait()
        for stream in (client.process.stdin, client.process.stdout, client.log):
            if stream is not None:
                try:
                    stream.close()
                except OSError:
                    pass  # its other end is gone: what was buffered is of no use to anybody


def main_thread() -> bool:
    """Clients die with the thread that started them, so that must be the main one: prctl(2)."""
    return threading.current_thread() is threading.main_thread()
