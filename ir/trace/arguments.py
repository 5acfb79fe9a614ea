"""The call of a model's forward while it is traced: which of its arguments are inputs of the graph, and which are constants."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from torch import fx, nn

from pippy.ir.base.errors import InputError, TracingError
from pippy.ir.base.fake_mode import FakeResults
from pippy.ir.base.readable import brief, did_you_mean, some
from pippy.ir.base.trees import describe, tensors
from pippy.ir.call.signature import target_name
from pippy.ir.trace.suppositions import SINGLE, Supposition
from pippy.ir.trace.tracing_thread import replaced
from pippy.ir.trace.trials import TraceTrials

_STAR = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_EMPTY = inspect.Parameter.empty


@dataclass
class Call:
    """A call of forward. Inputs and constants together are the parameters of ``signature``, which is that of the Pipe.

    ``concrete`` has the arguments that the graph is specialized to. ``known_inputs`` has the values of inputs that
    are known: those of the example, or defaults. ``by_position`` inputs are passed without their names, in order.
    """

    signature: inspect.Signature
    concrete: dict[str, Any] = field(default_factory=dict)
    known_inputs: dict[str, Any] = field(default_factory=dict)
    is_example: bool = False
    is_decorated: bool = False
    by_position: tuple[str, ...] = ()
    results: FakeResults = field(default_factory=FakeResults, compare=False)  # for all traces of the call
    trials: TraceTrials = field(default_factory=TraceTrials, compare=False)  # the same
    supposition: Supposition = field(default_factory=Supposition)

    def inputs(self) -> list[inspect.Parameter]:
        """The parameters that become placeholders, in order."""
        return [each for name, each in self.signature.parameters.items() if name not in self.concrete]

    def arguments(self, inputs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """What forward is called with, for the values of the inputs. Arguments that the example leaves out are left out."""
        values = {**inputs, **{name: value for name, value in self.concrete.items() if name in self.passed()}}
        positional = [values.pop(name) for name in self.by_position]
        return positional, values

    def result(self, output: Any) -> Any:
        """What the graph gives, of what forward gives."""
        return output

    def passed(self) -> set[str]:
        """The constants that are passed on, for they are not those that forward takes by itself."""
        return {
            name
            for name, value in self.concrete.items()
            if name in self.by_position or value is not self.signature.parameters[name].default
        }


@dataclass(frozen=True)
class Example:
    """Arguments of a call of a Pipe, of which the last may be the target of its loss, with the name ``target``."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: str | None = None

    @staticmethod
    def of(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], with_target: bool) -> "Example":
        """The example that is given by ``args`` and ``kwargs``."""
        target = target_name([*signature_of(model).parameters]) if with_target else None
        return Example(tuple(args), dict(kwargs), target)

    def of_model(self, signature: inspect.Signature) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the model, without the target."""
        kwargs = {name: value for name, value in self.kwargs.items() if name != self.target}
        if self.target is None or self.target in self.kwargs:
            return self.args, kwargs
        if not self.args:
            raise self._refusal(signature, f"missing the loss's {self.target!r}")
        return self.args[:-1], kwargs

    def bound(self, signature: inspect.Signature, constants: Mapping[str, Any]) -> inspect.BoundArguments:
        """The arguments of the model by their names, with constants. Raises if forward cannot be called with them."""
        args, kwargs = self.of_model(signature)
        try:
            return signature.bind(*args, **kwargs, **constants)
        except TypeError as error:
            raise self._refusal(signature, str(error)) from None

    def _refusal(self, signature: inspect.Signature, what: str) -> InputError:
        shown = [describe(value) for value in self.args]
        shown += [f"{name}={describe(value)}" for name, value in self.kwargs.items()]
        names = [*map(str, signature.parameters.values()), *([self.target] if self.target else [])]
        return InputError(
            f"example_args are not arguments of this Pipe: {what}; it is called as pipe({', '.join(names)}), and the example "
            f"is ({', '.join(some(shown))})"
        )


def check_examples(args: object, kwargs: object) -> None:
    """Refuse example arguments that are no tuple and no dict, and nested tensors in them."""
    if isinstance(args, Mapping):
        raise InputError(f"example_args is a {type(args).__name__}; arguments by their names are example_kwargs")
    if args is not None and not isinstance(args, (tuple, list)):
        raise InputError(
            f"example_args is a {type(args).__name__}; give a tuple of arguments, as in example_args=(x, target) or (x,)"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InputError(f"example_kwargs is a {type(kwargs).__name__}; give a dict from names of arguments to values")
    if any(each.is_nested for each in tensors([*(args or ()), *(kwargs or {}).values()])):
        raise InputError(
            "the example has a nested tensor, of which there is none without numbers; pad it (torch.nested.to_padded_tensor), "
            "or leave the example out"
        )


def call_of(model: nn.Module, concrete_args: Mapping[str, Any] | None, example: Example | None = None) -> Call:
    """The call to trace: of an example if one is given. Raises if ``concrete_args`` cannot be used."""
    concrete = check_concrete_args(model, concrete_args)
    if example is None:
        return _call_without_example(model, concrete)
    return _call_of_example(model, concrete, example)


def _call_without_example(model: nn.Module, concrete: dict[str, Any]) -> Call:
    signature, decorated = signature_of(model), is_decorated(model)
    named = {name: each for name, each in signature.parameters.items() if each.kind not in _STAR}
    defaults = {
        name: each.default
        for name, each in named.items()
        if isinstance(each.default, (int, float, *SINGLE)) and name not in concrete and each.default is not _EMPTY
    }
    fixed = {
        name: each.default for name, each in named.items() if name not in concrete and not _is_of_graphs(each.default)
    }
    by_position = tuple(name for name, each in named.items() if each.kind is not each.KEYWORD_ONLY)
    if decorated or fixed:
        signature = inspect.Signature(list(named.values()))
    return Call(
        signature, {**concrete, **fixed}, defaults, is_decorated=decorated or bool(fixed), by_position=by_position
    )


def without_inputs(call: Call, defaults: Mapping[str, Any]) -> Call:
    """The same call, without the inputs that these are the defaults of: forward takes the defaults themselves."""
    named = [each for each in call.signature.parameters.values() if each.kind not in _STAR]
    return replace(call, signature=inspect.Signature(named), concrete={**call.concrete, **defaults}, is_decorated=True)


def _is_of_graphs(default: Any) -> bool:
    """Whether a graph can have this default of an input: not if it is an object of a class of the user's."""
    known = isinstance(default, (Mapping, nn.Module)) or type(default).__module__.partition(".")[0] in (
        "torch",
        "numpy",
    )
    if default is _EMPTY or known:
        return True
    if isinstance(default, Enum):
        return isinstance(default, (int, str))
    try:
        fx.Tracer().create_arg(default)
    except NotImplementedError:
        return False
    return True


