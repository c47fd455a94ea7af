"""A rolling restart's decisions, against a group that exists in memory and under a clock that jumps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvops.errors import Refused, StartFailed
from kvops.fleet.rollout import (
    NodeProgress,
    Pace,
    Rollout,
    RolloutState,
    RolloutStopped,
    Seen,
    Step,
    batches,
    hit_ratio,
    why_not,
)

STORES = ("store-0", "store-1", "store-2")
QUICK = Pace(window_s=0)


def begun(*, migrate: bool = False) -> RolloutState:
    """A rollout over one master and three stores of which nothing is done."""
    nodes = [NodeProgress(name=name, role="store") for name in STORES]
    return RolloutState(migrate=migrate, nodes=[NodeProgress(name="master-0", role="master"), *nodes])


@dataclass
class World:
    """A group: who serves, who is drained, who runs as which process; fails where it is told to."""

    objects: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STORES, 10))
    drained: set[str] = field(default_factory=set)
    operators: set[str] = field(default_factory=set)  # under somebody else's hold
    lives: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("master-0", *STORES), 1))
    down: set[str] = field(default_factory=set)
    calls: list[tuple[str, ...]] = field(default_factory=list)
    fail_at: int = -1  # this many points from now Ctrl-C comes: a call begins, is half done, or is done
    broken: set[str] = field(default_factory=set)  # they end while they start
    now_s: float = 0.0
    lookups_per_s: int = 0
    ratio: float = 0.8
    cold_until_s: float = 0.0  # nobody hits anything before
    away_most: int = 0
    masters: tuple[str, ...] = ("master-0",)
    leader: str = "master-0"
    totals: list[int] = field(default_factory=lambda: [0, 0])

    def _call(self, *what: str) -> None:
        self.calls.append(what)
        self._point()

    def _point(self) -> None:
        self.fail_at -= 1
        if self.fail_at == 0:
            raise KeyboardInterrupt

    def pause(self, seconds: float) -> None:
        """Time passes, traffic comes."""
        self.now_s += seconds
        lookups = round(seconds * self.lookups_per_s)
        self.totals[0] += lookups
        self.totals[1] += round(lookups * self.ratio) if self.now_s >= self.cold_until_s else 0

    def _serving(self) -> frozenset[str]:
        found = frozenset(name for name in STORES if name not in self.down | self.drained)
        self.away_most = max(self.away_most, len(STORES) - len(found))
        return found

    def look(self) -> Seen:
        """What a rollout sees."""
        serving = self._serving()
        states = {name: "down" if name in self.down else "draining" for name in STORES if name not in serving}
        return Seen(
            serving=serving,
            masters=frozenset(self.masters),
            leader=self.leader,
            away=states,
            held=frozenset(self.operators),
            processes={name: str(life) for name, life in self.lives.items() if name not in self.down},
            objects=sum(self.objects.values()),
            objects_by_store=self.objects,
            lookups=self.totals[0],
            hits=self.totals[1],
        )

    def drain(self, names: Sequence[str], *, migrate: bool) -> None:
        """Hidden; moved or forgotten."""
        self._call("drain", *names)
        self.drained.update(names)
        self._serving()
        for name in names:
            if migrate:
                other = next(one for one in STORES if one not in names)
                self.objects[other] += self.objects[name]
            self.objects[name] = 0
        self._point()

    def step_down(self) -> None:
        """The next one leads."""
        self._call("step_down", self.leader)
        self.leader = next(name for name in self.masters if name != self.leader)
        self._point()

    def restart(self, names: Sequence[str]) -> None:
        """A new process, unless it is broken."""
        self._call("restart", *names)
        self.down.update(name for name in names if name in STORES)
        self._serving()
        self._point()
        for name in names:
            self.objects[name] = 0
            if name in self.broken:
                raise StartFailed(f"{name} ended with exit code 2 while starting", fix="see kvops logs")
        self.down.difference_update(names)
        for name in names:
            self.lives[name] += 1
        self._point()

    def undrain(self, names: Sequence[str]) -> None:
        """Serves again."""
        self._call("undrain", *names)
        self.drained.difference_update(names)
        self._point()

    def wait_joined(self, names: Sequence[str]) -> Sequence[str]:
        """At once, or never."""
        self._call("wait", *names)
        return [name for name in names if name in self.down]


def run(world: World, state: RolloutState, *, pace: Pace = QUICK) -> RolloutState:
    """Walk to the end."""
    rollout = Rollout(
        state, world, pace=pace, save=lambda _: None, clock=lambda: world.now_s, pause=world.pause
    )
    return rollout.run()


def test_one_store_at_a_time_then_the_master() -> None:
    """Each store is drained, replaced, undrained and awaited before the next is touched."""
    world = World()

    done = run(world, begun())

    walk = [("drain",), ("restart",), ("undrain",), ("wait",)]
    expected = [(call[0], store) for store in STORES for call in walk]
    assert world.calls[: len(expected)] == expected
    assert ("restart", "master-0") in world.calls
    assert ("drain", "master-0") not in world.calls
    assert done.unfinished == []
    assert set(world.lives.values()) == {2}
    assert world.away_most == 1


def test_the_first_trouble_ends_it_and_the_same_again_goes_on_there() -> None:
    """A store that does not come back: those behind it are untouched, and a resume does not redo what is done."""
    world = World(broken={"store-1"})
    kept: list[RolloutState] = [begun()]
    rollout = Rollout(kept[0], world, pace=QUICK, save=kept.append)

    with pytest.raises(RolloutStopped, match="stopped at store-1, 1 of 4 done: store-1 ended") as caught:
        rollout.run()

    assert caught.value.exit_code == 1
    assert "the same command again" in caught.value.fix
    assert "store-1" in kept[-1].stopped
    assert world.lives == {"master-0": 1, "store-0": 2, "store-1": 1, "store-2": 1}
    assert world.look().serving == {"store-0", "store-2"}

    world.broken.clear()
    done = run(world, kept[-1])

    assert (done.unfinished, done.stopped) == ([], "")
    assert set(world.lives.values()) == {2}
    assert world.drained == set()


@given(
    fail_at=st.integers(1, 14), again_at=st.integers(1, 14), at_once=st.integers(1, 2), migrate=st.booleans()
)
def test_wherever_it_is_interrupted_a_resume_finishes_it(
    fail_at: int, again_at: int, at_once: int, migrate: bool
) -> None:
    """Two interruptions anywhere: in the end all is restarted, nothing is held, never more were away than allowed."""
    world = World()
    state = begun(migrate=migrate)
    pace = Pace(window_s=0, unavailable_max=at_once)
    for fail in (fail_at, again_at, -1):
        world.fail_at = fail
        kept = [state]
        rollout = Rollout(state, world, pace=pace, save=kept.append)
        try:
            rollout.run()
        except KeyboardInterrupt:
            assert kept[-1].stopped.startswith("interrupted")
        # As from the disk: only what was written down is known.
        state = msgspec.json.decode(msgspec.json.encode(kept[-1]), type=RolloutState)

    assert state.unfinished == []
    assert all(life == 2 for life in world.lives.values())
    assert world.drained == set()
    assert world.away_most <= at_once


def test_a_store_that_is_away_counts() -> None:
    """With one store down already a second is not taken away; the one that is down itself may be restarted."""
    world = World(down={"store-2"})

    with pytest.raises(RolloutStopped, match="store-2 is down: with store-0 2 stores would not serve"):
        run(world, begun())

    assert world.calls == []
    assert why_not(["store-2"], world.look(), unavailable_max=1) is None
    assert why_not(["store-0"], world.look(), unavailable_max=2) is None


def test_without_a_master_no_store_is_touched() -> None:
    """Nobody could drain a store, or say whether it has joined again."""
    world = World(leader="")

    with pytest.raises(RolloutStopped, match="no master leads: store-0 cannot be drained"):
        run(world, begun())

    assert set(world.lives.values()) == {1}


def test_a_master_that_did_not_come_back_is_where_it_goes_on() -> None:
    """The only master failed to start: a resume starts it although nobody leads."""
    world = World(broken={"master-0"})
    kept = [begun()]
    with pytest.raises(RolloutStopped, match="stopped at master-0, 3 of 4 done"):
        Rollout(kept[0], world, pace=QUICK, save=kept.append).run()
    world.broken.clear()
    world.leader = ""

    done = run(world, kept[-1])

    assert done.unfinished == []
    assert set(world.lives.values()) == {2}


def test_an_operators_hold_stays() -> None:
    """A store that somebody holds is restarted, and neither drained nor let loose."""
    world = World(drained={"store-1"}, operators={"store-1"})

    done = run(world, begun(), pace=Pace(window_s=0, unavailable_max=2))

    assert done.unfinished == []
    assert world.drained == {"store-1"}
    assert world.lives["store-1"] == 2


def test_it_waits_for_the_hit_ratio() -> None:
    """The next store waits until the group hits as often as before, and no longer."""
    world = World(lookups_per_s=1_000)
    waited: list[float] = []

    def save(state: RolloutState) -> None:
        store = state.nodes[1]
        if store.step is Step.SETTLING:
            world.cold_until_s = world.now_s + 20
            waited.append(world.now_s)
        elif store.step is Step.DONE and len(waited) == 1:
            waited.append(world.now_s)

    pace = Pace(window_s=5, settle_s=60)
    clock = {"clock": lambda: world.now_s, "pause": world.pause}
    done = Rollout(begun(), world, pace=pace, save=save, **clock).run()

    assert done.ratio_before == pytest.approx(0.8)
    assert 20 < waited[1] - waited[0] <= 20 + 2 * 5


def test_a_hit_ratio_that_does_not_come_back_stops_it() -> None:
    """Bounded: the reason tells both ratios, and a resume waits for that very store again without restarting it."""
    world = World(lookups_per_s=1_000)
    kept = [begun()]
    pace = Pace(window_s=5, settle_s=30)

    def save(state: RolloutState) -> None:
        kept.append(state)
        if state.nodes[1].step is Step.SETTLING:
            world.ratio = 0.2

    with pytest.raises(RolloutStopped, match=r"after 30 s the hit ratio is 20\.0%, before it was 80\.0%"):
        Rollout(kept[0], world, pace=pace, save=save, clock=lambda: world.now_s, pause=world.pause).run()
    assert world.lives == {"master-0": 1, "store-0": 2, "store-1": 1, "store-2": 1}

    world.ratio = 0.79
    done = Rollout(
        kept[-1], world, pace=pace, save=kept.append, clock=lambda: world.now_s, pause=world.pause
    ).run()

    assert done.unfinished == []
    assert world.lives["store-0"] == 2


def test_migrated_objects_have_to_be_there_without_traffic() -> None:
    """Nobody looks anything up: then the objects that were moved are what must not be lost."""

    class Losing(World):
        def drain(self, names: Sequence[str], *, migrate: bool) -> None:
            super().drain(names, migrate=False)

    pace = Pace(window_s=1, settle_s=3)
    with pytest.raises(RolloutStopped, match="20 objects are readable, before there were 30"):
        run(Losing(), begun(migrate=True), pace=pace)

    assert run(World(), begun(migrate=True), pace=pace).unfinished == []


@pytest.mark.parametrize(
    ("before", "now", "ratio"),
    [((0, 0), (1_000, 500), 0.5), ((900, 900), (1_000, 950), None), ((5_000, 9), (1_000, 900), None)],
    ids=["traffic", "hardly any", "the master restarted"],
)
def test_hit_ratio(before: tuple[int, int], now: tuple[int, int], ratio: float | None) -> None:
    """Of the lookups between two looks; of too few, or across a restart of the master, none is made up."""
    first, second = (Seen(serving=frozenset(), lookups=a, hits=b) for a, b in (before, now))

    assert hit_ratio(first, second) == ratio


@pytest.mark.parametrize("leader", ["master-0", "master-1"])
def test_who_leads_is_last_and_hands_over_first(leader: str) -> None:
    """Standbys are restarted before; the leader steps down, so that nobody waits for an election."""
    masters = ("master-0", "master-1", "master-2")
    world = World(masters=masters, leader=leader, lives=dict.fromkeys((*masters, *STORES), 1))
    state = RolloutState(nodes=[NodeProgress(name=name, role="master") for name in masters])

    done = run(world, state)

    assert done.unfinished == []
    assert all(world.lives[name] == 2 for name in masters)
    restarts = [call[1] for call in world.calls if call[0] == "restart"]
    assert (len(restarts), restarts[-1]) == (3, leader)
    assert world.calls.index(("step_down", leader)) < world.calls.index(("restart", leader))
    assert [call for call in world.calls if call[0] == "step_down"] == [("step_down", leader)]


def test_masters_are_never_two_at_once() -> None:
    """However many stores may be away, masters go one by one, after them."""
    nodes = [
        *(NodeProgress(name=f"master-{i}", role="master") for i in range(2)),
        *(NodeProgress(name=name, role="store") for name in STORES),
    ]

    found = [[node.name for node in batch] for batch in batches(nodes, unavailable_max=2)]

    assert found == [["store-0", "store-1"], ["store-2"], ["master-0"], ["master-1"]]


def test_a_refused_drain_is_told_as_it_is() -> None:
    """The reason and the fix of whatever refused it are in the error; nothing was restarted."""

    class Refusing(World):
        def drain(self, names: Sequence[str], *, migrate: bool) -> None:
            raise Refused("no store would be left", fix="start another")

    world = Refusing()
    with pytest.raises(RolloutStopped, match="no store would be left") as caught:
        run(world, begun())

    assert caught.value.fix.startswith("start another")
    assert set(world.lives.values()) == {1}
