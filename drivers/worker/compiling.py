"""Stages compiled by `torch.compile`: checks the options where the driver is made, and uses them on a worker.

A stage is compiled when it is first called, and again for another size of micro-batch or another mode. Its backward is
compiled as one function. So when a backward comes in halves, I does all of it and W does nothing: autograd has one node for
the whole stage, and nothing outside can tell which part of it makes the gradients of weights. To compile each stage twice, with
its weights and without them, would run two graphs and keep more values from the forward.
"""

import os
from collections.abc import Iterable, Mapping
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pippy.drivers.base.errors import DriverError
from pippy.ir.base.brief import brief
from pippy.ir.run.stage_draws import draw_as_whole

if TYPE_CHECKING:
    from pippy.drivers.worker.compiled.stage_graphs import GraphsOfStages

GRAPHS, INDUCTOR = "graphs", "inductor"  # as options: stages run as graphs, as they are or compiled


def compile_options(given: Any) -> dict[str, Any] | str | None:
    """The options of torch.compile, None if stages are not compiled, or one of those words.

    >>> compile_options(True), compile_options(False)
    ({}, None)
    >>> compile_options({"backend": "eager"})
    {'backend': 'eager'}
    >>> compile_options({"fast": True})
    Traceback (most recent call last):
    pippy.drivers.base.errors.DriverError: compile={'fast': True}: 'fast' is no option of torch.compile; those are ...
    """
    if given is None or given is False:
        return None
    if given is True:
        return {}
    if given in (GRAPHS, INDUCTOR):
        return str(given)
    if not isinstance(given, Mapping):
        raise DriverError(
            f"compile={brief(given)} is a {type(given).__name__}; give 'graphs', 'inductor', True, or a dict of options "
            "of torch.compile"
        )
    options = dict(given)
    known = [name for name in signature(torch.compile).parameters if name != "model"]
    for name in options:
        if name not in known:
            raise DriverError(
                f"compile={brief(options)}: {brief(name)} is no option of torch.compile; those are {', '.join(known)}"
            )
    try:
        torch.compile(nn.Identity(), **options)  # compiles nothing yet
    except Exception as error:  # torch has no one error for what it refuses here
        first = str(error).strip().partition("\n")[0]
        raise DriverError(
            f"compile={brief(options)}: torch.compile refuses it: {type(error).__name__}: {first}"
        ) from error
    return options


def graphs_of_stages(options: Any) -> "GraphsOfStages | None":
    """The graphs that stages run as with these options; None if they do not."""
    if options not in (GRAPHS, INDUCTOR):
        return None
    from pippy.drivers.worker.compiled.inductor import Inductor  # slow to import: they record with fake tensors
    from pippy.drivers.worker.compiled.stage_graphs import GraphsOfStages

    if options == GRAPHS:
        return GraphsOfStages()
    _share_the_cores()
    return GraphsOfStages(Inductor())


def compile_modules(modules: Iterable[nn.Module], options: Mapping[str, Any]) -> None:
    """Set modules up to be compiled when they are first called.

    >>> module = nn.Linear(1, 1)
    >>> compile_modules([module], {"backend": "eager"})
    >>> module(torch.zeros(1, 1)).shape
    torch.Size([1, 1])
    """
    if options.get("backend", "inductor") == "inductor":
        _share_the_cores()
    for module in modules:
        draw_as_whole(module)
        module.compile(**options)


def _share_the_cores() -> None:
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        from torch._inductor import config  # slow to import

        config.compile_threads = torch.get_num_threads()  # a worker's share of the cores: all compile at the same time
