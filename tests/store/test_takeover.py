"""What a standby makes of its directory when it has to lead."""

from __future__ import annotations

import pytest

from tests.store.rig import Node, Rig

SEGMENT = 1 << 16


def _is_exact(rig: Rig, node: Node) -> bool:
    """Whether master and node agree on every byte of its memory."""
    store = rig.core.stores.named(node.name)
    assert store is not None
    rig.core.check()
    node.core.check()
    held = store.populated_bytes - store.allocator.free_bytes
    return (store.objects, held) == (node.core.objects, node.core.used_bytes)


@pytest.mark.parametrize("how", ["removed", "expired"])
def test_what_goes_before_its_store_has_come_is_freed_once(how: str) -> None:
    """An object that is removed, or expires, between a takeover and its store's mount leaves exact accounts."""
    rig = Rig()
    node = rig.node(size=SEGMENT)
    rig.put(rig.client(), "a", b"x" * 100, ttl_ms=500 if how == "expired" else 0)
    rig.live(200)
    rig.replicate()

    rig.fail_over(down_ms=500)
    if how == "removed":
        rig.remove(rig.client(), "a")
    else:
        rig.tick(1_000)
    rig.live(3_000)

    assert not rig.lookup("a")
    assert node.core.objects == 0
    assert _is_exact(rig, node)


def test_a_replica_that_came_back_is_known_after_a_takeover() -> None:
    """A store that counted as lost brings its replica back; whoever leads next knows of it, and of its memory."""
    rig = Rig()
    kept, away = rig.node(size=SEGMENT), rig.node(size=SEGMENT)
    rig.put(rig.client(), "a", b"x" * 100, replicas=2)
    rig.live(200)
    away.frozen = True
    rig.close_session(away)
    rig.tick(5_000)
    away.frozen = False
    rig.live(3_000)
    rig.replicate()

    rig.fail_over()
    rig.live(3_000)

    assert len(rig.lookup("a")) == 2
    assert _is_exact(rig, kept)
    assert _is_exact(rig, away)
