"""The colours of drawings, for light and dark pages. Passes have the same on both: their names are written in them."""

from collections.abc import Mapping

NAMED = "#10151b"  # what is written in a pass
INK, FAINT, GROUND = "#1f2328", "#d0d7de", "#ffffff"
DARK_INK, DARK_FAINT, DARK_GROUND = "#e6edf3", "#30363d", "#0d1117"


def in_the_dark(rules: Mapping[str, str]) -> str:
    """A style sheet for readers who prefer dark pages, from selectors and what holds for them.

    >>> in_the_dark({".ground": f"fill: {DARK_GROUND}"})
    '@media (prefers-color-scheme: dark) { .ground { fill: #0d1117 } }'
    """
    return f"@media (prefers-color-scheme: dark) {{ {' '.join(f'{each} {{ {its} }}' for each, its in rules.items())} }}"
