"""The stance of `torch.compiler.set_stance`: what it says of stages, in the script and on the workers."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

DEFAULT, EAGER, KNOWN, FAIL = "default", "force_eager", "eager_on_recompile", "fail_on_recompile"


class _Entered(threading.local):
    stance: str | None = None


_entered = _Entered()


def compile_stance() -> str | None:
    """The stance that is in force here; None for the default one, and for those that compile all in the end.

    >>> with in_stance("force_eager"):
    ...     compile_stance()
    'force_eager'
    """
    stance = _entered.stance
    if stance is None:
        dynamo = sys.modules.get("torch._dynamo.eval_frame")  # what was not imported has no stance
        stance = DEFAULT if dynamo is None else dynamo._stance.stance
    return stance if stance in (EAGER, KNOWN, FAIL) else None


def forced_backend() -> bool:
    """Whether a stance forces another backend on all that is compiled."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and dynamo._stance.backend is not None


@contextmanager
def in_stance(stance: str) -> Iterator[None]:
    """Inside, a stance is in force for the stages that this thread runs."""
    before = _entered.stance
    _entered.stance = stance
    try:
        yield
    finally:
        _entered.stance = before
