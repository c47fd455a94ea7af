"""What a snapshot of the index says to the master that reads it."""

from __future__ import annotations

from pathlib import Path

from kvops.store.journal import recover_state
from kvops.store.journal_writer import JournalWriter
from kvops.store.snapshot import Snapshot
from tests.store.rig import Rig, digests

DATA = b"x" * 1_000


def test_snapshot_holds_everything(tmp_path: Path) -> None:
    """Objects with replicas, with an expiry and without are all there again, and nothing else is."""
    rig = Rig()
    rig.node()
    rig.node()
    client = rig.client()
    rig.put(client, "plain", DATA)
    rig.put(client, "twice", DATA, replicas=2)
    rig.put(client, "brief", DATA, ttl_ms=5_000)
    rig.put(client, "removed", DATA, ttl_ms=5_000)
    rig.remove(client, "removed")
    rig.flow()
    with JournalWriter(tmp_path / "journal") as journal:
        snapshot = Snapshot(journal, rig.core)
        while not snapshot.step():
            pass
        assert journal.flush(10)

    found = recover_state(tmp_path / "journal")

    keys = {digests([key]): key for key in ("plain", "twice", "brief", "removed")}
    rows = sorted(keys[row["digest"].tobytes()] for row in found.rows)
    assert rows == ["brief", "plain", "twice", "twice"]
    (generation,) = [place[0] for place in rig.lookup("brief")]
    assert found.expires == {generation: rig.now_ms + 5_000}
