"""How Sphinx makes the site of these pages: `make docs`. What the Markdown needs for it is in markdown_site.py;
the pages of source files are made by source_pages.py."""

import gc
import sys
from pathlib import Path

gc.disable()  # a fifth of the time, and nothing is left to free: the process ends with the site

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from markdown_site import MOVED  # noqa: E402
from source_pages import linkcode_resolve  # noqa: E402, F401  sphinx.ext.linkcode looks for it here

project = "pippy"
copyright = "the authors of pippy"
html_title = "pippy"

# The repository is the source folder: so the links between README.md, docs/ and exps/ are those that GitHub follows.
root_doc = "docs/index"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**", "exps/README.md"]
exclude_patterns = [".*", "build", "dist", "out", "drivers", "ir", "pippy", "tests", "docs/templates", "**/__pycache__"]
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.linkcode",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "markdown_site",
    "source_pages",
]
templates_path = ["templates"]

myst_heading_anchors = 6
myst_enable_extensions = ["attrs_inline"]

default_role = "py:obj"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_context = {"moved": MOVED}
html_additional_pages = {"index": "first_page.html", **dict.fromkeys(MOVED, "moved.html")}
html_copy_source = False
html_show_sphinx = False
pygments_style = "default"
pygments_dark_style = "github-dark"

copybutton_selector = "div:not(.output) > div.highlight > pre"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
