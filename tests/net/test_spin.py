"""Spinning while it pays."""

from __future__ import annotations

from kvops.net.spin import SKIP_MAX, SKIP_MIN, Spin


def waits_until_next_spin(spin: Spin) -> int:
    count = 0
    while not spin.pays():
        count += 1
    return count


def test_a_spin_in_vain_is_not_repeated_at_once_and_ever_more_rarely() -> None:
    """Where spinning never pays it costs less and less, and is tried again for ever."""
    spin = Spin()
    pauses = []
    for _ in range(10):
        spin.learn(False)
        pauses.append(waits_until_next_spin(spin))

    assert pauses[:3] == [SKIP_MIN, 2 * SKIP_MIN, 4 * SKIP_MIN]
    assert pauses[-1] == SKIP_MAX


def test_a_spin_that_met_its_frame_brings_spinning_back() -> None:
    """One spin in time, and every wait spins again."""
    spin = Spin()
    for _ in range(5):
        spin.learn(False)
        waits_until_next_spin(spin)

    spin.learn(True)

    assert [spin.pays() for _ in range(3)] == [True, True, True]
    spin.learn(False)
    assert waits_until_next_spin(spin) == SKIP_MIN
