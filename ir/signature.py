"""The arguments of a Pipe: those of the model, and the loss's target."""

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

from pippy.ir.errors import InputError
from pippy.ir.trees import describe

if TYPE_CHECKING:
    from pippy.ir.pipe import Pipe

_KINDS = {
    "": inspect.Parameter.POSITIONAL_OR_KEYWORD,
    "*": inspect.Parameter.VAR_POSITIONAL,
    "**": inspect.Parameter.VAR_KEYWORD,
}


def signature_of(pipe: "Pipe") -> inspect.Signature:
    """The signature of the model's inputs; the loss's target, if there is one, comes after them."""
    nodes = [node for node in pipe.split_gm.graph.find_nodes(op="placeholder") if node.name != pipe.target_name]
    parameters = [_parameter(node, pipe.wiring.defaults) for node in nodes]
    after_default = False
    for index, parameter in enumerate(parameters):  # what follows a default can only be given by name
        keyword_only = after_default and parameter.default is parameter.empty and parameter.kind is _KINDS[""]
        if keyword_only:
            parameters[index] = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        after_default = after_default or parameter.default is not parameter.empty
    return inspect.Signature(sorted(parameters, key=lambda parameter: parameter.kind))


def _parameter(node: fx.Node, defaults: Mapping[str, Any]) -> inspect.Parameter:
    name = str(node.target)
    stars = name[: len(name) - len(name.lstrip("*"))]
    default = defaults.get(node.name, inspect.Parameter.empty)
    return inspect.Parameter(name.lstrip("*"), _KINDS[stars], default=default)


def bind(pipe: "Pipe", args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The value of each placeholder of the top-level graph, by the placeholder's name.

    The target may be given by name; else it is the last positional argument.
    """
    args, kwargs = list(args), dict(kwargs)
    _check_concrete(pipe, kwargs)
    values: dict[str, Any] = {}
    signature = signature_of(pipe)
    if pipe.target_name is not None:
        if pipe.target_name in kwargs:
            values[pipe.target_name] = kwargs.pop(pipe.target_name)
        elif args:
            values[pipe.target_name] = args.pop()
        else:
            raise InputError(f"the loss's {pipe.target_name!r} is missing; call the Pipe as {_usage(pipe, signature)}")
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        given = [describe(value) for value in args] + [f"{name}={describe(value)}" for name, value in kwargs.items()]
        raise InputError(
            f"{error}; the Pipe is called as {_usage(pipe, signature)}, and was given ({', '.join(given)})"
            + (f" before the target {describe(values[pipe.target_name])}" if pipe.target_name else "")
        ) from None
    bound.apply_defaults()
    _check_given(pipe, bound.arguments)
    nodes = pipe.split_gm.graph.find_nodes(op="placeholder")
    values.update(
        {node.name: bound.arguments[str(node.target).lstrip("*")] for node in nodes if node.name not in values}
    )
    return values


def _check_given(pipe: "Pipe", arguments: Mapping[str, Any]) -> None:
    missing = [name for name in pipe.given if arguments.get(name) is None]
    if missing:
        fixed = ", ".join(f"{name!r}: None" for name in missing)
        raise InputError(
            f"{', '.join(map(repr, missing))} is None, and forward does something else then; the model was traced as given it. "
            f"For a Pipe that runs without: pipeline(model, ..., concrete_args={{{fixed}}})"
        )


def _check_concrete(pipe: "Pipe", kwargs: dict[str, Any]) -> None:
    for name, fixed in pipe.concrete_args.items():
        if name in kwargs and kwargs.pop(name) != fixed:
            raise InputError(f"the model was traced with {name}={fixed!r}; trace it again to run it with another value")


def _usage(pipe: "Pipe", signature: inspect.Signature) -> str:
    names = [str(parameter) for parameter in signature.parameters.values()]
    return f"pipe({', '.join([*names, *([pipe.target_name] if pipe.target_name else [])])})"
