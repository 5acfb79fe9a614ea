"""The options of ``compile=``: what they mean for stages, which run as graphs, and which of them are refused."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import nn

from pippy.drivers.base.errors import DriverError
from pippy.ir.base.readable import brief, did_you_mean, shortened

GRAPHS, INDUCTOR = "graphs", "inductor"
_FORMS = 8  # as many as torch.compile compiles of a function

# Options of torch.compile that have no meaning for stages, and why.
_WITHOUT_MEANING = {
    "dynamic": "a graph of a stage is for the sizes of its inputs, and others have a graph of their own",
    "name": "stages have names",
    "shapes_spec": "a graph of a stage is for the sizes of its inputs",
    "guard_filter_fn": "graphs of stages have no guards",
    "use_aoti": "pieces of stages are kept in inductor's cache, and not in packages",
}


@dataclass(frozen=True)
class CompileOptions:
    """How the stages of a driver are compiled: by which backend of torch.compile, with which of its options.

    The backend "graphs" compiles nothing. With ``fullgraph``, a stage that has no graph is an error. ``limit`` is the number
    of forms of inputs that a stage has graphs for.
    """

    backend: str | Callable[..., Any] = INDUCTOR
    mode: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    fullgraph: bool = False
    limit: int = _FORMS


def compile_options(given: Any) -> CompileOptions | None:
    """What is given as ``compile=``, checked; None if stages are not compiled.

    >>> compile_options(True).backend, compile_options(False)
    ('inductor', None)
    >>> compile_options({"backend": "eager", "fullgraph": True})
    CompileOptions(backend='eager', mode=None, options={}, fullgraph=True, limit=8)
    >>> compile_options({"fast": True})
    Traceback (most recent call last):
    pippy.drivers.base.errors.DriverError: compile={'fast': True}: 'fast' is no option of torch.compile; those are ...
    """
    if given is None or given is False:
        return None
    what = f"compile={brief(given)}"
    if isinstance(given, Mapping):
        options = dict(given)
    elif given is True:
        options = {}
    elif isinstance(given, str) or callable(given):
        options = {"backend": given}
    else:
        raise DriverError(
            f"{what} is a {type(given).__name__}; give True, 'graphs', a backend of torch.compile or its name, or a dict of "
            "options of torch.compile"
        )
    _check(options, what)
    if options.get("disable"):
        return None
    return CompileOptions(
        options.get("backend") or _default_backend(),
        options.get("mode"),
        {name.replace("-", "_"): value for name, value in (options.get("options") or {}).items()},
        bool(options.get("fullgraph")),
        options.get("recompile_limit") or _FORMS,
    )


def _check(options: dict[str, Any], what: str) -> None:
    known = [name for name in signature(torch.compile).parameters if name != "model"]
    for name in options:
        if name not in known:
            raise DriverError(f"{what}: {brief(name)} is no option of torch.compile; those are {', '.join(known)}")
    inner = options.get("options")
    for name, value in (*options.items(), *(inner.items() if isinstance(inner, Mapping) else ())):
        if name in _WITHOUT_MEANING and value not in (None, False):
            raise DriverError(f"{what}: {name}= is not for stages: {_WITHOUT_MEANING[name]}; leave it out")
    ours = options.get("backend") == GRAPHS
    if ours and (options.get("mode") or inner):
        raise DriverError(f"{what}: 'graphs' compiles nothing, so it takes no mode= and no options=; leave them out")
    if options in ({}, {"backend": GRAPHS}, {"backend": INDUCTOR}):
        return  # what follows imports torch's compiler, which is slow
    try:
        torch.compile(nn.Identity(), **options | ({"backend": "eager"} if ours else {}))  # compiles nothing yet
    except Exception as error:  # torch has no one error for what it refuses here
        first = shortened(str(error).strip().partition("\n")[0], 300)
        backend = options.get("backend")
        names = [GRAPHS, *torch.compiler.list_backends()]
        near = did_you_mean(backend, names) if isinstance(backend, str) and backend not in names else ""
        raise DriverError(
            f"{what}: torch.compile refuses it: {type(error).__name__}: {first}{near and '; '}{near}"
        ) from error


def _default_backend() -> Any:
    """That of torch.compile, which a script may have set."""
    return torch.compiler.get_default_backend() if "torch._dynamo" in sys.modules else INDUCTOR
