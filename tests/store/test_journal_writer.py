"""The writing side of the journal: snapshots, a disk that is too slow or fails, and a killed process."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kvops
from kvops.errors import AlreadyRunning, ConfigError
from kvops.store.journal import COMPLETE_ROW, GONE_ROW, Kind, Rows, recover_state, segments, snapshots
from kvops.store.journal_writer import JournalWriter
from kvops.store.model import StoreInfo, StoreState
from kvops.store.outbox import JournalEntry

STORE = StoreInfo(
    id=1,
    name="store-1",
    host="host-0",
    numa_node=0,
    incarnation=7,
    boot_id="b",
    pid=1,
    address="127.0.0.1:1",
    unix_path="",
    http_address="",
    state=StoreState.READY,
    capacity_bytes=1 << 30,
    populated_bytes=1 << 30,
    used_bytes=0,
    objects=0,
    transports=["tcp"],
)
MOUNTED = JournalEntry(Kind.STORE, store=STORE).encode()


def complete(objects: dict[int, int]) -> Rows:
    rows = np.zeros(len(objects), COMPLETE_ROW)
    rows["digest"][:, 0] = list(objects)
    rows["location"]["generation"] = list(objects.values())
    rows["location"]["store"] = STORE.id
    return rows


def stored(objects: dict[int, int]) -> tuple[Kind, int, bytes]:
    return JournalEntry(Kind.COMPLETE, complete(objects)).encode()


def gone(key: int, generation: int) -> tuple[Kind, int, bytes]:
    return JournalEntry(Kind.GONE, np.array([((key, 0), generation)], GONE_ROW)).encode()


def objects_in(directory: Path) -> dict[int, int]:
    rows = recover_state(directory).rows
    return dict(zip(rows["digest"][:, 0].tolist(), rows["location"]["generation"].tolist(), strict=True))


def snapshot(journal: JournalWriter, objects: dict[int, int]) -> bool:
    """A snapshot of these objects in one go."""
    journal.begin_snapshot()
    assert journal.append_snapshot(*MOUNTED)
    assert journal.append_snapshot(*stored(objects))
    return journal.commit_snapshot()


class Masters(RuleBasedStateMachine):
    """Lives of masters that put, lose, snapshot in slices, end or are killed; at each step all is on disk."""

    @initialize()
    def start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.directory = Path(self.folder.name)
        self.objects: dict[int, int] = {}
        self.generation = 0
        self.unsaved: list[int] | None = None
        self.journal = JournalWriter(self.directory, segment_bytes_max=200)
        self.journal.append(*MOUNTED)

    @rule(keys=st.sets(st.integers(0, 9), min_size=1, max_size=4))
    def put(self, keys: set[int]) -> None:
        """New objects, or new generations of old ones."""
        fresh = {}
        for key in keys:
            self.generation += 1
            fresh[key] = self.generation
        self.journal.append(*stored(fresh))
        self.objects |= fresh

    @precondition(lambda self: self.objects)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """One object goes."""
        key = data.draw(st.sampled_from(sorted(self.objects)))
        self.journal.append(*gone(key, self.objects.pop(key)))

    @precondition(lambda self: self.unsaved is None)
    @rule()
    def begin(self) -> None:
        """A snapshot begins; keys are visited one by one, as a master walks its slots."""
        self.journal.begin_snapshot()
        self.unsaved = list(range(10))
        assert self.journal.append_snapshot(*MOUNTED)

    @precondition(lambda self: self.unsaved)
    @rule(count=st.integers(1, 5))
    def save(self, count: int) -> None:
        """A slice of it: what is there now."""
        assert self.unsaved is not None
        visited, self.unsaved = self.unsaved[:count], self.unsaved[count:]
        there = {key: self.objects[key] for key in visited if key in self.objects}
        assert self.journal.append_snapshot(*stored(there))

    @precondition(lambda self: self.unsaved == [])
    @rule()
    def commit(self) -> None:
        """All were visited."""
        assert self.journal.commit_snapshot()
        self.unsaved = None

    @rule()
    def end(self) -> None:
        """The master ends, a snapshot under way or not, and another begins."""
        assert self.journal.close()
        self.unsaved = None
        self.journal = JournalWriter(self.directory, segment_bytes_max=200)

    @invariant()
    def everything_is_there(self) -> None:
        """Whenever the process were killed now, the next master would know exactly these objects."""
        assert self.journal.flush(10)
        state = recover_state(self.directory)

        assert objects_in(self.directory) == self.objects
        assert state.whole
        assert state.stores == {1: STORE}
        assert not self.objects or state.generation_max >= max(self.objects.values())

    def teardown(self) -> None:
        self.journal.close()
        self.folder.cleanup()


Masters.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestMasters = Masters.TestCase


def test_a_snapshot_replaces_what_came_before(tmp_path: Path) -> None:
    """After a commit the older segments and snapshots are deleted, and their disk space with them."""
    with JournalWriter(tmp_path) as journal:
        for index in range(3):
            journal.append(*stored({index: index + 1}))
            assert snapshot(journal, {0: 1, 1: 2})
        assert journal.flush(10)

        assert (
            [number for number, _ in snapshots(tmp_path)]
            == [number for number, _ in segments(tmp_path)]
            == [4]
        )
    assert objects_in(tmp_path) == {0: 1, 1: 2}


def test_a_long_tail_wants_a_snapshot(tmp_path: Path) -> None:
    """Recovery stays short: a tail beyond a segment, then beyond two snapshots, asks for one."""
    with JournalWriter(tmp_path, segment_bytes_max=1_000) as journal:
        journal.append(*MOUNTED)
        assert not journal.wants_snapshot
        journal.append(*stored(dict.fromkeys(range(30), 1)))
        assert journal.wants_snapshot

        assert snapshot(journal, dict.fromkeys(range(30), 1))
        assert not journal.wants_snapshot


def test_a_commit_that_was_cut_short(tmp_path: Path) -> None:
    """Segments that a killed process had no time to delete are ignored; an unfinished snapshot is removed."""
    with JournalWriter(tmp_path) as journal:
        journal.append(*MOUNTED)
        journal.append(*stored({1: 10}))
        assert journal.flush(10)
        [(_, old)] = segments(tmp_path)
        data = old.read_bytes()
        assert snapshot(journal, {2: 11})
    old.write_bytes(data)
    unfinished = tmp_path / f"snapshot-{9:016d}.tmp"
    unfinished.write_bytes(b"KVOJ")

    assert objects_in(tmp_path) == {2: 11}
    JournalWriter(tmp_path).close()
    assert not unfinished.exists()
    assert objects_in(tmp_path) == {2: 11}


def test_too_slow_a_disk_leaves_a_hole_that_a_snapshot_fills(tmp_path: Path) -> None:
    """What does not fit the queue is dropped, said so, and made good by the next snapshot."""
    with JournalWriter(tmp_path, queue_bytes_max=700) as journal:
        journal.append(*MOUNTED)
        journal.append(*stored({1: 10}))
        assert journal.flush(10)
        journal.append(*stored({key: key for key in range(20, 40)}))  # 992 bytes never fit
        journal.append(*stored({2: 11}))  # after a hole nothing is written

        assert not journal.flush(10)
        assert journal.wants_snapshot
        assert objects_in(tmp_path) == {1: 10}

        journal.begin_snapshot()
        journal.append(*stored({3: 12}))
        assert journal.flush(10)
        assert not recover_state(tmp_path).whole  # killed now, the master would know of the hole
        assert journal.append_snapshot(*stored({2: 11}))
        assert journal.commit_snapshot()
        assert journal.flush(10)
        assert recover_state(tmp_path).whole
        assert not journal.wants_snapshot


def test_a_hole_during_a_snapshot_spoils_it(tmp_path: Path) -> None:
    """A snapshot whose tail has a hole is given up, and the state before it stays."""
    with JournalWriter(tmp_path, queue_bytes_max=700) as journal:
        journal.append(*MOUNTED)
        journal.append(*stored({1: 10}))
        journal.begin_snapshot()
        journal.append(*stored({key: key for key in range(20, 40)}))

        assert not journal.commit_snapshot()
        assert journal.wants_snapshot
        assert not journal.close()
    state = recover_state(tmp_path)
    assert (objects_in(tmp_path), state.whole) == ({1: 10}, False)


def test_a_disk_that_fails_and_recovers(tmp_path: Path) -> None:
    """A failed write stops the journal, with the reason; a snapshot begun later makes it whole."""
    with JournalWriter(tmp_path, segment_bytes_max=1) as journal:
        journal.append(*MOUNTED)
        assert journal.flush(10)
        obstacle = tmp_path / f"segment-{2:016d}.log"
        obstacle.mkdir()
        journal.append(*stored({1: 10}))

        assert not journal.flush(10)
        assert isinstance(journal.failure, FileExistsError)
        assert journal.wants_snapshot

        obstacle.rmdir()
        assert snapshot(journal, {1: 10})
        journal.append(*stored({2: 11}))
        assert journal.flush(10)
        assert journal.failure is None
    assert (objects_in(tmp_path), recover_state(tmp_path).whole) == ({1: 10, 2: 11}, True)


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    """A second master on the same directory is refused; after the first ended it may."""
    with JournalWriter(tmp_path), pytest.raises(AlreadyRunning):
        JournalWriter(tmp_path)
    JournalWriter(tmp_path).close()


def test_no_place_to_write(tmp_path: Path) -> None:
    """A directory that cannot be made is one error that says so."""
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match="cannot be written"):
        JournalWriter(tmp_path / "file" / "journal")


@pytest.mark.process
def test_a_killed_process_loses_nothing_that_was_written(tmp_path: Path) -> None:
    """SIGKILL at any moment leaves a journal that can be read, with everything flushed before."""
    program = """
import itertools, sys
from pathlib import Path
from tests_writer import MOUNTED, stored
from kvops.store.journal_writer import JournalWriter
journal = JournalWriter(Path(sys.argv[1]), segment_bytes_max=10_000)
journal.append(*MOUNTED)
for generation in itertools.count(1):
    journal.append(*stored({generation % 1_000: generation}))
    if generation == 500:
        assert journal.flush(60)
        print("flushed", flush=True)
"""
    (tmp_path / "tests_writer.py").write_text(Path(__file__).read_text())
    directory = tmp_path / "journal"
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(directory)],
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": f"{Path(kvops.__file__).parents[1]}:{tmp_path}"},
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"flushed\n"
        child.send_signal(signal.SIGKILL)

    found = objects_in(directory)
    assert all(found[key] % 1_000 == key for key in found)
    assert set(range(1, 501)) <= set(found)
