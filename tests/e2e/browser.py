"""Looks at pages in a real headless browser: what their scripts have drawn, and whether each label can be read."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
needs_browser = pytest.mark.skipif(not BROWSER, reason="no chromium is installed (apt-get install chromium)")
WIDTHS = (360, 800, 1500)
"""Of windows, in pixels: a telephone's, half a screen, a screen."""
DARK = ("--force-dark-mode",)

# A page for each width in a frame of its own; what is wrong with each comes as JSON. Letters need 8 pixels, and WCAG's contrast.
LOOKING = r"""<!doctype html><meta charset="utf-8"><body><pre id="found"></pre><script>
const page = PAGE, widths = WIDTHS, found = [];
const numbers = color => (color.match(/[\d.]+/g) || []).map(Number);
const linear = value => (value /= 255) <= .03928 ? value / 12.92 : ((value + .055) / 1.055) ** 2.4;
const light = color => { const [r, g, b] = numbers(color).map(linear); return .2126 * r + .7152 * g + .0722 * b; };
const shows = color => numbers(color).length === 3 || numbers(color)[3] > 0;
const backdrop = (element, view) => {
  for (let at = element; at; at = at.parentElement) {
    const color = view.getComputedStyle(at).backgroundColor;
    if (shows(color)) return color;
  }
  return "rgb(255, 255, 255)";
};
const common = (a, b, from, to) => Math.min(a[to], b[to]) - Math.max(a[from], b[from]);
function look(width, view) {
  const root = view.document, text = element => element ? element.textContent.trim().slice(0, 40) : "";
  const wrong = (what, element) => found.push([width, what, text(element)]);
  if (root.documentElement.scrollWidth > root.documentElement.clientWidth) wrong("wider than the window");
  const labels = [...root.querySelectorAll("svg text, h1, h2, p, td, th, label")].filter(text);
  if (labels.length < 8) wrong("few labels: " + labels.length);
  for (const one of labels) {
    const style = view.getComputedStyle(one), box = one.getBoundingClientRect(), svg = one.ownerSVGElement;
    if (box.height < 8) wrong("too small", one);
    const [a, b] = [light(svg ? style.fill : style.color), light(backdrop(one, view))].sort((x, y) => y - x);
    if ((a + .05) / (b + .05) < 4.5) wrong("too pale", one);
    const content = root.createRange(), isWord = one.matches("td, th") && !/\s/.test(text(one));
    content.selectNodeContents(one);
    if (isWord && content.getBoundingClientRect().height > 30) wrong("a word in pieces", one);
    if (!svg) continue;
    const frame = svg.getBoundingClientRect(), isIn = box.left >= frame.left && box.right <= frame.right + 1;
    if (!isIn || box.top < frame.top || box.bottom > frame.bottom + 1) wrong("cut off", one);
    for (const other of svg.querySelectorAll("text")) {
      const its = other.getBoundingClientRect();
      if (other !== one && common(box, its, "left", "right") > 1 && common(box, its, "top", "bottom") > 2)
        wrong("covers " + other.textContent, one);
    }
  }
}
let left = widths.length;
for (const width of widths) {
  const frame = document.createElement("iframe"); frame.style = `border: 0; height: 900px; width: ${width}px`;
  frame.onload = () => { look(width, frame.contentWindow); if (!--left) {
    const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
    document.getElementById("found").textContent = JSON.stringify({wrong: found, dark: isDark}); } };
  frame.srcdoc = page; document.body.append(frame);
}
</script>
"""


def shown(page: Path, *options: str) -> str:
    """Return the page's document after its script has run in the browser."""
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", *options]
    command += [f"--user-data-dir={page.parent / 'profile'}", "--virtual-time-budget=3000", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def labels_wrong(page: Path, dark: bool) -> list[Any]:
    """Return the labels of a page that cannot be read in a window of some width: (width, what is wrong, text)."""
    text = json.dumps(page.read_text()).replace("</", "<\\/")
    looking = page.with_name(f"looking-{page.name}.html")
    looking.write_text(LOOKING.replace("WIDTHS", json.dumps(WIDTHS), 1).replace("PAGE", text, 1))
    document = shown(looking, *(DARK if dark else ()))
    told = re.search(r'<pre id="found">(.+?)</pre>', document)
    assert told, document[-500:]
    found = json.loads(unescape(told[1]))
    assert found["dark"] is dark
    return list(found["wrong"])
