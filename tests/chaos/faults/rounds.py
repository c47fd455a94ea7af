"""What every fault must survive: inject, verify, undo, undo again, verify refuses; and its no-op is found out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from kvops.chaos.lifecycle import Injection
from kvops.chaos.model import State
from kvops.errors import FaultNotApplied, NotInjected
from kvops.host import LocalHost

HOST = LocalHost()
LEASE_S = 20.0  # nothing here tests the lease, and the machine may be busy
VERIFY_S = 30.0  # likewise


def there_and_back(fault: Any, state_dir: Path) -> Injection:
    """Inject a fault, prove it twice, undo it twice, and see its proof refuse."""
    with Injection(
        [fault], host=HOST, state_dir=state_dir, lease_s=LEASE_S, verify_timeout_s=VERIFY_S
    ) as one:
        evidence = one.inject()
        again = one.recheck()
        proof = one.undo()
        repeated = one.undo()
    assert len({signal.source for signal in evidence[0].signals}) >= 2
    assert evidence[0].control.observed
    assert len(again) == (1 if fault.lasting else 0)
    assert all(step.done for step in proof.steps)
    assert not any(step.acted for step in repeated.steps)
    assert one.state is State.CLEAN
    assert not one.book.dirty()
    if fault.lasting:
        with pytest.raises(FaultNotApplied):
            one.faults[0].verify(HOST)
    return one


def noop(fault: Any, state_dir: Path) -> None:
    """The same fault with an injector that does nothing must be NOT_INJECTED, and leave nothing."""
    kind = type("Noop", (type(fault),), {"inject": lambda self, host: None, "__slots__": ()})
    sham = kind(**{one.name: getattr(fault, one.name) for one in dataclasses.fields(fault)})
    injection = Injection([sham], host=HOST, state_dir=state_dir, verify_timeout_s=0.2, lease_s=LEASE_S)
    with pytest.raises(NotInjected), injection:
        injection.inject()
    assert injection.state is State.CLEAN
