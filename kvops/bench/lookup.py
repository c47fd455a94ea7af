"""Lookups over the wire: presence alone, and location with a lease; by batch, by objects, by client processes."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import kvops
from kvops.bench.model import Effort, Params, Result, Tell, percentile
from kvops.bench.pool import Child, paper_key, paper_pool, together

OPERATIONS: Final = ("exists", "locate")
DRAWN_MAX: Final = 1 << 20  # keys a client draws before it starts, then takes again and again
DEADLINE_MS: Final = 5_000  # a lookup that takes longer ends the benchmark
READY_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    objects: tuple[int, ...] = (50_000, 1_000_000)
    batches: tuple[int, ...] = (1, 32, 128, 1_000)
    clients: tuple[int, ...] = (1, 2, 4)
    run_s: float = 0.7

    @classmethod
    def of(cls, effort: Effort) -> Plan:
        """The plan for an effort."""
        return cls(objects=(50_000,), batches=(1, 32), clients=(1,), run_s=0.2) if effort.quick else cls()


class Actor:
    """A client process: closed loops of lookups of random keys, one call in flight."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._objects: int = config.pop("objects")
        self._rng = random.Random(config.pop("seed"))
        self._pool = kvops.connect(config.pop("masters"), deadline_ms=DEADLINE_MS, **config)
        self._keys: list[str] = []

    def ready(self) -> dict[str, Any]:
        """Draw the keys; as many different ones as there are objects, so that nothing stays in a cache."""
        drawn = (self._rng.randrange(self._objects) for _ in range(DRAWN_MAX))
        self._keys = [paper_key("bench", number) for number in drawn]
        return {}

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """One run: {operation, batch, run_s} → {keys_per_s, p50_us, p99_us, missed}."""
        call: Callable[[list[str]], Any] = getattr(
            self._pool, {"exists": "batch_exists", "locate": "locate"}[question["operation"]]
        )
        keys, batch = self._keys, question["batch"]
        clock = time.perf_counter
        times: list[float] = []
        began_cpu = time.process_time()
        answer = None
        at = self._rng.randrange(len(keys))
        began = now = clock()
        end = began + question["run_s"]
        while now < end:
            at = at + batch if at + 2 * batch <= len(keys) else 0
            asked = keys[at : at + batch]
            sent = clock()
            answer = call(asked)
            now = clock()
            times.append(now - sent)
        cpu_s = time.process_time() - began_cpu
        missed = answer.count(False) if isinstance(answer, list) else int((answer["store"] == 0).sum())  # type: ignore[index]
        calls = len(times)
        times.sort()
        return {
            "keys_per_s": calls * batch / (now - began),
            "p50_us": percentile(times, 0.50) * 1e6,
            "p99_us": percentile(times, 0.99) * 1e6,
            "cpu_us": cpu_s / calls * 1e6,
            "missed": missed,
        }


def run(effort: Effort, tell: Tell) -> None:
    """Measure, and tell each figure."""
    plan = Plan.of(effort)
    for objects in plan.objects:
        with paper_pool(objects) as pool:
            clients = [
                pool.child(f"client-{number}", "lookups", pool.client_config(objects=objects, seed=number))
                for number in range(max(plan.clients))
            ]
            for client in clients:
                client.hear(READY_TIMEOUT_S)
            _measure(plan, effort.runs, objects, clients, pool.master, tell)


def _measure(plan: Plan, runs: int, objects: int, clients: list[Child], master: Child, tell: Tell) -> None:
    together(clients, READY_TIMEOUT_S, operation="locate", batch=32, run_s=0.05)  # connections, warm code
    cases = list(itertools.product(OPERATIONS, plan.batches, plan.clients))
    figures: dict[tuple[str, int, int], list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(runs):  # each case once a round: what the machine does meanwhile spreads over all of them
        for operation, batch, count in cases:
            cpu = master.cpu_s()
            answers = together(
                clients[:count], READY_TIMEOUT_S, operation=operation, batch=batch, run_s=plan.run_s
            )
            assert not any(answer["missed"] for answer in answers), "every key is there"
            rate = sum(answer["keys_per_s"] for answer in answers)
            calls = rate / batch * plan.run_s
            figures[operation, batch, count].append(
                {
                    "keys_per_s": rate,
                    "p50": max(answer["p50_us"] for answer in answers),
                    "p99": max(answer["p99_us"] for answer in answers),
                    "cpu_client": max(answer["cpu_us"] for answer in answers),
                    "cpu_master": (master.cpu_s() - cpu) / calls * 1e6,
                }
            )
    for (operation, batch, count), rows in figures.items():
        params: Params = {"operation": operation, "batch": batch, "objects": objects, "clients": count}
        for name, unit in (
            ("keys_per_s", "keys/s"),
            ("p50", "µs"),
            ("p99", "µs"),
            ("cpu_client", "µs"),
            ("cpu_master", "µs"),
        ):
            tell(Result(name=f"lookup.{name}", unit=unit, params=params, runs=[row[name] for row in rows]))
