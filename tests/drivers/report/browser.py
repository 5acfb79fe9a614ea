"""Opens a page in Chromium, without a network, and gives the page as its script left it."""

import html
import re
import shutil
import subprocess

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium here; on Debian: apt-get install chromium")


def opened(page, script, view="", profile=None):
    """The page after ``script`` ran, and what is in the data of its root, by name. An error of the page is one of these."""
    acting = page.with_name(f"acting-{page.name}")
    acting.write_text(page.read_text().replace("</body>", f"<script>{script}</script></body>"))
    options = ["--virtual-time-budget=10000"]  # what a page does a moment later is over, on a busy machine too
    options += ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1300,900"]
    options += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={profile or page.parent / 'profile'}"]
    command = [BROWSER, *options, "--dump-dom", f"{acting.as_uri()}{view}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, data_of(done.stdout)


def cut_at(page, width):
    """What is cut in a window so wide: the texts of tables and cells that are wider than the box around them."""
    text = html.escape(page.read_text())
    frame = page.with_name(f"narrow-{page.name}")
    style = f"width:{width}px;height:900px;border:0"
    frame.write_text(f'<html><head></head><body><iframe srcdoc="{text}" style="{style}"></iframe></body></html>')
    _, found = opened(frame, _FIND_CUT)
    return found["cut"]


_FIND_CUT = """
const data = document.documentElement.dataset;
document.querySelector("iframe").addEventListener("load", event => {
  const page = event.target.contentDocument, all = [...page.querySelectorAll("html, .wide, td, .findings")];
  const cut = all.filter(each => each.scrollWidth > each.clientWidth);
  data.cut = cut.map(each => each.tagName + " " + each.textContent).join("|");
});
"""


def data_of(text):
    """What is in the data of a page's root, by name."""
    return dict(re.findall(r'data-(\w+)="([^"]*)"', text.split("<head>")[0]))
