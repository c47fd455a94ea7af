"""What every HTML report of ours is made of: one self-contained page, tables that fit a telephone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources


def page(*, kind: str, title: str, body: str, style: str = "") -> str:
    """
    A whole page that fetches nothing from anywhere.

    Args:
        kind: What made it, such as ``"kvops replay"``.
        title: Plain text.
        body: HTML of ``main``.
        style: CSS beyond that of all reports.
    """
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)} · {escape(kind)}</title><style>{_asset('report.css')}{style}</style></head>"
        "<body><main>"
    )
    return f"{head}{body}</main><script>{_asset('report.js')}</script></body></html>\n"


def _asset(name: str) -> str:
    return resources.files("kvops.inference").joinpath(name).read_text(encoding="utf-8")


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Sequence[int] = (),
    unbroken: Sequence[int] = (),
    narrow: bool = False,
    stack: bool = False,
) -> str:
    """
    A table; ``numbers`` and ``unbroken`` are columns that are right-aligned, or never broken.

    With ``stack``, a row becomes lines with the columns' names before them on a screen too narrow for the table.
    """

    def cell(tag: str, index: int, text: str) -> str:
        css = ' class="n"' if index in numbers else ' class="k"' if index in unbroken else ""
        name = f' data-name="{escape(head[index])}"' if stack and tag == "td" and head[index] else ""
        return f"<{tag}{css}{name}>{escape(text)}</{tag}>"

    top = "".join(cell("th", index, text) for index, text in enumerate(head))
    body = "".join(
        "<tr>" + "".join(cell("td", i, text) for i, text in enumerate(row)) + "</tr>" for row in rows
    )
    first = f"<thead><tr>{top}</tr></thead>" if any(head) else ""
    css = "scroll" + " narrow" * narrow + " stack" * stack
    return f'<div class="{css}"><table>{first}<tbody>{body}</tbody></table></div>'
