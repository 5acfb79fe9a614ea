"""The arguments of a model's forward: which of them are constants of the graph, and which are optional."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import fx, nn

from pippy.ir.errors import TracingError
from pippy.ir.near_names import did_you_mean


def check_concrete_args(model: nn.Module, concrete_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """``concrete_args`` as a dict. Raises if a name or a value in it cannot be used."""
    if concrete_args is not None and not isinstance(concrete_args, Mapping):
        raise TracingError(
            f"concrete_args is {concrete_args!r}; give a dict from names of forward's arguments to values"
        )
    concrete, names = dict(concrete_args or {}), _named_arguments(model)
    for name, value in concrete.items():
        if name not in names:
            hint = did_you_mean(name, names, most=1, cutoff=0.6) or f"it takes {', '.join(names) or 'none'}"
            raise TracingError(f"concrete_args[{name!r}]: forward has no argument of that name; {hint}")
        if not (value is None or isinstance(value, (bool, int, float, str))):
            raise TracingError(
                f"concrete_args[{name!r}] is a {type(value).__name__}; a value that the graph is specialized to must be "
                "None, a bool, an int, a float or a str"
            )
    return concrete


def signature_of(model: nn.Module) -> inspect.Signature:
    """The signature of forward, without its annotations: not every annotation can be pickled."""
    parameters = inspect.signature(model.forward).parameters.values()
    return inspect.Signature([each.replace(annotation=inspect.Parameter.empty) for each in parameters])


def _named_arguments(model: nn.Module) -> list[str]:
    """The names of forward's arguments, in the order of the placeholders that fx makes."""
    star = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind not in star]


def drop_concrete_inputs(model: nn.Module, graph: fx.Graph, concrete_args: Mapping[str, Any]) -> None:
    """Remove the placeholder and the assertion that fx leaves for each concrete argument. `ir/signature.py` checks calls."""
    for node, name in zip(graph.find_nodes(op="placeholder"), _named_arguments(model)):
        if name in concrete_args:
            for checked in [user for first in node.users for user in (*first.users, first)]:
                graph.erase_node(checked)
            graph.erase_node(node)


def optional_inputs(model: nn.Module, graph: fx.Graph) -> list[str]:
    """The inputs whose default is None. A forward may do something else where the caller leaves one out."""
    parameters = inspect.signature(model.forward).parameters
    placeholders = {str(node.target) for node in graph.find_nodes(op="placeholder")}
    return [name for name, each in parameters.items() if each.default is None and name in placeholders]


def nullable_inputs(model: nn.Module, graph: fx.Graph) -> list[str]:
    """The inputs without a default that may be given as None, for all that the graph tells.

    An operation on an input fails by itself if the input is None. What is handed to a function of the user's own, or only
    as a further argument, need not.
    """
    parameters = inspect.signature(model.forward).parameters
    placeholders = [node for node in graph.find_nodes(op="placeholder") if str(node.target) in parameters]
    required = [node for node in placeholders if parameters[str(node.target)].default is inspect.Parameter.empty]
    return [str(node.target) for node in required if not any(_needs_value(user, node) for user in node.users)]


def _needs_value(user: fx.Node, value: fx.Node) -> bool:
    """Whether an operation fails if ``value`` is None."""
    if not user.args or user.args[0] is not value:
        return False
    home = getattr(user.target, "__module__", None) or ""
    return user.op in ("call_method", "call_module") or home.partition(".")[0] in ("torch", "_operator", "builtins", "")
