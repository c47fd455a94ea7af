"""Which group a command acts on: flags, environment and two files, and what happens where they disagree."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

from kvops.cli.context import load_configuration, resolve, use
from kvops.cli.options import Settings
from kvops.errors import ConfigError, UsageError
from kvops.files import write_yaml
from kvops.fleet.group_state import GroupState
from kvops.fleet.local import LocalGroup
from tests.cli.conftest import runner

PROD = """\
# where the token factory lives
group: prod-a
contexts:
  prod-a:
    masters: [10.0.0.1:7800]
    environment: production
    protect: true
"""


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment of our own, also for code that reads the process's."""
    found = {"XDG_CONFIG_HOME": str(tmp_path / "config"), "KVOPS_STATE_DIR": str(tmp_path / "state")}
    monkeypatch.delenv("KVOPS_GROUP", raising=False)
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    return found


@pytest.fixture
def user(env: dict[str, str]) -> Path:
    """The user's configuration file, with one context."""
    path = Path(env["XDG_CONFIG_HOME"]) / "kvops/config.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(PROD)
    return path


def local_group(env: dict[str, str], name: str) -> LocalGroup:
    """A local group as a former start left it."""
    group = LocalGroup(Path(env["KVOPS_STATE_DIR"]), name)
    group.folder.mkdir(parents=True)
    write_yaml(group.state_file, GroupState(group=name))
    return group


def test_precedence(env: dict[str, str], user: Path, tmp_path: Path) -> None:
    """A flag beats the environment, that the user's file, that the system's, that the default."""
    system = tmp_path / "system.yaml"
    system.write_text("group: from-system\n")
    flag = Settings(group="from-flag")
    origins = []
    for settings, variables, file in [
        (flag, env | {"KVOPS_GROUP": "from-env"}, user),
        (Settings(), env | {"KVOPS_GROUP": "from-env"}, user),
        (Settings(), env, user),
        (Settings(), env | {"XDG_CONFIG_HOME": "/nowhere"}, None),
    ]:
        value = load_configuration(settings, env=variables, system_file=system).group
        origins.append((value.value, value.origin.split()[0]))
        assert file is None or file.exists()
    nothing = load_configuration(
        Settings(), env=env | {"XDG_CONFIG_HOME": "/nowhere"}, system_file=tmp_path / "no"
    )

    assert origins == [
        ("from-flag", "flag"),
        ("from-env", "environment"),
        ("prod-a", "user"),
        ("from-system", "system"),
    ]
    assert (nothing.group.value, nothing.group.origin) == ("local", "default")


def test_files_lie_over_each_other(env: dict[str, str], user: Path, tmp_path: Path) -> None:
    """A user's file changes single values of a context that the system's file gives."""
    system = tmp_path / "system.yaml"
    system.write_text("contexts: {prod-a: {masters: [10.9.9.9:1], control: [10.9.9.9:2]}}\n")

    context = load_configuration(Settings(), env=env, system_file=system).context("prod-a")

    assert context is not None
    assert context.masters == ["10.0.0.1:7800"]
    assert context.control == ["10.9.9.9:2"]


def test_context(env: dict[str, str], user: Path) -> None:
    """A context brings its addresses, its environment and its protection."""
    target = resolve(Settings())

    assert target.label == "prod-a (production)"
    assert target.masters == ["10.0.0.1:7800"]
    assert target.protect
    with pytest.raises(UsageError, match="not a group on this machine"):
        target.require_local()


def test_no_start_of_a_context(env: dict[str, str], user: Path) -> None:
    """A context is not started here: it runs elsewhere."""
    with pytest.raises(UsageError, match="runs elsewhere"):
        resolve(Settings(), starting=True)


def test_two_of_one_name(env: dict[str, str], user: Path) -> None:
    """A context and a local group of one name are never confused: neither is taken."""
    local_group(env, "prod-a")

    with pytest.raises(UsageError, match="both a context and a local group"):
        resolve(Settings())


def test_default(env: dict[str, str]) -> None:
    """With nothing said, commands act on the local group, whether it was started or not."""
    assert resolve(Settings()).label == "local (local)"
    assert resolve(Settings(group="mine"), starting=True).name == "mine"


def test_unknown_group(env: dict[str, str], user: Path) -> None:
    """A name nobody knows is refused with those that are known."""
    local_group(env, "dev")

    with pytest.raises(UsageError) as caught:
        resolve(Settings(group="prod-b"))

    assert "prod-a, dev" in caught.value.fix


def test_use_keeps_the_file(env: dict[str, str], user: Path) -> None:
    """Choosing a group changes one line of the user's file; comments stay."""
    use("dev", env=env)

    assert user.read_text() == PROD.replace("group: prod-a", "group: dev")


def test_how_a_context_is_defined(env: dict[str, str], user: Path) -> None:
    """Who chooses a context that is not there is told where to write it; the help shows one that is read."""
    run = runner({**os.environ, **env})
    refused = run("context", "use", "nowhere")
    text = run("context", "--help").stdout
    example = text[text.index("    contexts:") : text.index("  Example:")]
    user.write_text(textwrap.dedent(example))

    assert f"define it in {user}" in refused.stderr
    assert load_configuration(Settings(), env=env).context("prod-a") is not None


def test_use_makes_the_file(env: dict[str, str]) -> None:
    """Choosing a group makes the file where there is none."""
    path = use("dev", env=env)

    assert load_configuration(Settings(), env=env).group.value == "dev"
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["contexts: {a: {master: [x]}}", "schema: 2", "group: [", "[]"])
def test_bad_file(text: str, env: dict[str, str], user: Path) -> None:
    """A file that is wrong is one clear error that names it."""
    user.write_text(text)

    with pytest.raises(ConfigError, match=r"config\.yaml"):
        resolve(Settings())
