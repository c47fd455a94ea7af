"""A prefill node of a replay: a process of its own with an L2, a pool client and a modelled GPU."""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import socket
import sys
import traceback
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol, cast

from kvops.errors import ConfigError, KvopsError
from kvops.inference.channel import Done, Failed, Inbox, NodeConfig, Ready, Stop, Work, send
from kvops.inference.gpu_model import MODELS, GpuModel
from kvops.inference.pages import PageBook
from kvops.inference.tier import Fetched, HostTier, PoolLike, PrefetchPolicy, TierConfig
from kvops.store.model import Reason

RECEIVE_BYTES: Final = 1 << 16
BUG_EXIT_CODE: Final = 70
IN_FLIGHT: Final = "IN_FLIGHT"
"""A loss that is nobody's fault: another node was still computing the page when this one needed it."""
_PR_SET_PDEATHSIG: Final = 1  # prctl(2)


class PoolFactory(Protocol):
    """Makes a node's pool client from plain values: it crosses a process boundary by name."""

    def __call__(self, **options: object) -> PoolLike:
        """Connect; returns at once, with or without a pool."""


def connect_pool(**options: object) -> PoolLike:
    """Connect to a kvops pool; the options are those of ``kvops.connect``."""
    import kvops

    masters = options.pop("masters")
    connect = cast("Callable[..., PoolLike]", kvops.connect)
    return connect(masters, **options)


def load_factory(name: str) -> PoolFactory:
    """
    Find ``module:function``.

    Raises:
        ConfigError: There is no such thing.
    """
    module_name, _, attribute = name.partition(":")
    try:
        return cast("PoolFactory", getattr(importlib.import_module(module_name), attribute))
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"no pool factory {name}: {error}", fix="name it as module:function") from None


class PrefillNode:
    """
    Serves one request at a time: look up, read, "compute", write back.

    Bytes, look-ups and reads are real and measured. GPU time is virtual: it advances a clock, on which
    requests arrive at the trace's timestamps and wait while the GPU is busy. Reading begins when a request
    arrives, so it overlaps with that wait. Time to first token, exactly::

        ttft = lookup + read + queue + gpu

    where queue is the time from "the pages are there" to "the GPU is free", never negative.
    """

    def __init__(self, config: NodeConfig, pool: PoolLike) -> None:
        self._config = config
        self._pool = pool
        self._gpu: GpuModel = MODELS[config.model]
        self._gpu_free_ms = 0.0
        self._breakers: dict[str, str] = {}
        self._book = PageBook(config.page_bytes)
        tier = TierConfig(
            page_bytes=config.page_bytes,
            page_tokens=config.page_tokens,
            l2_pages=config.l2_pages,
            prefetch=PrefetchPolicy(config.prefetch),
            deadline_ms=config.deadline_ms,
            prefetch_ms_max=config.prefetch_ms_max,
        )
        self._tier = HostTier(pool, tier, wrong_bytes=self._book.wrong_bytes)

    def handle(self, work: Work) -> Done:
        """Serve one request."""
        keys = [f"{self._config.key_prefix}{block:x}" for block in work.hash_ids]
        fetched = self._tier.prefetch(keys, gpu_free_in_ms=self._gpu_free_ms - work.arrival_ms)
        hit_tokens = self._tokens(work, fetched.pages)
        ready_ms = work.arrival_ms + fetched.lookup_ms + fetched.read_ms
        start_ms = max(ready_ms, self._gpu_free_ms)
        gpu_ms = self._gpu.prefill_ms(input_tokens=work.input_tokens, cached_tokens=hit_tokens)
        self._gpu_free_ms = start_ms + gpu_ms
        # What a cache that forgets nothing would have had, and this one did not.
        lost_tokens = max(0, self._tokens(work, work.seen_pages) - hit_tokens)
        lost_reason = self._why(work, fetched, keys) if lost_tokens else ""
        written = self._tier.write_back(keys, fetched, compute=self._book.fill)
        return Done(
            index=work.index,
            l2_tokens=self._tokens(work, fetched.l2_pages),
            l3_tokens=hit_tokens - self._tokens(work, fetched.l2_pages),
            lost_tokens=lost_tokens,
            lost_reason=lost_reason,
            lookup_ms=fetched.lookup_ms,
            read_ms=fetched.read_ms,
            queue_ms=start_ms - ready_ms,
            gpu_ms=gpu_ms,
            ttft_ms=start_ms + gpu_ms - work.arrival_ms,
            write_ms=written.write_ms,
            pages_checked=fetched.pages_checked,
            pages_read=fetched.l3_pages,
            pages_stored=written.stored_pages,
            wrong_bytes=fetched.wrong_bytes,
            over_deadline=fetched.over_deadline + written.over_deadline,
            write_failures=written.failed_pages,
            breakers=self._changed_breakers(),
        )

    def _changed_breakers(self) -> dict[str, str]:
        health = self._pool.health()
        now: dict[str, str] = {
            name: str(health[name]["breaker"]) for name in ("master", "group") if name in health
        }
        now |= {str(store["name"]): str(store["breaker"]) for store in health.get("stores", ())}
        # A probe that fails is no news: half open counts as what it was before.
        settled = {name: state for name, state in now.items() if state in ("open", "closed")}
        changed = {
            name: state for name, state in settled.items() if self._breakers.get(name, "closed") != state
        }
        self._breakers |= settled
        return changed

    def _tokens(self, work: Work, pages: int) -> int:
        return min(pages * self._config.page_tokens, work.input_tokens)

    def _why(self, work: Work, fetched: Fetched, keys: list[str]) -> str:
        """One reason for all tokens a request lost: only a contiguous prefix counts, so the first gap costs
        the rest.
        """
        if fetched.stopped_by is not None:
            return fetched.stopped_by
        if fetched.pages >= work.settled_pages:
            return IN_FLIGHT
        reason = self._tier.why_absent(keys[fetched.pages])
        return IN_FLIGHT if reason is Reason.HIT else reason

    def close(self) -> None:
        """Close the pool client."""
        self._pool.close()


