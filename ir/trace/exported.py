"""A program that `torch.export` has made, as a module: its forward runs the operations of the program, and is traced.

    in the program                                 in forward
    ──────────────────────────────────────────────────────────────────────────────────────────────────────────
    a leaf of the arguments                        the argument, and the path to the leaf in it
    the outputs in one flat tuple                  as the user's forward returned them
    pippy_marks.pipe_split()                       `pipe_split()`
    wrap_with_set_grad_enabled(False, body, x)     the body under `torch.no_grad()`
    copy_(count, add) at the end                   `self.count = add`, see `changed_memory.py`
    _guards_fn(x), _assert_tensor_metadata(x)      nothing: `guards_of` has them

The module has the parameters and buffers of the program under their names, and the program the same tensors.

What the program fixes becomes guards of the Pipe: the kinds of its arguments, conditions on their sizes, the dtypes, the mode.
"""

import copy
import functools
import inspect
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator
from torch.utils import _pytree

from pippy.ir.base import source
from pippy.ir.base.errors import InputError, TracingError
from pippy.ir.base.marks import EXPORTED_MARK, pipe_split
from pippy.ir.base.names import named_state
from pippy.ir.base.node_notes import (
    FAKE_VALUE,
    IS_TENSOR,
    MODULE_CALLS,
    MODULE_PATH,
    NAMED_DEVICE,
    SOURCE,
    STACK_TRACE,
    SourceLine,
)
from pippy.ir.base.trees import tensors
from pippy.ir.call.guards import Condition, Guards
from pippy.ir.call.kinds import ConstantKind, TensorKind, kind_of
from pippy.ir.record.compiled import ModelModes, map_nodes, walk
from pippy.ir.trace.arguments import Example, signature_of
from pippy.ir.trace.tracing_thread import is_tracing

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_aten = torch.ops.aten
_GUARDS = "_guards_fn"  # what the module of a program calls to check its inputs
_SILENT = (_aten._assert_tensor_metadata.default,)
_NO_GRAD = "wrap_with_set_grad_enabled"
_MODES = ("train", "training")  # what operators call the argument that says whether a model is trained
_LINE = re.compile(r'File "(.+)", line (\d+), in (\w+)')


class ExportedModel(nn.Module):
    """The module of an exported program.

    >>> program = torch.export.export(nn.Linear(2, 3), (torch.ones(4, 2),))
    >>> model = ExportedModel(program)
    >>> list(model.state_dict()), model(torch.ones(4, 2)).shape
    (['weight', 'bias'], torch.Size([4, 3]))
    """

    def __init__(self, program: "ExportedProgram") -> None:
        super().__init__()
        _check_program(program)
        module = program.module()
        bodies = {str(node.target) for node in _nodes(module.graph) if node.op == "get_attr" and _is_body(module, node)}
        self._parameters.update(module._parameters)
        self._buffers.update(module._buffers)
        self._non_persistent_buffers_set |= module._non_persistent_buffers_set
        self._modules.update({name: each for name, each in module._modules.items() if name not in {_GUARDS, *bodies}})
        self.__dict__.update({name: each for name, each in vars(module).items() if isinstance(each, torch.Tensor)})
        modes = [(flag, node) for node in _nodes(module.graph) for flag in _modes(node)]
        self.training = any(flag for flag, _ in modes) or not modes
        self.mode_line = next((_excerpt(node) for flag, node in modes if flag is self.training), None)
        self.__dict__["forward"] = _Forward(self, program, module)

    @property
    def program(self) -> "ExportedProgram":
        """The program; its tensors may be others than those of a copy of this module."""
        return self.__dict__["forward"].program


