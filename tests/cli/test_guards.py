"""What a protected group asks before it is changed, and groups elsewhere that cannot be seen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.cli.conftest import Run

# 192.0.2.0/24 is for documentation (RFC 5737): nothing answers there, and nothing is sent where a guard holds.
PROD = (
    "contexts: {prod: {masters: ['192.0.2.1:1'], environment: production, protect: true, secret_file: %s}}\n"
)


@pytest.fixture
def prod(tmp_path: Path) -> None:
    """A protected group somewhere else."""
    secret = tmp_path / "prod.secret"
    secret.touch(mode=0o600)
    secret.write_text("ab" * 32)
    path = tmp_path / "config/kvops/config.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(PROD % secret)


@pytest.mark.usefixtures("prod")
@pytest.mark.parametrize("args", [["rm", "k"], ["put", "k"]], ids=["rm", "put"])
def test_protected(args: list[str], run: Run) -> None:
    """Without a terminal and without --yes, a change to a protected group is refused at once: exit code 5."""
    done = run("-g", "prod", "object", *args, stdin=b"x")

    assert done.returncode == 5
    assert "--yes" in done.stderr


@pytest.mark.usefixtures("prod")
def test_dry_run_asks_nothing(run: Run) -> None:
    """A dry run changes nothing, so it asks nothing, and needs no group that answers."""
    assert run("-g", "prod", "object", "rm", "k", "--dry-run").returncode == 0


@pytest.mark.usefixtures("prod")
@pytest.mark.parametrize("command", ["stop", "restart", "logs", "start"])
def test_not_ours_to_run(command: str, run: Run) -> None:
    """Processes of a group elsewhere are not run from here: exit code 2."""
    assert run("-g", "prod", command).returncode == 2


@pytest.mark.usefixtures("prod")
@pytest.mark.parametrize("command", ["status", "events"])
def test_no_control_address(command: str, run: Run) -> None:
    """A context that does not say where its control service is cannot be asked: exit code 2, with the key to add."""
    done = run("-g", "prod", command)

    assert done.returncode == 2
    assert "control:" in done.stderr


def test_nobody_answers(run: Run, tmp_path: Path) -> None:
    """A group of which no master answers is down, and says who was not seen: exit code 3."""
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("ab" * 32)
    path = tmp_path / "config/kvops/config.yaml"
    path.parent.mkdir(parents=True)
    # Port 1 of this machine: refused at once.
    path.write_text(f"group: lab\ncontexts: {{lab: {{control: ['127.0.0.1:1'], secret_file: {secret}}}}}\n")

    done = run("status")

    assert done.returncode == 3
    assert "127.0.0.1:1" in done.stdout
    assert "did not answer" in done.stderr