def die_with_parent(parent_pid: int) -> bool:
    """
    Ask the kernel to kill this process when the one that started it ends, however that ends.

    Returns:
        False when the parent has ended already.

    Source: prctl(2), PR_SET_PDEATHSIG. The signal comes when the *thread* that started us ends, so it must be
    a main thread.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent_pid


def serve(sock: socket.socket) -> int:
    """Be the engine at the other end of a replay's socket, until it says stop or goes away; returns the exit
    code.
    """
    inbox = Inbox()
    waiting: deque[Work] = deque()
    node: PrefillNode | None = None
    try:
        while True:
            while waiting and node is not None:
                send(sock, node.handle(waiting.popleft()))
            data = sock.recv(RECEIVE_BYTES)
            if not data:
                return 0
            for message in inbox.feed(data):
                match message:
                    case NodeConfig():
                        pool = load_factory(message.pool_factory)(**message.pool_options)
                        node = PrefillNode(message, pool)
                        send(sock, Ready(pid=os.getpid()))
                    case Work():
                        waiting.append(message)
                    case Stop():
                        return 0
                    case _:
                        raise AssertionError(f"an engine never gets {message}")
    except (BrokenPipeError, ConnectionResetError):
        return 0  # the replay has ended: nobody is left to answer
    except KvopsError as error:
        send(sock, Failed(what=error.what, fix=error.fix, exit_code=error.exit_code, trace=""))
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - whatever it is, the replay must hear of it rather than of a closed socket
        fix = "report it with the traceback: this is a bug"
        what = f"{type(error).__name__}: {error}"
        send(sock, Failed(what=what, fix=fix, exit_code=BUG_EXIT_CODE, trace=traceback.format_exc()))
        return BUG_EXIT_CODE
    finally:
        if node is not None:
            node.close()


def main() -> int:
    """Entry of the child process: ``python -m kvops.inference.engine FD PARENT_PID``."""
    descriptor, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    if not die_with_parent(parent_pid):
        return 0
    with socket.socket(fileno=descriptor) as sock:
        return serve(sock)


if __name__ == "__main__":
    sys.exit(main())
