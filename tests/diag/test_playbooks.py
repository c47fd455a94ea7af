"""Checks, sources and playbooks hold together."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvops.diag.playbook import FAMILIES, is_typed, page, remedies
from kvops.diag.registry import checks
from kvops.diag.report import EXPLAINS, playbook

PLAYBOOKS = Path(__file__).parents[2] / "playbooks"


@pytest.mark.parametrize("family", FAMILIES)
def test_page_is_current(family: str) -> None:
    """The page of a family is what the checks say now (python -m kvops.diag.playbook playbooks)."""
    assert (PLAYBOOKS / f"{family}.md").read_text(encoding="utf-8") == page(family)


def test_every_check_has_a_heading_and_a_source() -> None:
    """Each id has its heading, symptom, source and fix, and the link in a report leads to it."""
    for check in checks().values():
        text = (PLAYBOOKS / f"{check.family}.md").read_text(encoding="utf-8")
        assert f"\n## {check.id}\n" in text
        assert check.source
        assert check.why
        assert check.fix
        assert check.title
        assert f"(#{playbook(check).partition('#')[2]})" in text


@pytest.mark.parametrize("family", FAMILIES)
def test_remedies_are_whole(family: str) -> None:
    """Each check of a family, and nothing else, has all five parts: how to confirm with a command, fix, persistence, undo, when not to."""
    known = {check.id for check in checks().values() if check.family == family}
    found = remedies(family)

    assert set(found) == known
    for check, remedy in found.items():
        for heading in remedy._fields:
            assert getattr(remedy, heading), f"{check} has no {heading}"
        assert any(is_typed(line) for line in remedy.confirm), check


@pytest.mark.parametrize("family", FAMILIES)
def test_commands_are_sound_shell(family: str) -> None:
    """Whatever a page gives to type is a shell's syntax; placeholders are words in angle brackets."""
    text = (PLAYBOOKS / f"{family}.md").read_text(encoding="utf-8")
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        script = re.sub(r"<[^<>|&;\n]+>", "X", block).replace("…", "")
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{done.stderr}\n{block}"


def test_there_are_213_checks() -> None:
    """The catalogue has 213 checks in 20 families; none is missing, none is new."""
    assert len(checks()) == 213
    assert {check.family for check in checks().values()} == set(FAMILIES)


def test_explanations_have_no_circles() -> None:
    """A cause never explains itself by way of its consequences, and every id in the table exists."""
    table = checks()
    for cause, effects in EXPLAINS.items():
        assert cause in table
        assert set(effects) <= set(table)
        seen: set[str] = set()
        todo = list(effects)
        while todo:
            effect = todo.pop()
            if effect not in seen:
                seen.add(effect)
                todo += EXPLAINS.get(effect, ())
        assert cause not in seen, cause


def test_diagnosis_needs_no_numpy() -> None:
    """Diagnosis starts fast and on small machines: it loads neither numpy nor grpc."""
    code = (
        "import sys; from kvops.diag.registry import checks; checks(); import kvops.diag.render_html, kvops.diag.snapshot; "
        "print(sorted({'numpy', 'grpc', 'paramiko', 'yaml'} & set(sys.modules)))"
    )
    path = str(PLAYBOOKS.parent)

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=path)

    assert done.stdout.strip() == "[]"