def _call_of_example(model: nn.Module, concrete: dict[str, Any], example: Example) -> Call:
    signature = signature_of(model)
    args, kwargs = example.of_model(signature)
    again = [name for name in concrete if name in kwargs]
    if again:
        raise TracingError(f"{', '.join(again)}: given by both concrete_args and example_kwargs; leave one of them out")
    bound = example.bound(signature, concrete)
    parameters: list[inspect.Parameter] = []
    values: dict[str, Any] = {}
    for name, each in signature.parameters.items():
        new = _spread(each, bound.arguments.get(name, _EMPTY))
        if each.kind is each.VAR_POSITIONAL and new:
            parameters = [before.replace(default=_EMPTY) for before in parameters]
        parameters += [parameter for parameter, _ in new]
        values.update({parameter.name: value for parameter, value in new if value is not _EMPTY})
    fixed = {name: value for name, value in values.items() if name in concrete or _is_constant(value)}
    by_position = tuple(values)[: len(args)]
    inputs = {name: value for name, value in values.items() if name not in fixed}
    constants = {**fixed, **{each.name: each.default for each in parameters if each.name not in values}}
    return Call(inspect.Signature(parameters), constants, inputs, True, is_decorated(model), by_position)


def _spread(parameter: inspect.Parameter, value: Any) -> list[tuple[inspect.Parameter, Any]]:
    """A parameter with its value; for `*args` and `**kwargs`, a parameter for each value that they hold."""
    if parameter.kind is parameter.VAR_POSITIONAL:
        items = () if value is _EMPTY else value
        kind = parameter.POSITIONAL_OR_KEYWORD
        return [(inspect.Parameter(f"{parameter.name}_{at}", kind), item) for at, item in enumerate(items)]
    if parameter.kind is parameter.VAR_KEYWORD:
        named = {} if value is _EMPTY else value
        return [(inspect.Parameter(name, parameter.KEYWORD_ONLY), item) for name, item in named.items()]
    return [(parameter, value)]


