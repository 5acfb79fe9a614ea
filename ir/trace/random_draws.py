"""Refuses random numbers that forward draws, or seeds, while it is traced: every run would use the same ones.

    torch.rand(3)                                    recorded, and drawn in each run
    random.random(), a random.Random of one's own    refused before it is drawn: Python tells of each call of a C function
    torch.manual_seed, a generator's seed            the same
    numpy.random.rand, also as an imported name      refused before it is drawn, by a patch
    numpy Generators that the model holds, also in   refused afterwards, since their state has changed
      lists and objects, or its files

No generator of the process is set back, so other threads draw on.
"""

import copy
import os
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import nn

from pippy.ir.base import source
from pippy.ir.base.errors import TracingError
from pippy.ir.trace.left_as_it_was import numpys_generators
from pippy.ir.trace.refusals import refused
from pippy.ir.trace.tracing_thread import patched_here

_SEEDING = frozenset(("manual_seed", "seed", "set_state"))
_ASKING = frozenset(("getstate", "setstate", "get_state", "initial_seed", "get_bit_generator", "get_printoptions"))


@contextmanager
def refusing_numpys_draws(model: nn.Module) -> Iterator[None]:
    """A context in which draws and seeds of numpy's raise a `TracingError`."""
    with _watching_numpy(model) if "numpy" in sys.modules else nullcontext():
        yield


def check_no_draw(function: Any, frame: FrameType) -> None:
    """Raise if the call of the C function ``function`` draws random numbers, or seeds a generator."""
    drawn = _drawn_from(function)
    if drawn and not _is_importing(frame):
        raise draw_refusal(drawn, frame)


def _drawn_from(function: Any) -> str:
    """The generator that a call of ``function`` draws from or seeds; empty if none."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, random.Random):
        return "" if function.__name__ in _ASKING else "Python's random"
    if isinstance(owner, torch.Generator):
        return "torch" if function.__name__ in _SEEDING else ""
    return "the system's" if function is os.urandom else ""


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not source.TRACE:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


@contextmanager
def _watching_numpy(model: nn.Module) -> Iterator[None]:
    numpy, generators = sys.modules["numpy"].random, numpys_generators()
    generators = [
        each for each in generators if each is not numpy.mtrand._rand
    ]  # that is patched; other threads draw on
    before = [copy.deepcopy(_bits(each).state) for each in generators]
    with ExitStack() as stack:
        for module in (numpy, *_files(model)):
            for name, value in list(vars(module).items()):
                if getattr(value, "__self__", None) is numpy.mtrand._rand and name not in _ASKING:
                    stack.enter_context(patched_here(module, name, _refuse_numpy))
        yield
    drawn = [pair for pair in zip(generators, before) if repr(_bits(pair[0]).state) != repr(pair[1])]
    for generator, state in drawn:
        _bits(generator).state = state
    if drawn:
        raise draw_refusal("numpy's", None)


def _refuse_numpy(*_: Any, **__: Any) -> None:
    raise draw_refusal("numpy's", sys._getframe(1))


def _bits(generator: Any) -> Any:
    return generator._bit_generator if hasattr(generator, "_bit_generator") else generator.bit_generator


def _files(model: nn.Module) -> list[ModuleType]:
    """The Python modules that define the classes of ``model``, without torch's."""
    names = {each.__module__ for module in model.modules() for each in type(module).__mro__} - {"builtins"}
    return [sys.modules[name] for name in names if name in sys.modules and not name.startswith("torch.")]


def draw_refusal(generator: str, frame: FrameType | None) -> TracingError:
    """The error for a draw from ``generator`` on the user's line below ``frame``."""
    where = source.of_frame(frame)
    return refused(
        TracingError(
            f"forward() draws or seeds random numbers ({generator}) in a way that cannot be recorded, so each run would repeat "
            "those of tracing"
            + (f":\n{where.excerpt()}\n" if where else "; ")
            + "What to do: draw them with torch functions (torch.rand(()) < p and torch.where)"
        )
    )
