"""Breaks the code on purpose, to see whether the simulator notices: mutations live with the tests, not here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import cast

from kvops.errors import UsageError

Mutation = Callable[[], AbstractContextManager[object]]


def mutations() -> Mapping[str, Mutation]:
    """
    The table of mutations, by name.

    Raises:
        UsageError: This is an installed release, which has none.
    """
    path = Path(__file__).parents[3] / "tests" / "chaos" / "mutants.py"
    if not path.is_file():
        raise UsageError(
            "an installed kvops cannot be broken on purpose",
            fix="run from a source checkout, which has tests/",
        )
    name = "tests.chaos.mutants"
    if name not in sys.modules:
        spec = spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(module)
    return cast(Mapping[str, Mutation], sys.modules[name].MUTANTS)


def mutation(name: str) -> Mutation:
    """
    One mutation.

    Raises:
        UsageError: None of that name, or an installed release.
    """
    found = mutations()
    if name not in found:
        raise UsageError(f"no mutation {name!r}", fix=f"one of: {', '.join(found)}")
    return found[name]
