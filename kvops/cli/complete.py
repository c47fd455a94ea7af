"""What completion offers for names: members, groups, topics. A name that cannot be found out is not offered."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class, split_arg_string

from kvops.cli.context import load_configuration, resolve
from kvops.cli.options import Settings
from kvops.errors import KvopsError
from kvops.fleet.group_folder import local_groups
from kvops.fleet.group_state import Member

ROLES: Final = ("master", "store")


def _settings(ctx: click.Context) -> Settings:
    """What the line says so far of which group is meant; what is nearer to the command wins."""
    said: dict[str, str] = {}
    inner: click.Context | None = ctx
    while inner is not None:
        for name in ("group", "state_dir"):
            if inner.params.get(name):
                said.setdefault(name, str(inner.params[name]))
        inner = inner.parent
    folder = said.get("state_dir")
    return Settings(group=said.get("group"), state_dir=None if folder is None else Path(folder))


def _members(ctx: click.Context) -> list[Member]:
    try:
        state = resolve(_settings(ctx)).state
    except KvopsError:
        return []
    return [] if state is None else state.members


def _begin(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]


def members(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Members of the local group that are not named yet."""
    said = ctx.params.get(param.name or "") or ()
    return _begin((one.name for one in _members(ctx) if one.name not in said), incomplete)


def members_and_roles(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The same, and roles."""
    return [*members(ctx, param, incomplete), *_begin(ROLES, incomplete)]


def planned(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """``WHEN:DO:MEMBER``, once WHEN is there."""
    when, colon, _ = incomplete.partition(":")
    if not colon:
        return []
    from kvops.inference.replay import ACTIONS

    names = [one.name for one in _members(ctx)]
    return _begin((f"{when}:{action}:{name}" for action in ACTIONS for name in names), incomplete)


def groups(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Contexts and local groups."""
    try:
        configuration = load_configuration(_settings(ctx))
    except KvopsError:
        return []
    folder = Path(configuration.state_dir.value).expanduser().absolute()
    return _begin([*configuration.contexts, *local_groups(folder)], incomplete)


class _Bash(BashComplete):
    """
    Bash cuts words at colons, and wants back what follows the last one: ``30s:kill:store-2`` is five words to
    it.
    """

    _kept = 0  # letters that bash keeps of the last word

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words with their colons, up to the one that is being written."""
        cut = split_arg_string(os.environ["COMP_WORDS"])
        last = int(os.environ["COMP_CWORD"])
        cut += [""] * (last + 1 - len(cut))  # nothing of the last word is written yet
        words: list[str] = []
        for word in cut[1 : last + 1]:
            if words and word and (word == ":" or words[-1].endswith(":")):
                words[-1] += word
            else:
                words.append(word)
        incomplete = words.pop()
        self._kept = incomplete.rfind(":") + 1
        return words, incomplete

    def format_completion(self, item: CompletionItem) -> str:
        """Without what bash holds to be another word."""
        return f"{item.type},{item.value[self._kept :]}"


def register() -> None:
    """Complete for bash in this way."""
    add_completion_class(_Bash, "bash")
