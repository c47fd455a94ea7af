"""What completion offers for names, as each shell asks for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.shell_completion import split_arg_string

from kvops.cli import main
from kvops.files import write_yaml
from kvops.fleet.group_state import GroupState, Member
from kvops.fleet.local import LocalGroup


@pytest.fixture(autouse=True)
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two local groups that were stopped, and a context."""
    for name in [name for name in os.environ if name.startswith(("KVOPS_", "XDG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("KVOPS_STATE_DIR", str(tmp_path / "state"))
    for name, stores in (("local", 2), ("other", 1)):
        group = LocalGroup(tmp_path / "state", name)
        group.folder.mkdir(parents=True)
        members = [Member(name="master-0", role="master", host="host-0")]
        members += [Member(name=f"store-{i}", role="store", host=f"host-{i}") for i in range(stores)]
        write_yaml(group.state_file, GroupState(group=name, members=members))
    (tmp_path / "config/kvops").mkdir(parents=True)
    (tmp_path / "config/kvops/config.yaml").write_text("contexts: {prod-a: {masters: ['10.0.0.1:7800']}}\n")


def offered(
    shell: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """What is offered for the last word of a line; bash cuts it at colons, as Readline does."""
    if shell == "bash":
        words = line.replace(":", " : ").split()
        position = len(words) - (not line.endswith(" "))
        monkeypatch.setenv("COMP_WORDS", "\n".join(words))
        monkeypatch.setenv("COMP_CWORD", str(position))
    else:
        last = split_arg_string(line)[-1] if not line.endswith(" ") else ""
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", last)
    monkeypatch.setenv("_KVOPS_COMPLETE", f"{shell}_complete")
    with pytest.raises(SystemExit):
        main.main([])
    found = [one.partition(",")[2].partition("\t")[0] for one in capsys.readouterr().out.splitlines()]
    return [one for one in found if one]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("kvops restart ", ["master-0", "store-0", "store-1"]),
        ("kvops restart store-0 s", ["store-1"]),
        ("kvops -g other restart s", ["store-0"]),
        ("kvops restart -g other s", ["store-0"]),
        ("kvops -g nobody restart s", []),
        ("kvops logs s", ["store-0", "store-1", "store"]),
        ("kvops -g ", ["prod-a", "local", "other"]),
        ("kvops status --group o", ["other"]),
        ("kvops context use p", ["prod-a"]),
        ("kvops help ex", ["exit-codes", "explain"]),
        ("kvops help object p", ["put"]),
    ],
)
def test_names(
    line: str, expected: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Members of the group that is meant, groups, topics and commands."""
    for shell in ("bash", "fish"):
        assert offered(shell, line, monkeypatch, capsys) == expected


@pytest.mark.parametrize("word", ["30s:kill:", "30s:kill:s", "50%:pause:store-"])
def test_planned_events(
    word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The member of --at; bash is given what follows the last colon, as it holds that to be the word."""
    head = word.rpartition(":")[0]
    line = f"kvops replay trace.jsonl --at {word}"

    whole = [name for name in offered("fish", line, monkeypatch, capsys) if "store" in name]
    part = [name for name in offered("bash", line, monkeypatch, capsys) if "store" in name]

    assert whole == [f"{head}:store-0", f"{head}:store-1"]
    assert part == ["store-0", "store-1"]
