"""The load: the same seed gives twins, and engines share it evenly."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from kvops.chaos.experiment import PoolSpec, Workload
from kvops.chaos.history import Arm
from kvops.chaos.profiles import PROFILES, schedule
from kvops.chaos.soak import Soak
from kvops.chaos.workload import client_specs


def test_the_same_seed_gives_the_same_requests() -> None:
    """Twins in two arms are the same prompt at the same moment on the same engine; another seed gives others."""
    one, again, other = (
        schedule("agentic-prefix", rps=20, duration_s=10, engines=3, l2_pages=0, seed=seed)
        for seed in (7, 7, 8)
    )

    assert one == again
    assert one != other


def test_profiles_are_even_and_reuse_prefixes() -> None:
    """Every engine has work, most blocks were computed before, and arrivals are in order."""
    for name in PROFILES:
        planned = schedule(name, rps=20, duration_s=20, engines=3, l2_pages=0, seed=7)
        share = Counter(one.engine for one in planned)

        assert set(share) == {0, 1, 2}
        assert min(share.values()) > 0.2 * len(planned)
        assert [one.at_s for one in planned] == sorted(one.at_s for one in planned)
        assert sum(one.seen_blocks for one in planned) > 0.2 * sum(len(one.hash_ids) for one in planned)


def test_arms_differ_in_nothing_but_their_keys(tmp_path: Path) -> None:
    """Two arms of one block plan the same requests, under key prefixes that never meet."""
    specs = {
        arm: client_specs(
            PoolSpec(groups=2),
            Workload(),
            arm=arm,
            block=3,
            seed=7,
            duration_s=5,
            folder=tmp_path,
            options={},
        )
        for arm in (Arm.BASELINE, Arm.FAULT, Arm.CACHE_OFF)
    }
    base, fault = specs[Arm.BASELINE], specs[Arm.FAULT]

    assert [one.plan for one in base] == [one.plan for one in fault]
    assert not {one.key_prefix for one in base} & {one.key_prefix for one in fault}
    assert {one.without_pool for one in specs[Arm.CACHE_OFF]} == {True}
    names = [planned.request for one in base for planned in one.plan]
    assert len(names) == len(set(names)), "two groups' requests must not be taken for twins"
    writers = [one.writer for one in base + fault]
    assert len(writers) == len(set(writers))


def test_a_soak_draws_the_same_rounds_within_its_bounds() -> None:
    """Rounds repeat with the seed, and never hit more stores than may be down."""
    soak = Soak(rounds=30, seed=5, stores=5, min_up=3)
    drawn = [soak.draw(number) for number in range(30)]

    assert [one.title for one in drawn] == [soak.draw(number).title for number in range(30)]
    assert {one.ours.scope.value for one in drawn} == {1, 2}
    assert {one.faults[0].name for one in drawn} == set(soak.faults)
