"""How a model is called. Binds the arguments of a call of a Pipe: those of the model's forward, and the target of the loss."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from torch import fx, nn

from pippy.ir.base.errors import GuardError, InputError
from pippy.ir.base.public_calls import hints
from pippy.ir.base.readable import some
from pippy.ir.base.trees import describe
from pippy.ir.call.guards import Guards


@dataclass(eq=False, kw_only=True)
class ModelCall(ABC):
    """The call of a model's forward, with the target of its loss. `Traced` and `Compiled` are such.

    ``concrete_args`` are the arguments that the graph is specialized to. ``required_inputs`` names the inputs that must not
    be None, because forward does something else without them. ``guards`` say what is fixed, and are checked in each call.
    ``target_name`` is the name of the loss's target, or None.
    """

    signature: inspect.Signature = field(default_factory=inspect.Signature)
    concrete_args: dict[str, Any] = field(default_factory=dict)
    required_inputs: tuple[str, ...] = ()
    guards: Guards = field(default_factory=Guards)
    target_name: str | None = None

    @abstractmethod
    def placeholders(self) -> Sequence[fx.Node]:
        """The inputs of the graph, in order."""


def call_signature(pipe: ModelCall) -> inspect.Signature:
    """The signature of the model's forward. The default of a concrete argument is its value, where Python allows a default."""
    parameters = list(pipe.signature.parameters.values())
    for index, parameter in enumerate(parameters):
        last = parameter.kind is parameter.KEYWORD_ONLY or not any(map(_is_required, parameters[index + 1 :]))
        if parameter.name in pipe.concrete_args and parameter.default is parameter.empty and last:
            parameters[index] = parameter.replace(default=pipe.concrete_args[parameter.name])
    return inspect.Signature(parameters)


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD


def bind(pipe: ModelCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The value of each placeholder of the top-level graph, by the placeholder's name.

    The target is a keyword argument, or the last positional one.
    """
    args, kwargs = list(args), dict(kwargs)
    values: dict[str, Any] = {}
    signature = call_signature(pipe)
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
        arguments = [describe(value) for value in args] + [
            f"{name}={describe(value)}" for name, value in kwargs.items()
        ]
        what = str(error)
        unknown = [name for name in kwargs if name not in signature.parameters]
        hinted = hints(unknown, [*signature.parameters, *([pipe.target_name] if pipe.target_name else [])])
        what += f" ({hinted})" * bool(hinted)
        raise InputError(
            f"{what}; the Pipe is called as {_usage(pipe, signature)}, and was given ({', '.join(some(arguments))})"
            + (f" before the target {describe(values[pipe.target_name])}" if pipe.target_name else "")
            + _in_the_example(unknown if pipe.guards.kinds and not hinted else [])
        ) from None
    _check_unpacked(pipe, bound.arguments)
    faults = [*_other_constants(pipe, bound.arguments)]
    bound.apply_defaults()
    faults += [*_missing_values(pipe, bound.arguments), *pipe.guards.other_kinds(bound.arguments, pipe.required_inputs)]
    if faults:
        raise GuardError("\n".join(faults))
    values.update(
        {
            node.name: bound.arguments[str(node.target).lstrip("*")]
            for node in pipe.placeholders()
            if node.name not in values
        }
    )
    return values


def own_call(
    pipe: ModelCall, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The arguments of a call by the names that the model itself has for them, with the target; None if it does not take them.

    What forward takes by ``*args`` is in a tuple, and what it takes by ``**kwargs`` in a dict.
    """
    args, kwargs, values = list(args), dict(kwargs), {}
    if pipe.target_name is not None:
        if pipe.target_name not in kwargs and not args:
            return None
        values[pipe.target_name] = kwargs.pop(pipe.target_name) if pipe.target_name in kwargs else args.pop()
    signature = inspect.signature(model.forward)
    try:
        return {**signature.bind(*args, **kwargs).arguments, **values}
    except TypeError:
        return None


def _check_unpacked(pipe: ModelCall, arguments: Mapping[str, Any]) -> None:
    """Refuse a dict of all arguments, as a tokenizer gives, in the place of one argument."""
    for name, kind in pipe.guards.kinds.items():
        value = arguments.get(name)
        if isinstance(value, Mapping) and name in value and any(kind.differences(value, name)):
            raise InputError(
                f"{name!r} is a {type(value).__name__} with {', '.join(some(map(repr, value)))}, and these are arguments "
                "themselves; unpack it, as in pipe(**batch) and driver.run(chunks, **batch)"
            )


def _in_the_example(names: Sequence[str]) -> str:
    shown = ", ".join(f"{name!r}: ..." for name in names[:3])
    return f"; for a Pipe that takes it, give it in the example, too: example_kwargs={{..., {shown}}}" if names else ""


def check_guards(pipe: ModelCall, inputs: Mapping[str, Any]) -> None:
    """Raise a `GuardError` if the inputs of a micro-batch, by their placeholders' names, are not as the Pipe needs them."""
    names = {node.name: str(node.target).lstrip("*") for node in pipe.placeholders() if node.name != pipe.target_name}
    given = {names[name]: value for name, value in inputs.items() if name in names}
    pipe.guards.check(given)


def _missing_values(pipe: ModelCall, arguments: Mapping[str, Any]) -> Iterator[str]:
    missing = [name for name in pipe.required_inputs if arguments.get(name) is None]
    if missing:
        fixed = ", ".join(f"{name!r}: None" for name in missing)
        remedy = f"For a Pipe that runs without: pipeline(model, ..., concrete_args={{{fixed}}})"
        if pipe.guards.kinds:
            remedy = "Give it in this call, too, or call pipeline() with an example that leaves it out"
        yield (
            f"{', '.join(map(repr, missing))} is None, and forward does something else then; the model was traced as given it. "
            f"{remedy}"
        )


def _other_constants(pipe: ModelCall, arguments: Mapping[str, Any]) -> Iterator[str]:
    for name, fixed in pipe.concrete_args.items():
        value = arguments.get(name, fixed)
        if value is not fixed and not (isinstance(value, (bool, int, float, str)) and value == fixed):
            left_out = _is_own_default(pipe, name) or (bool(pipe.guards.kinds) and fixed is None)
            traced = f"without {name}" if _is_own_default(pipe, name) else f"with {name}={fixed!r}"
            again = _in_the_example([name]) if left_out else "; trace it again to run it with another value"
            yield f"{name!r} is {describe(value)}, but the model was traced {traced}{again}"


def _is_own_default(pipe: ModelCall, name: str) -> bool:
    """Whether a constant is a default that stands for an argument left out: an object of a class of the user's."""
    fixed = pipe.concrete_args[name]
    plain = fixed is None or isinstance(fixed, (bool, int, float, str))
    return not plain and fixed is pipe.signature.parameters[name].default


def _usage(pipe: ModelCall, signature: inspect.Signature) -> str:
    names = [str(parameter) for parameter in signature.parameters.values()]
    return f"pipe({', '.join([*names, *([pipe.target_name] if pipe.target_name else [])])})"


# The name of the loss's target among the inputs of a Pipe.


def target_name(inputs: Collection[str]) -> str:
    """The name of the target, for a model whose inputs have these names.

    >>> target_name(["x"]), target_name(["x", "target", "target_1"])
    ('target', 'target_2')
    """
    return free_name("target", inputs)


def free_name(name: str, taken: Collection[str]) -> str:
    """``name``, with a number if it is taken."""
    return next(each for each in (name if at == 0 else f"{name}_{at}" for at in count()) if each not in taken)
