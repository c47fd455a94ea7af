"""Looks at a page in a real browser: what sticks out, which links are dead."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

MEASURE = """<script>
addEventListener('load', () => {
  document.querySelectorAll('details').forEach(d => d.open = true);
  const page = document.documentElement, out = [];
  const wide = [...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll')
    && e.getBoundingClientRect().right > page.clientWidth + 1).map(e => e.tagName + ':' + e.textContent.slice(0, 30));
  const dead = [...document.querySelectorAll('a[href]')].map(a => a.getAttribute('href'))
    .filter(h => !h.startsWith('#') || !document.getElementById(h.slice(1)));
  parent.postMessage(JSON.stringify({over: page.scrollWidth - page.clientWidth, wide, dead,
    width: page.clientWidth, rails: document.querySelectorAll('ol.path').length,
    links: document.querySelectorAll('a[href]').length,
    bad: document.querySelectorAll('ol.path li.fail').length}), '*');
});
</script></body>"""


def in_browser(page: str, width: int, folder: Path) -> dict[str, Any]:
    """What a browser makes of a page in a window of that width, with everything that folds opened."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("install chromium: apt-get install chromium")
    inner = html.escape(page.replace("</body>", MEASURE))  # a frame: windows of a browser have a least width
    (folder / "outer.html").write_text(
        f'<!doctype html><script>addEventListener("message", e => document.title = e.data)</script>'
        f'<iframe style="width:{width}px;height:900px;border:0" srcdoc="{inner}"></iframe>'
    )
    argv = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000", "--dump-dom"]
    argv += [
        "--virtual-time-budget=5000",
        f"--user-data-dir={folder}/profile",
        (folder / "outer.html").as_uri(),
    ]
    done = subprocess.run(argv, capture_output=True, timeout=90, check=True, text=True)
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert title is not None, done.stderr[-500:]
    measured: dict[str, Any] = json.loads(html.unescape(title[1]))
    return measured
