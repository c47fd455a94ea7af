"""``kvops chaos sim`` as scripts use it."""

from __future__ import annotations

import json

from tests.cli.conftest import Run

SMALL = ("--seeds", "1", "--duration", "1s", "--masters", "1", "--stores", "2", "--clients", "4", "-q")


def test_a_seed_that_passes(run: Run) -> None:
    """The verdict, what was injected and what callers saw are in the document; exit 0."""
    done = run("chaos", "sim", *SMALL, "-o", "json")
    document = json.loads(done.stdout)

    assert done.returncode == 0
    assert document["verdict"] == "PASS"
    assert document["messages"] > 0
    assert document["outcomes"]
    assert not document["failures"]


def test_a_seed_that_fails_is_explained(run: Run) -> None:
    """Code broken on purpose exits 1, with the rule, a smaller run, its timeline and the command that replays it."""
    broken = (*SMALL, "--duration", "4s", "--calls-per-second", "20", "--mutate", "slots-not-cleared")
    done = run("chaos", "sim", *broken, "-o", "json")
    failure = json.loads(done.stdout)["failures"][0]

    assert done.returncode == 1
    assert failure["invariant"] == "cleared"
    assert len(failure["smallest"]["calls"]) <= 10
    assert "FAIL" in failure["smallest"]["timeline"][-1]


def test_unknown_names_are_refused(run: Run) -> None:
    """A fault or a mutation that does not exist is usage, and the nearest name is offered."""
    fault = run("chaos", "sim", *SMALL, "--fault", "net.partitoin")
    mutation = run("chaos", "sim", *SMALL, "--mutate", "nothing")

    assert (fault.returncode, mutation.returncode) == (2, 2)
    assert "net.partition" in fault.stderr
    assert "no-term-fencing" in mutation.stderr