class _Forward:
    """The forward of a program, with the signature of the user's."""

    def __init__(self, model: ExportedModel, program: "ExportedProgram", module: fx.GraphModule) -> None:
        self.model, self.program, self.graph = model, program, module.graph
        self.bodies = {
            str(node.target): getattr(module, str(node.target)).graph
            for node in module.graph.find_nodes(op="get_attr")
            if _is_body(module, node)
        }
        spec = program.call_spec.in_spec
        assert spec is not None  # torch says so of each program that is called
        self.output_spec = program.call_spec.out_spec
        args, kwargs = _pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
        self.paths = [path for path, _ in _pytree.tree_flatten_with_path((args, kwargs))[0]]
        self.names = [*_names(program, module, len(args)), *kwargs]
        kinds = [inspect.Parameter.POSITIONAL_OR_KEYWORD] * len(args) + [inspect.Parameter.KEYWORD_ONLY] * len(kwargs)
        self.__signature__ = inspect.Signature([inspect.Parameter(*each) for each in zip(self.names, kinds)])
        self.written = set(_written_last(self.graph, {*program.graph_signature.inputs_to_buffers.values()}))
        device = {each.device for each in tensors([dict(program.state_dict), program.example_inputs])}
        self.device = device.pop() if len(device) == 1 else None

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Forward":
        """That of a copy of the model: it shares what does not change."""
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model, memo)
        return other

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = self.__signature__.bind(*args, **kwargs).arguments
        leaves = [_leaf(arguments[name], path) for name, path in self._leaves()]
        results = _Run(self, leaves).run(self.graph)
        return _pytree.tree_unflatten(results, self.output_spec)

    def _leaves(self) -> Iterator[tuple[str, Sequence[Any]]]:
        """For each leaf of the arguments, in order, the name of the argument and the path to the leaf in it."""
        for path in self.paths:
            at: Any = path[1]  # after whether it is given by its place or by its name
            yield (at.key if isinstance(at, _pytree.MappingKey) else self.names[at.idx]), path[2:]


