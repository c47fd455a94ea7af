"""Commands in README, docs and playbooks are commands that there are, with arguments that they take."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
import pytest

from kvops.cli.main import cli

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = sorted(
    page for pattern in ("*.md", "docs/*.md", "playbooks/*.md") for page in ROOT.glob(pattern)
)
FENCED: Final = re.compile(r"^```[a-z]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE: Final = re.compile(r"`(kvops [^`]+)`")
BETWEEN: Final = {"&&", "||", ";", "|", ">", "2>", ">>", "&"}
ELLIPSIS: Final = "…"  # stands for more of the kind


def commands(text: str) -> Iterator[tuple[str, bool]]:
    """Every line with a kvops command of a page, and whether it is whole: one in a sentence may be a name only."""
    for block in FENCED.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            if re.search(r"\bkvops ", line):
                yield line, True
    for inline in INLINE.findall(FENCED.sub("", text)):
        yield " ".join(inline.split()), False


def calls(line: str) -> Iterator[list[str]]:
    """The arguments of each call of kvops on a line of a shell."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&<>")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word not in BETWEEN:
            words.append(word)
            continue
        start = words.index("kvops") + 1 if "kvops" in words[:2] else None  # after sudo, or a time
        if start is not None:
            yield words[start:]
        words = []


def parse(args: list[str]) -> None:
    """Have click read arguments as it would for a call, and do nothing."""
    context = cli.make_context("kvops", args.copy())
    while isinstance(context.command, click.Group):
        rest = [*context._protected_args, *context.args]
        if not rest:
            return  # a group that does something by itself
        name, command, rest = context.command.resolve_command(context, rest)
        assert command is not None
        context = command.make_context(name, rest, parent=context)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_are_commands(page: Path) -> None:
    """Whoever copies a command gets no usage error: it exists, takes these options, and this many arguments."""
    wrong = []
    for line, whole in commands(page.read_text()):
        for args in calls(line):
            try:
                parse([arg for arg in args if arg != ELLIPSIS])
            except click.exceptions.Exit:  # --help, --version
                continue
            except click.UsageError as error:
                unknown = isinstance(error, click.NoSuchOption) or "No such command" in error.message
                placeholder = any(arg.isupper() and f"'{arg}'" in error.message for arg in args)
                if unknown or (whole and not placeholder):
                    wrong.append(f"kvops {shlex.join(args)}: {error.format_message()}")
    assert not wrong, "\n".join(wrong)
