"""The tier: L2 over the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvops.errors import Refused
from kvops.inference.pages import PageBook
from kvops.inference.tier import BATCH_PAGES, Fetched, HostTier, PrefetchPolicy, TierConfig
from kvops.store.model import Outcome, Reason

from .pools import MemoryPool

PAGE = 64
BOOK = PageBook(PAGE)


class Clock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def tier_over(
    pool: MemoryPool, *, l2_pages: int = 8, clock: Callable[[], float] | None = None, **more: Any
) -> HostTier:
    config = TierConfig(page_bytes=PAGE, page_tokens=512, l2_pages=l2_pages, **more)
    return HostTier(pool, config, wrong_bytes=BOOK.wrong_bytes, clock=clock or Clock())


def serve(tier: HostTier, keys: Sequence[str]) -> Fetched:
    fetched = tier.prefetch(keys)
    tier.write_back(keys, fetched, compute=BOOK.fill)
    return fetched


def keys_of(text: str) -> list[str]:
    """Keys of a prefix chain: each stands for all before it."""
    return [text[: i + 1] for i in range(len(text))]


def test_more_memory_than_there_is() -> None:
    """An L2 that the machine cannot give is refused, with what to do."""
    with pytest.raises(Refused, match="host memory") as caught:
        tier_over(MemoryPool(), l2_pages=1 << 50)
    assert caught.value.fix


def test_computed_pages_come_back_from_l2_then_from_the_pool() -> None:
    """
    The same node has them in its host memory, another one gets them from the pool; nobody computes twice.
    """
    pool = MemoryPool()
    first, other = tier_over(pool), tier_over(pool)

    assert serve(first, keys_of("abc")).pages == 0
    again = serve(first, keys_of("abcd"))
    elsewhere = serve(other, keys_of("abcde"))

    assert (again.l2_pages, again.l3_pages) == (3, 0)
    assert (elsewhere.l2_pages, elsewhere.l3_pages) == (0, 4)


def test_only_the_contiguous_prefix_counts() -> None:
    """A page that fails to arrive costs all behind it, and its reason is the loss's reason."""
    pool = MemoryPool()
    serve(tier_over(pool), keys_of("abcde"))
    pool.get_reasons["abc"] = Reason.STORE_DOWN
    tier = tier_over(pool)

    fetched = tier.prefetch(keys_of("abcde"))

    assert (fetched.l3_pages, fetched.stopped_by) == (2, Reason.STORE_DOWN)
    assert len(tier) == 2


def test_a_page_with_wrong_bytes_is_counted_and_never_used() -> None:
    """Bytes that a pool calls a hit are compared with what the key demands: a wrong one ends the prefix."""
    pool = MemoryPool()
    serve(tier_over(pool), keys_of("abc"))
    pool.objects["ab"] = pool.objects["a"]

    fetched = tier_over(pool).prefetch(keys_of("abc"))

    assert (fetched.pages, fetched.stopped_by, fetched.pages_checked) == (1, Reason.CORRUPT, 3)
    assert fetched.wrong_bytes >= PAGE // 8


def test_memory_written_after_a_read_returned_is_noticed() -> None:
    """A late write into a page of L2 is found at its next use, and that page is made anew."""
    pool = MemoryPool()
    buffers: list[memoryview] = []

    class Late(MemoryPool):
        def batch_get_into(self, keys: Any, given: Any, **more: Any) -> list[Outcome]:
            buffers.extend(given)
            return super().batch_get_into(keys, given, **more)

    late = Late()
    late.objects = pool.objects
    serve(tier_over(pool), keys_of("abc"))
    tier = tier_over(late)
    serve(tier, keys_of("abc"))

    buffers[1][5] ^= 0xFF
    damaged = serve(tier, keys_of("abc"))

    assert (damaged.l2_pages, damaged.wrong_bytes, damaged.stopped_by) == (1, 1, Reason.CORRUPT)
    assert serve(tier, keys_of("abc")).l2_pages == 3


def test_what_the_pool_lost_is_given_back_from_l2() -> None:
    """Pages that died with a store return when a node that still holds them uses them, and count as used."""
    pool = MemoryPool()
    tier = tier_over(pool)
    serve(tier, keys_of("abc"))
    del pool.objects["a"], pool.objects["ab"]
    pool.touched.clear()

    fetched = tier.prefetch(keys_of("abc"))
    written = tier.write_back(keys_of("abc"), fetched, compute=BOOK.fill)

    assert written.stored_pages == 2
    assert tier_over(pool).prefetch(keys_of("abc")).l3_pages == 3
    assert pool.touched == keys_of("abc")


def test_the_least_recently_used_page_goes_first_and_the_deepest_of_a_chain_before_its_prefix() -> None:
    """L2 keeps what is used, and of one request the part that is of use by itself."""
    tier = tier_over(MemoryPool(), l2_pages=4)
    serve(tier, keys_of("ab"))
    serve(tier, keys_of("xy"))
    serve(tier, keys_of("ab"))

    serve(tier, ["q"])

    assert tier.prefetch(keys_of("ab")).l2_pages == 2
    assert tier.prefetch(keys_of("xy")).l2_pages == 1


def test_a_request_longer_than_l2_keeps_its_start() -> None:
    """Pages deeper than the whole L2 never push out their own prefix."""
    tier = tier_over(MemoryPool(), l2_pages=3)

    serve(tier, keys_of("abcdef"))

    again = tier.prefetch(keys_of("abcdef"))
    assert (again.l2_pages, again.l3_pages) == (3, 3)