class _Run:
    """One run of a program: with tensors, or with the stand-ins of a trace."""

    def __init__(self, forward: _Forward, leaves: Sequence[Any]) -> None:
        self.forward, self.model, self.leaves = forward, forward.model, leaves

    def run(self, graph: fx.Graph, inputs: Sequence[Any] | None = None) -> Any:
        remaining = iter(self.leaves if inputs is None else inputs)
        values: dict[fx.Node, Any] = {}

        def value(node: fx.Node) -> Any:
            result = next(remaining) if node.op == "placeholder" else self._value(node, values)
            if is_tracing() and issubclass(type(result), fx.Proxy):
                self._note(result.node, node)
            return result

        return walk(graph.nodes, value, values)

    def _value(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        target: Any = node.target
        if node.op == "get_attr":
            if target in self.forward.bodies:
                return self.forward.bodies[target]
            return operator.attrgetter(target)(self.model) if node.users else None
        if node.op == "call_module" or target in _SILENT:
            return None
        if target is EXPORTED_MARK:
            return pipe_split()
        args, kwargs = map_nodes(values.__getitem__, (node.args, node.kwargs))
        if _is_no_grad(target):
            enabled, body, *inputs = args
            with torch.set_grad_enabled(enabled):
                return self.run(body, inputs)
        if node in self.forward.written and is_tracing():
            buffer: Any = node.args[0]
            return self._assign(str(buffer.target), args[1])
        return target(*args, **kwargs)

    def _assign(self, name: str, value: Any) -> None:
        path, _, attribute = name.rpartition(".")
        setattr(self.model.get_submodule(path), attribute, value)

    def _note(self, recorded: fx.Node, node: fx.Node) -> None:
        """Note the user's line and module, and whether the device of the program is named: a stage may be on another."""
        if recorded.op in ("placeholder", "get_attr"):
            return
        SOURCE.put(recorded, _line(node))
        scopes = (MODULE_CALLS.of(node) or {}).items()
        stack = {call: (path, _kind(kind)) for call, (path, kind) in scopes if path}
        MODULE_CALLS.put(recorded, stack)
        MODULE_PATH.put(recorded, [*stack.values()][-1][0] if stack else "")
        IS_TENSOR.put(recorded, isinstance(FAKE_VALUE.get(node), torch.Tensor))
        device = self.forward.device
        if device is not None and device in _pytree.tree_leaves((node.args, node.kwargs)):
            NAMED_DEVICE.put(recorded, device)


def module_of(given: Any) -> Any:
    """The module of a program of `torch.export`; anything else as it is."""
    kind = type(given)
    is_program = kind.__name__ == "ExportedProgram" and kind.__module__ == "torch.export.exported_program"
    return ExportedModel(given) if is_program else given


def _check_program(program: "ExportedProgram") -> None:
    """Refuse what a program may have and a Pipe cannot."""
    signature = program.graph_signature
    if signature.user_inputs_to_mutate:
        names = ", ".join(sorted(map(repr, signature.user_inputs_to_mutate.values())))
        raise _export_refusal(
            f"changes its input {names} in place, and stages have copies of it",
            "write the operation that makes a new tensor",
        )
    if signature.parameters_to_mutate:
        names = ", ".join(sorted(map(repr, signature.parameters_to_mutate.values())))
        raise _export_refusal(
            f"changes the parameter {names} in forward", "change it between steps, or keep it in a buffer"
        )
    others = sorted(
        {each.kind.name for each in signature.input_specs} - {"USER_INPUT", "PARAMETER", "BUFFER", "CONSTANT_TENSOR"}
    )
    if others:
        raise _export_refusal(
            f"takes {', '.join(others)} as inputs, which stages do not", "keep such an object out of forward"
        )
    for node in _nodes(program.graph):
        if isinstance(node.target, HigherOrderOperator) and not _is_no_grad(node.target):
            raise _export_refusal(
                f"calls {node.target.name()}, which no stage does:\n{_excerpt(node)}",
                "give pipeline() the model itself, or write the line without",
            )


def _export_refusal(what: str, remedy: str) -> TracingError:
    return TracingError(f"this ExportedProgram {what}\nWhat to do: {remedy}")


def _nodes(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes of a program, with those that it computes without gradients."""
    for node in graph.nodes:
        yield node
        if _is_no_grad(node.target):
            body = node.args[1]
            owner: Any = graph.owning_module
            yield from _nodes(getattr(owner, str(body.target)).graph)


def _written_last(graph: fx.Graph, buffers: set[str]) -> Iterator[fx.Node]:
    """The nodes at the end of a program that write into ``buffers`` what forward has assigned to them."""
    *nodes, output = graph.nodes
    for node in reversed(nodes):
        buffer = node.args[0] if node.target is _aten.copy_.default else None
        if not isinstance(buffer, fx.Node) or buffer in output.all_input_nodes or buffer.target not in buffers:
            return
        yield node


def _is_no_grad(target: Any) -> bool:
    return isinstance(target, HigherOrderOperator) and target.name() == _NO_GRAD


def _is_body(module: fx.GraphModule, node: fx.Node) -> bool:
    return isinstance(getattr(module, str(node.target), None), fx.GraphModule)


def _modes(node: fx.Node) -> Iterator[bool]:
    """What an operation says of the mode: True for training."""
    schema = getattr(node.target, "_schema", None)
    for argument, value in zip(schema.arguments if schema is not None else (), node.args):
        if argument.name in _MODES and isinstance(value, bool):
            yield value


def _line(node: fx.Node) -> SourceLine | None:
    """The user's line of a node of a program."""
    lines = [SourceLine(file, int(line), function) for file, line, function in _LINE.findall(_stack(node))]
    return next((line for line in reversed(lines) if source.is_users(line.file)), lines[-1] if lines else None)


def _stack(node: fx.Node) -> str:
    """Where forward was when a node was made; for one that runs a graph, where the first node in that was."""
    owner: Any = node.graph.owning_module
    bodies = [getattr(owner, str(each.target), None) for each in node.all_input_nodes if each.op == "get_attr"]
    inside = [_stack(each) for body in bodies if isinstance(body, fx.GraphModule) for each in body.graph.nodes]
    return next(filter(None, inside), STACK_TRACE.get(node) or "")


def _excerpt(node: fx.Node) -> str:
    line = _line(node)
    return line.excerpt() if line is not None else f"  {node.format_node()}"


@functools.cache
def _kind(name: str) -> type:
    """A module class without content, in place of the module's own: a program has only its name."""
    return type(name.rpartition(".")[2], (nn.Module,), {})


def _names(program: "ExportedProgram", module: fx.GraphModule, count: int) -> list[str]:
    """The names of the arguments that are given by their places."""
    signature = program.module_call_graph[0].signature
    known = list(signature.forward_arg_names or ()) if signature is not None else []
    names = known or list(inspect.signature(module.forward).parameters)
    return names[:count] if len(names) >= count else [f"arg_{at}" for at in range(count)]


def _leaf(value: Any, path: Sequence[Any]) -> Any:
    for step in path:
        if isinstance(step, _pytree.GetAttrKey):
            value = getattr(value, step.name)
        else:
            value = value[step.key if isinstance(step, _pytree.MappingKey) else step.idx]
    return value


_REMEDY = (
    "export the model again, with such arguments, and with dynamic_shapes for the sizes that change: "
    "torch.export.export(model, args, dynamic_shapes={'x': {0: torch.export.Dim.AUTO}})"
)
_FLAT = re.compile(r"\bL\['flat_args'\]\[(\d+)\]")  # what a program of strict=True calls the leaves of its arguments
_LEAST = 2  # torch keeps sizes of 0 and 1 apart, and says that of each size that is free


def guards_of(model: ExportedModel) -> Guards:
    """The guards of a program."""
    program = model.program
    placeholders = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    leaves = [
        _value_of(placeholders[spec.arg.name], spec.arg)
        for spec in program.graph_signature.input_specs
        if spec.kind.name == "USER_INPUT"
    ]
    spec: Any = program.call_spec.in_spec
    args, kwargs = _pytree.tree_unflatten(leaves, spec)
    inputs = dict(zip(signature_of(model).parameters, [*args, *kwargs.values()]))
    kinds = {
        name: kind_of(value, _of_tensor, lambda each: ConstantKind(type(each), each)) for name, value in inputs.items()
    }
    inputs_by_number = [f"L{_pytree.keystr(path)}" for path, _ in _pytree.tree_flatten_with_path(inputs)[0]]
    conditions = [
        Condition(_FLAT.sub(lambda match: inputs_by_number[int(match[1])], code)) for code in program._guards_code
    ]
    conditions += map(Condition, _ranges(program, inputs))
    for condition in conditions:
        _check_condition(condition, inputs)
    dtypes = {name: each.dtype for name, each in named_state(model) if each.is_floating_point() or each.is_complex()}
    return Guards(kinds, conditions=tuple(dict.fromkeys(conditions)), dtypes=dtypes, remedy=_REMEDY)


def _value_of(node: fx.Node, argument: object) -> Any:
    return FAKE_VALUE.of(node) if FAKE_VALUE.is_at(node) else getattr(argument, "value", None)


def exported_modes(model: ExportedModel) -> ModelModes:
    """The mode in which a program was exported, as far as its operations say so. It cannot follow the other."""
    if model.mode_line is None:
        return ModelModes()
    return ModelModes(traced={"": model.training}, refused={not model.training: model.mode_line})


def check_example(model: ExportedModel, guards: Guards, example: Example | None) -> None:
    """Refuse an example that the program was not exported for."""
    if example is None:
        return
    arguments = example.bound(signature_of(model), {}).arguments
    for fault in guards.other_kinds(arguments):
        raise InputError(fault)
    guards.check(arguments)


def _of_tensor(tensor: torch.Tensor) -> TensorKind:
    sizes = tuple(None if isinstance(size, torch.SymInt) else size for size in tensor.shape)
    return TensorKind(tensor.dim(), tensor.dtype, sizes)


def _ranges(program: "ExportedProgram", inputs: dict[str, Any]) -> Iterator[str]:
    """Conditions for the ranges of sizes, and for sizes that are the same."""
    first: dict[Any, str] = {}
    for path, leaf in _pytree.tree_flatten_with_path(inputs)[0]:
        for dim, size in enumerate(leaf.shape) if isinstance(leaf, torch.Tensor) else ():
            if not isinstance(size, torch.SymInt):
                continue
            code, expression = f"L{_pytree.keystr(path)}.size()[{dim}]", size.node.expr
            if not expression.is_symbol:
                raise TracingError(
                    f"this ExportedProgram was exported for {code[1:]} == {expression}, a size that follows from another\n"
                    "What to do: export it with torch.export.Dim.AUTO for this size"
                )
            if expression in first:
                yield f"{code} == {first[expression]}"
                continue
            first[expression] = code
            bounds = program.range_constraints.get(expression)
            if bounds is not None and bounds.lower > _LEAST:
                yield f"{code} >= {bounds.lower}"
            if bounds is not None and re.fullmatch(r"\d+", str(bounds.upper)):
                yield f"{code} <= {bounds.upper}"


def _check_condition(condition: Condition, inputs: dict[str, Any]) -> None:
    """Refuse a condition that Python cannot compute."""
    example = _pytree.tree_map_only(torch.Tensor, _hinted, inputs)
    try:
        condition.holds(example)
    except Exception as error:
        raise TracingError(
            f"this ExportedProgram is right for {condition} alone, which cannot be checked ({type(error).__name__}: {error})\n"
            "What to do: give pipeline() the model itself"
        ) from error


def _hinted(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the sizes of the example."""
    return torch.empty(
        [int(size.node.hint) if isinstance(size, torch.SymInt) else size for size in tensor.shape], device="meta"
    )
