"""The command line of an experiment of several parts: which parts, and sizes, all of which `--tiny` makes small."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import torch

Sizes = dict[str, Any]
Part = Callable[[Sizes], None]


def run_parts(
    doc: str | None,
    parts: Mapping[str, Part],
    sizes: Mapping[str, Any],
    tiny: Mapping[str, Any],
    arguments: list[str] | None,
) -> None:
    """Run the parts that were asked for, or all, with the sizes.

    >>> run_parts("", {"first": print}, {"rows": 4, "rounds": 5}, {"rows": 1}, ["--tiny", "first", "--rounds", "2"])
    {'rows': 1, 'rounds': 2}
    <BLANKLINE>
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"some of: {', '.join(parts)}; all if left out")
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=type(size), help=f"{size}; with --tiny {tiny.get(name, size)}")
    parser.add_argument("--tiny", action="store_true")
    given = vars(parser.parse_args(arguments))
    unknown = sorted(set(given["parts"]) - set(parts))
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; take some of {', '.join(parts)}")
    torch.set_num_threads(1)
    usual = {**sizes, **tiny} if given["tiny"] else sizes
    chosen = {name: usual[name] if given[name] is None else given[name] for name in sizes}
    for part in given["parts"] or parts:
        parts[part](chosen)
        print(flush=True)
