"""The name of the loss's target among the inputs of a Pipe."""

from collections.abc import Collection
from itertools import count


def target_name(inputs: Collection[str]) -> str:
    """The name of the target, for a model whose inputs have these names.

    >>> target_name(["x"]), target_name(["x", "target", "target_1"])
    ('target', 'target_2')
    """
    return free_name("target", inputs)


def free_name(name: str, taken: Collection[str]) -> str:
    """``name``, with a number if it is taken."""
    return next(each for each in (name if at == 0 else f"{name}_{at}" for at in count()) if each not in taken)
