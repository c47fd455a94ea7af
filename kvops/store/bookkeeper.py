"""
One master's journal: what it leads with, or follows, is written down, and read again at its next start.

One thread at a time has it: the follower's while the master follows, the loop's while it leads.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from kvops.errors import KvopsError
from kvops.log import log
from kvops.store.journal import recover_state, set_aside
from kvops.store.journal_writer import JournalWriter
from kvops.store.master_core import MasterCore
from kvops.store.model import GENERATION_SEQUENCE_BITS, Trouble
from kvops.store.outbox import JournalEntry
from kvops.store.snapshot import Snapshot
from kvops.store.term import raise_term

SNAPSHOT_PAUSE_S: Final = 10.0  # between two attempts
WAIT_S: Final = 1.0  # for the disk to take a state that is written down whole
STEP_S: Final = 0.05


class Bookkeeper:
    """
    The journal below a master's state folder.

    Args:
        state_dir: The master's.
        several: Whether other masters know the same, so that this one may go on without a disk.
    """

    def __init__(self, state_dir: Path, *, several: bool) -> None:
        self._state_dir = state_dir
        self._folder = state_dir / "journal"
        self._several = several
        self._journal: JournalWriter | None = None
        self._snapshot: Snapshot | None = None
        self._snapshot_after = 0.0
        self._unwritable: KvopsError | None = None

    @property
    def writing(self) -> bool:
        """Whether anything is written at all."""
        return self._journal is not None

    def restore(self, core: MasterCore, *, now_ms: int) -> None:
        """
        Read the journal into a fresh directory, and go on with it.

        A damaged one is set aside, since the stores' slot tables say the same.

        Raises:
            KvopsError: It cannot be written, and there is no other master.
        """
        self.close()
        next_sequence = 0
        if self._folder.exists():
            try:
                recovery = recover_state(self._folder)
            except KvopsError as error:
                log.error("journal.set_aside", error=error.what, kept_as=str(set_aside(self._folder)))
            else:
                seen = recovery.generation_max >> GENERATION_SEQUENCE_BITS
                if seen >= core.term and not self._several:
                    core.raise_term(raise_term(self._state_dir, at_least=seen + 1))
                core.restore(recovery, now_ms=now_ms)
                next_sequence = recovery.next_sequence
        self._open(next_sequence)
        log.info("journal.recovered", objects=len(core.index))

    def begin(self, core: MasterCore) -> None:
        """Write down the whole state of a leader that was taken over, in place of whatever there was."""
        self.close()
        try:
            if self._folder.exists():
                set_aside(self._folder)
        except KvopsError as error:
            self._refused(error)
            return
        self._open(0)
        if self._journal is None:
            return
        self._snapshot = Snapshot(self._journal, core)
        deadline = time.monotonic() + WAIT_S
        while (
            self._snapshot is not None and time.monotonic() < deadline
        ):  # the rest with the operations to come
            self.step()
            self._journal.flush(STEP_S)

    def append(self, entries: Iterable[JournalEntry], core: MasterCore) -> None:
        """Write down what ``core`` has just done; never waits."""
        journal = self._journal
        if journal is None:
            return
        for entry in entries:
            journal.append(*entry.encode())
        if self._snapshot is None and journal.wants_snapshot and time.monotonic() >= self._snapshot_after:
            self._snapshot = Snapshot(journal, core)

    def step(self) -> None:
        """One slice of a snapshot, if one is being taken."""
        if self._snapshot is not None and self._snapshot.step():
            self._snapshot = None
            self._snapshot_after = time.monotonic() + SNAPSHOT_PAUSE_S

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was appended is in the kernel's hands; True as well where nothing is written."""
        return self._journal is None or self._journal.flush(timeout_s)

    def close(self) -> None:
        """Write what is queued, and let the files go; bounded."""
        self._snapshot = None
        journal, self._journal = self._journal, None
        if journal is not None:
            journal.close()

    def troubles(self) -> list[Trouble]:
        """What an operator has to know."""
        if self._unwritable is not None:
            return [Trouble(code="journal_unwritable", text=self._unwritable.what, fix=self._unwritable.fix)]
        failure = self._journal.failure if self._journal is not None else None
        if failure is None:
            return []
        text = f"its journal in {self._state_dir} is behind: {failure.strerror}"
        fix = "make room there: it is made whole by itself; until then a restart knows what the stores know"
        return [Trouble(code="journal_failed", text=text, fix=fix)]

    def _open(self, next_sequence: int) -> None:
        try:
            self._journal = JournalWriter(self._folder, next_sequence=next_sequence)
            self._unwritable = None
        except KvopsError as error:
            if not self._several:
                raise
            self._refused(error)

    def _refused(self, error: KvopsError) -> None:
        """One of several masters does without: the others and the stores know the same."""
        log.error("journal.unwritable", error=error.what)
        self._unwritable = error