def _is_constant(value: Any) -> bool:
    """Whether the graph is specialized to this argument of an example: no operation takes it, so Python must have asked."""
    return value is None or isinstance(value, (bool, str))


@contextmanager
def calling_forward(
    tracer: fx.Tracer, call: Call, record: Callable[[Any, Any], Any] | None = None
) -> Iterator[dict[str, Any] | None]:
    """A context in which ``tracer`` calls forward as ``call`` says, and makes a placeholder of each input. It calls ``record``
    in place of forward, if that is given.

    torch.fx does so for a plain forward, if it is given the concrete arguments that this gives. It reads the code of the
    function that a decorator wraps, and cannot call it.
    """
    overrides = type(tracer).create_args_for_root is not fx.Tracer.create_args_for_root
    if record is None and (overrides or not (call.is_example or call.is_decorated)):
        yield call.concrete or None
        return

    def create_args(function: Callable[..., Any], is_module: bool, concrete_args: Any = None) -> Any:
        model = tracer.root
        defaults = _defaults(call.inputs())
        inputs = {name: tracer.create_proxy("placeholder", name, default, {}) for name, default in defaults.items()}
        positional, named = call.arguments(inputs)

        @functools.wraps(function)
        def forward(*_: Any) -> Any:
            return call.result(model.forward(*positional, **named) if record is None else record(positional, named))

        return forward, []

    with replaced(tracer, "create_args_for_root", create_args):
        yield None


def _defaults(inputs: list[inspect.Parameter]) -> dict[str, tuple[Any, ...]]:
    """The default of each placeholder, if it has one. One without a default cannot come after one with a default."""
    last = max((at for at, each in enumerate(inputs) if not _is_of_graphs(each.default)), default=-1)
    return {
        each.name: () if at <= last or each.default is _EMPTY else (each.default,) for at, each in enumerate(inputs)
    }


def check_concrete_args(model: nn.Module, concrete_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """``concrete_args`` as a dict. Raises if a name or a value in it cannot be used."""
    if concrete_args is not None and not isinstance(concrete_args, Mapping):
        raise TracingError(
            f"concrete_args is {brief(concrete_args)}; give a dict from names of forward's arguments to values"
        )
    concrete, names = dict(concrete_args or {}), _named_arguments(model)
    faults = []
    for name, value in concrete.items():
        if name not in names:
            hint = did_you_mean(name, names, most=1, cutoff=0.6) or f"it takes {', '.join(names) or 'none'}"
            faults.append(f"concrete_args[{brief(name)}]: forward has no argument of that name; {hint}")
        elif not (value is None or isinstance(value, (bool, int, float, str))):
            faults.append(
                f"concrete_args[{brief(name)}] is a {type(value).__name__}; a value that the graph is specialized to must be "
                "None, a bool, an int, a float or a str"
            )
    if faults:
        raise TracingError("\n".join(some(faults)))
    return concrete


def signature_of(model: nn.Module) -> inspect.Signature:
    """The signature of forward, without its annotations: not every annotation can be pickled."""
    parameters = inspect.signature(model.forward).parameters.values()
    return inspect.Signature([each.replace(annotation=inspect.Parameter.empty) for each in parameters])


def is_decorated(model: nn.Module) -> bool:
    """Whether forward is not the function of the class, but a wrapper around one, or set on the instance."""
    return hasattr(type(model).forward, "__wrapped__") or "forward" in vars(model)


def _named_arguments(model: nn.Module) -> list[str]:
    """The names of forward's arguments, in the order of the placeholders that fx makes."""
    parameters = inspect.signature(model.forward).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind not in _STAR]


def drop_concrete_inputs(model: nn.Module, graph: fx.Graph, concrete_args: Mapping[str, Any]) -> None:
    """Remove what fx leaves for each concrete argument, a placeholder and an assertion. `ir/call/signature.py` checks calls."""
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
    return [str(node.target) for node in required if not any(fails_for_none(user, node) for user in node.users)]


def fails_for_none(user: fx.Node, value: fx.Node) -> bool:
    """Whether an operation fails by itself if ``value`` is None."""
    if not user.args or user.args[0] is not value:
        return False
    home = getattr(user.target, "__module__", None) or ""
    return user.op in ("call_method", "call_module") or home.partition(".")[0] in ("torch", "_operator", "builtins", "")