@pytest.mark.parametrize("reason", [Reason.BREAKER_OPEN, Reason.TIMEOUT, Reason.NO_SPACE])
def test_a_pool_that_takes_nothing_costs_one_call_a_request(reason: Reason) -> None:
    """After a batch of which nothing was stored the rest of the request is not tried; L2 serves on."""
    pool = MemoryPool()
    pool.put_reason = reason
    tier = tier_over(pool, l2_pages=300)
    keys = [f"k{i}" for i in range(2 * BATCH_PAGES + 5)]

    fetched = tier.prefetch(keys)
    written = tier.write_back(keys, fetched, compute=BOOK.fill)

    assert written.failed_pages == {reason: BATCH_PAGES}
    assert tier.prefetch(keys).l2_pages == len(keys)


class SlowPool(MemoryPool):
    """Each read takes a fixed time, on the test's clock."""

    def __init__(self, clock: Clock, read_s: float) -> None:
        super().__init__()
        self.clock = clock
        self.read_s = read_s
        self.deadlines: list[int | None] = []

    def batch_get_into(self, keys: Any, buffers: Any, *, deadline_ms: int | None = None) -> list[Outcome]:
        self.deadlines.append(deadline_ms)
        self.clock.now_s += self.read_s
        return super().batch_get_into(keys, buffers, deadline_ms=deadline_ms)


@pytest.mark.parametrize(
    ("policy", "gpu_free_in_ms", "batches"),
    [
        (
            PrefetchPolicy.TIMEOUT,
            0.0,
            2,
        ),  # 200 ms + 10 ms for each 1,024 of 197,120 tokens, but at most 1,000 ms
        (PrefetchPolicy.WAIT_COMPLETE, 0.0, 4),
        (PrefetchPolicy.BEST_EFFORT, 0.0, 0),
        (PrefetchPolicy.BEST_EFFORT, 700.0, 2),
    ],
)
def test_the_prefetch_policy_decides_how_long_a_request_waits(
    policy: PrefetchPolicy, gpu_free_in_ms: float, batches: int
) -> None:
    """What landed in time is used; the rest is given up with TIMEOUT; no call gets more time than is left."""
    clock = Clock()
    pool = SlowPool(clock, read_s=0.6)
    keys = [f"k{i}" for i in range(3 * BATCH_PAGES + 1)]
    serve(tier_over(pool, l2_pages=0), keys)

    fetched = tier_over(pool, l2_pages=0, clock=clock, prefetch=policy).prefetch(
        keys, gpu_free_in_ms=gpu_free_in_ms
    )

    assert fetched.l3_pages == min(batches * BATCH_PAGES, len(keys))
    assert fetched.stopped_by is (None if batches == 4 else Reason.TIMEOUT)
    assert len(pool.deadlines) == batches
    assert pool.deadlines == sorted(pool.deadlines, reverse=True)  # type: ignore[type-var]


def test_a_call_far_over_its_deadline_is_counted() -> None:
    """The pool promises to return by the deadline: a call that did not shows, even if all pages arrived."""
    clock = Clock()
    pool = SlowPool(clock, read_s=0.3)
    serve(tier_over(pool), keys_of("abc"))

    fetched = tier_over(pool, clock=clock, prefetch_ms_max=220).prefetch(keys_of("abc"))

    assert (fetched.l3_pages, fetched.over_deadline, round(fetched.read_ms)) == (3, 1, 300)


def test_the_reason_of_an_absent_page_is_the_pools_own() -> None:
    """A look-up only says how many; asked again for one page, the pool says why it is not there."""
    pool = MemoryPool()
    tier = tier_over(pool)

    assert tier.why_absent("a") is Reason.MISS
    pool.get_reasons["a"] = Reason.MASTER_DOWN
    assert tier.why_absent("a") is Reason.MASTER_DOWN


@given(
    chains=st.lists(st.text("ab", min_size=1, max_size=7), min_size=1, max_size=25),
    l2_pages=st.integers(0, 6),
    lost=st.sets(st.integers(0, 24)),
)
@settings(max_examples=150)
def test_any_mix_of_requests_is_served_right(chains: list[str], l2_pages: int, lost: set[int]) -> None:
    """
    Whatever shares what, and whatever the pool forgets between requests, hits are exactly what L2 and
    pool have of the contiguous prefix, never a byte is wrong, L2 stays within its size and no row of
    memory is lost.
    """
    pool = MemoryPool()
    tier = tier_over(pool, l2_pages=l2_pages)
    computed: set[str] = set()
    for number, chain in enumerate(chains):
        if number in lost:
            pool.objects.clear()
        keys = keys_of(chain)
        fetched = serve(tier, keys)

        assert fetched.wrong_bytes == 0
        assert all(key in computed for key in keys[: fetched.pages])
        if not lost:
            assert fetched.pages == sum(key in computed for key in keys)
        computed.update(keys)
        assert len(tier) <= l2_pages
        assert set(keys) <= pool.objects.keys()
    rows = [*tier._free, *tier._l2.values()]
    assert sorted(rows) == list(range(l2_pages + BATCH_PAGES))


@pytest.mark.parametrize(("page_bytes", "pages"), [(64, 128), (4 << 20, 16), (1 << 30, 1)])
def test_a_batch_is_bounded_in_bytes(page_bytes: int, pages: int) -> None:
    """Large pages go in smaller batches: what a node holds beside its L2 stays within 64 MiB, or one page."""
    assert TierConfig(page_bytes=page_bytes, page_tokens=512, l2_pages=0).batch_pages == pages
