"""What is known of the values that forward computes while it is traced.

With example arguments, each operation that is recorded also runs on fake tensors, which have a shape, a dtype and a device,
but no numbers. Without them, the defaults of forward's arguments are known that are no tensors, and what is computed of these.

    x = proxy of an input           a fake float32[8, 16]
    x.shape[1] // 4                 4, which Python may ask for: `if`, `range`, a slice of a list
    x.argmax()                      a fake int64[]: its number is unknown, and `if` is refused

Nothing of the model changes: no parameter, no buffer, no random number, no attribute. What cannot be computed so is unknown,
and so is what depends on it.

A value that Python was told is fixed in the graph by a `check_fixed` node: where it is another one, the graph raises.

An example of another dtype, or on another device, than the model needs is refused. Most operations on fake tensors of two
devices or dtypes fail, but some do not: nn.Linear takes float64 for float32 weights then, and would fail only when the Pipe
runs. So layers of torch's are looked at (`check_call`):

    x                       the layer                               here
    ────────────────────────────────────────────────────────────────────────────────────────────────────────────
    float64, the example    nn.Linear, nn.Conv2d, nn.LSTM, …        refused
    bfloat16, computed      the same                                nothing: forward decides about its own dtypes
    float16, the example    nn.LayerNorm of float32                 nothing: torch has kernels for these two
    anything                any, under autocast                     nothing
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.nn.utils.stateless import _reparametrize_module

from pippy.ir.base import source
from pippy.ir.base.errors import InputError, MarkError
from pippy.ir.base.fake_mode import OF_FAKES, FakeResults, ShapeChangedError, zeros_for
from pippy.ir.base.marks import recording_splits
from pippy.ir.base.names import named_state
from pippy.ir.base.node_notes import BYTES, NO_GRADIENT, ROW_SIZES
from pippy.ir.base.trees import UNKNOWN, describe, map_leaves, tensors
from pippy.ir.call.kinds import leaves_by_path
from pippy.ir.call.row_sizes import RowSize, compare_rows
from pippy.ir.record.compiled import map_nodes
from pippy.ir.run.functions import check_fixed
from pippy.ir.run.random_state import untouched_random_state
from pippy.ir.trace.left_as_it_was import lookup_attribute, restoring_attributes
from pippy.ir.trace.tracing_thread import not_tracing, refused, then

# These are others on a stage than in the plain model, or have no meaning for fake tensors.
_UNKNOWN_OF_TENSORS = frozenset(
    """_version data_ptr grad grad_fn is_leaf is_pinned is_shared requires_grad retains_grad storage storage_offset stride
    untyped_storage""".split()
)


_ABOUT_TENSORS = re.compile(r"device|shape|size of tensor|dim|dtype|scalar type|Input type|its parameters are")


class Values:
    """The values of the nodes that a tracer makes.

    They are those of ``known_inputs``, the inputs by their names, and what is computed of them. Without an ``example``, the
    values of tensors are unknown.
    """

    def __init__(
        self,
        tracer: fx.Tracer,
        model: nn.Module,
        known_inputs: Mapping[str, Any],
        example: bool,
        results: FakeResults | None = None,
        attributes: Mapping[str, Any] | None = None,
        longer: int = 0,
    ) -> None:
        self.tracer, self.example, self.known_inputs, self._model = tracer, example, known_inputs, model
        self.attributes = attributes  # None: those of the model as it is now
        self._modules = dict(model.named_modules(remove_duplicate=False)) if example else {}
        self._fixed: dict[fx.Node, fx.Node] = {}
        self.results = (results or FakeResults()) if example else None
        self._longer = longer  # the rows of inputs that have one more here
        self._begin()
        self.are_known = example or bool(known_inputs)

    def _begin(self) -> None:
        self._values: dict[fx.Node, Any] = {}
        self._inputs = {name: self._fake(value) for name, value in self.known_inputs.items()}
        if self._longer:
            with self._computing():
                self._inputs = {name: map_leaves(self._one_more, value) for name, value in self._inputs.items()}

    def _one_more(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == self._longer:
            return leaf.new_empty((self._longer + 1, *leaf.shape[1:]))
        return leaf

    def longer(self, rows: int, attributes: Mapping[str, Any]) -> "Values":
        """The values where the inputs that have ``rows`` rows have one more. ``attributes`` has those of the model."""
        return Values(self.tracer, self._model, self.known_inputs, True, self.results, attributes, rows)

    def of(self, node: fx.Node) -> Any:
        """The value of a node; `UNKNOWN` if nothing is known of it."""
        if node not in self._values:
            self._values[node] = self._find(node)
        return self._values[node]

    def is_tensor(self, node: fx.Node) -> bool:
        """Whether the value of a node is a tensor, for all that is known."""
        return self.of(node) is UNKNOWN or isinstance(self.of(node), torch.Tensor)

    def fix(self, node: fx.Node, value: Any) -> fx.Node:
        """Note that Python was told the value of a node, which is checked from now on whenever the graph runs."""
        if node in self._fixed and not self._fixed[node]._erased:
            return self._fixed[node]
        # It stands behind the node, and so in the same stage; inputs stay together, before all else.
        where = node.graph.inserting_after(node if node.op != "placeholder" else self._last_node(node.graph))
        with where:
            self._fixed[node] = self.tracer.create_node(
                "call_function", check_fixed, (node, value, str(source.of_frame(sys._getframe(1)) or "")), {}
            )
        return self._fixed[node]

    def _last_node(self, graph: fx.Graph) -> fx.Node:
        last = next(iter(reversed(graph.nodes)))
        return last if last.op != "output" else graph.find_nodes(op="placeholder")[-1]

    def _find(self, node: fx.Node) -> Any:
        if any(self.of(each) is UNKNOWN for each in node.all_input_nodes):
            return UNKNOWN
        if node.op == "placeholder":
            return self._inputs.get(str(node.target), UNKNOWN)
        if not self.example and not node.all_input_nodes:
            return UNKNOWN
        try:
            return self._compute(node)
        except MarkError:
            raise
        except Exception as error:  # a leaf of the user's may raise anything when it is given a fake tensor
            if self._is_of_example(node, error):
                where = source.excerpt_of(node)
                inputs = {str(each.target): self.of(each) for each in node.all_input_nodes}
                raise refused(unfit_example(where, error, self._model, self.known_inputs, inputs)) from error
            return UNKNOWN

    def _is_of_example(self, node: fx.Node, error: Exception) -> bool:
        """Whether an operation of torch fails for the example: it would fail in the plain model too."""
        is_tracing = self.tracer.__dict__.get("_values") is self
        if not (is_tracing and self.example) or not isinstance(error, (RuntimeError, IndexError)):
            return False
        if isinstance(error, OF_FAKES):
            return False
        if node.op == "call_module":
            of_torch = type(self._modules[str(node.target)]).__module__.startswith("torch.nn.")
        else:
            of_torch = node.op == "call_method" or (getattr(node.target, "__module__", "") or "").startswith("torch")
        return of_torch and _ABOUT_TENSORS.search(str(error)) is not None

    def _compute(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return self._fake(self._attribute(str(node.target)))
        args, kwargs = self._argument(node.args), self._argument(node.kwargs)
        if _asked_of(node, args) in _UNKNOWN_OF_TENSORS:
            return UNKNOWN
        compute = partial(self._run, node, args, kwargs)
        if self.results is None:
            return compute()
        target = self._modules[str(node.target)] if node.op == "call_module" else node.target
        try:
            with torch._C.DisableTorchFunction():  # else what records would be asked for each shape and dtype
                return self.results.of(target, args, kwargs, compute)
        except ShapeChangedError:
            return self._start_over(node)

    def _run(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        with self._computing():
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            if node.op == "call_module":
                return self._call(self._modules[str(node.target)], args, kwargs)
            return node.target(*args, **kwargs)  # type: ignore[operator]

    def _start_over(self, last: fx.Node) -> Any:
        """Find all values again, up to that of ``last``, and share none."""
        assert self.results is not None
        self.results.share_nothing()
        self._begin()
        for node in last.graph.nodes:
            value = self.of(node)
            if node is last:
                break
        return value

    def _attribute(self, target: str) -> Any:
        if self.attributes is not None:
            return self.attributes[target]
        with not_tracing():
            return lookup_attribute(self._modules, target)

    def _argument(self, argument: Any) -> Any:
        """The value of an argument of a node. Containers are new, since what is called may change them."""
        return map_nodes(self.of, argument)

    def _call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """What the forward of a module gives. Its hooks are not called: what they see is to be real."""
        buffers = {name: self._fake(buffer) for name, buffer in module.named_buffers()}
        if not type(module).__module__.startswith("torch.nn."):
            return self._call_users(module, buffers, args, kwargs)
        with _with_buffers(module, buffers):
            check_call(module, args, self._model, self.known_inputs)
            return module.forward(*args, **kwargs)

    def _call_users(self, module: nn.Module, buffers: dict[str, torch.Tensor], args: Any, kwargs: Any) -> Any:
        lose_mark = partial(_lose_mark, module)
        with restoring_attributes(module, silent=True), untouched_random_state(), recording_splits(lose_mark):
            try:
                with _with_buffers(module, buffers):
                    return module.forward(*args, **kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException):
                return self._really_call(module, args, kwargs)

    def _really_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The same where forward asks for numbers: it is called with zeros. What depends on them is checked in each run."""
        with unset_fake_temporarily(), torch.no_grad():
            args, kwargs = map_leaves(zeros_for, args), map_leaves(zeros_for, kwargs)
            with _with_buffers(module, {name: buffer.clone() for name, buffer in module.named_buffers()}):
                result = module.forward(*args, **kwargs)
        return self._fake(result)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        with not_tracing(), torch._C.DisableTorchFunction():
            if self.results is None:
                yield
            else:
                with self.results.mode:
                    yield

    def _fake(self, value: Any) -> Any:
        with not_tracing(), torch._C.DisableTorchFunction():
            return map_leaves(self._fake_leaf, value)

    def _fake_leaf(self, leaf: Any) -> Any:
        if self.results is None or not isinstance(leaf, torch.Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        return self.results.mode.from_tensor(leaf)


def _with_buffers(module: nn.Module, buffers: dict[str, torch.Tensor]) -> AbstractContextManager[None]:
    """A context in which a module has other buffers, since its forward may change them."""
    return _reparametrize_module(module, buffers) if buffers else nullcontext()


def _lose_mark(module: nn.Module) -> None:
    raise MarkError(
        f"pipe_split() is called inside a {type(module).__name__}, which is not traced through but kept whole (a leaf of your "
        "tracer, or a part that cannot be traced); mark what is outside of it"
    )


def find_row_sizes(values: Values, graph: fx.Graph, attributes: Mapping[str, Any]) -> dict[fx.Node, int]:
    """Note at each node how its value depends on the rows of the inputs: the values are found for one row more.

    Returns the checks of what Python was told of the number of rows, each with that number.
    """
    inputs = values.known_inputs
    counts = Counter(each.shape[0] for value in inputs.values() for each in tensors(value) if each.dim())
    if not counts:
        return {}
    rows = counts.most_common(1)[0][0]

    others = values.longer(rows, attributes)
    holding = set[fx.Node]()  # what depends on the values that the rows hold
    counting = set[fx.Node]()  # numbers that depend on how many rows there are
    checks: dict[fx.Node, int] = {}
    for node in graph.nodes:
        value = values.of(node)
        may_hold = value is UNKNOWN or any(True for _ in tensors(value))
        if may_hold and (node.op == "placeholder" or not holding.isdisjoint(node.all_input_nodes)):
            holding.add(node)
        if node.op != "output" and value is not UNKNOWN and others.of(node) is not UNKNOWN:
            dependence = compare_rows(value, others.of(node), rows, rows + 1, counted=node not in holding)
            ROW_SIZES.put(node, dependence)
            is_number = not may_hold and type(dependence) is not tuple
            if is_number and (type(dependence) is RowSize or not counting.isdisjoint(node.all_input_nodes)):
                counting.add(node)
        if node.target is check_fixed and node.args[0] in counting:
            checks[node] = rows
    return checks


def note_bytes(values: Values, graph: fx.Graph) -> None:
    """Note at each node how many bytes its value has, for the example."""
    for node in graph.nodes:
        value = values.of(node)
        if value is not UNKNOWN:
            BYTES.put(node, sum(each.numel() * each.element_size() for each in tensors(value)))


def note_missing_gradients(values: Values, graph: fx.Graph) -> None:
    """Note at each node whose value can have no gradient: whole numbers, sizes, masks."""
    for node in graph.nodes:
        value = values.of(node)
        if value is not UNKNOWN and not any(each.is_floating_point() or each.is_complex() for each in tensors(value)):
            NO_GRADIENT.put(node, True)


def _asked_of(node: fx.Node, args: Any) -> str:
    """The attribute or method of a tensor that a node asks for; empty if it is none."""
    if not args or not isinstance(args[0], torch.Tensor):
        return ""
    if node.op == "call_method":
        return str(node.target)
    return str(args[1]) if node.target is getattr else ""


@contextmanager
def knowing_values(
    tracer: fx.Tracer, model: nn.Module, known_inputs: Mapping[str, Any], example: bool, results: FakeResults
) -> Iterator[Values]:
    """A context in which the proxies of ``tracer`` know what is known of their values."""
    values = Values(tracer, model, known_inputs, example, results)
    if not values.are_known:
        yield values
        return

    def find(created: Any) -> Any:
        if issubclass(type(created), fx.Proxy):
            values.of(created.node)  # now: an operation after it may change a value in place
        return created

    tracer.__dict__["_values"] = values
    try:
        with then(tracer, "create_proxy", find):
            yield values
    finally:
        del tracer.__dict__["_values"]


def has_example(tracer: fx.Tracer) -> bool:
    """Whether ``tracer`` traces with example arguments."""
    values = tracer.__dict__.get("_values")
    return values is not None and values.example


def value_of(proxy: fx.Proxy) -> Any:
    """What is known of a proxy's value; `UNKNOWN` if nothing is."""
    values = proxy.tracer.__dict__.get("_values")
    return UNKNOWN if values is None else values.of(proxy.node)


def fix_value(proxy: fx.Proxy) -> Any:
    """The value of a proxy that Python is told: a number, say. `UNKNOWN` if it is not known, or a tensor."""
    value = value_of(proxy)
    if value is UNKNOWN or isinstance(value, torch.Tensor):
        return UNKNOWN
    proxy.tracer.__dict__["_values"].fix(proxy.node, value)
    return value


def none_if_known(part: Any) -> Any:
    """None if that is known to be the value of a proxy, which is checked; Python asks for None by `is`. Else ``part``."""
    if not issubclass(type(part), fx.Proxy):  # it is given as itself
        return part
    return None if value_of(part) is None and fix_value(part) is None else part


_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
_STRICT = (
    nn.Linear,
    nn.Bilinear,
    nn.modules.conv._ConvNd,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    *_NORMS,
)


def check_call(module: nn.Module, args: Any, model: nn.Module, example: Mapping[str, Any]) -> None:
    """Raise a RuntimeError, as torch would, if a layer of torch's is given an argument unlike its weights."""
    argument, parameters = next(iter(tensors(args)), None), list(module.parameters())
    if (
        argument is None
        or not parameters
        or module._forward_pre_hooks
        or not isinstance(module, (*_STRICT, nn.Embedding))
    ):
        return
    for what in ("device", "dtype"):
        actual, expected = getattr(argument, what), {getattr(each, what) for each in parameters}
        if actual in expected or (what == "dtype" and _takes(module, actual)):
            continue
        if any(getattr(each, what) == actual for _, each in named_state(model)):
            continue  # forward may have converted it
        if any(getattr(each, what) == actual for _, each in _tensors_of(example)):
            raise RuntimeError(
                f"{type(module).__name__} is given a tensor of {what} {actual}, and its parameters are of {what} "
                f"{' and '.join(sorted(map(str, expected)))}"
            )


def _takes(module: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a layer takes another dtype than that of its weights."""
    if isinstance(module, nn.Embedding) or torch._C._is_any_autocast_enabled():
        return True
    return isinstance(module, _NORMS) and dtype in (torch.float16, torch.bfloat16)


def unfit_example(
    line: str, error: Exception, model: nn.Module, example: Mapping[str, Any], inputs: Mapping[str, Any] | None = None
) -> InputError:
    """The error for an example for which an operation of the model fails. ``inputs`` are those of the operation."""
    lines = [f"with the example arguments, this operation fails:\n{line}", f"{type(error).__name__}: {error}"]
    lines += [_advice(model, example, _dtypes(example if inputs is None else inputs)) or _ADVICE]
    if inputs and lines[-1] == _ADVICE:
        arguments = [f"{name}={describe(example[name])}" for name in inputs if name in example]
        lines[-1] += f"; this operation takes {', '.join(arguments)}" * bool(arguments)
    return InputError("\n".join(lines))


_ADVICE = "What to do: give example_args and example_kwargs that the model itself can be called with, on its device"


def _advice(model: nn.Module, example: Mapping[str, Any], used: set[torch.dtype]) -> str:
    return _device_advice(model, example) or _dtype_advice(model, example, used)


def _dtypes(values: Mapping[str, Any]) -> set[torch.dtype]:
    return {each.dtype for each in tensors(list(values.values()))}


def _device_advice(model: nn.Module, example: Mapping[str, Any]) -> str:
    """What to do about arguments that are on another device than all of the model."""
    devices = {each.device for _, each in named_state(model)}
    others = {path: each.device for path, each in _tensors_of(example) if each.device not in devices}
    if not others or len(devices) != 1:
        return ""
    where = ", ".join(f"{path!r} is on {device}" for path, device in others.items())
    (device,) = devices
    return (
        f"Why: in the example {where}, and the model is on {device}.\nWhat to do: give "
        f"{', '.join(f'{path}.to({str(device)!r})' for path in others)} in the example; or move the model first"
    )


def _dtype_advice(model: nn.Module, example: Mapping[str, Any], used: set[torch.dtype]) -> str:
    """What to do about arguments in a dtype that is among ``used``, and that no parameter of the model has."""
    model_dtypes = {each.dtype for _, each in named_state(model) if each.is_floating_point() or each.is_complex()}
    others = {path: each.dtype for path, each in _tensors_of(example) if each.dtype in used - model_dtypes}
    if not others or len(model_dtypes) != 1:
        return ""
    (dtype,) = model_dtypes
    where = ", ".join(f"{path!r} is {_short(each)}" for path, each in others.items())
    return (
        f"Why: in the example {where}, and the model's parameters are {_short(dtype)}.\nWhat to do: give "
        f"{', '.join(f'{path}.to({dtype})' for path in others)} in the example and in calls; or convert the model first; or, "
        "if the Pipe is to be called under torch.autocast, call pipeline() under it, too"
    )


def _tensors_of(example: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    return [(path, leaf) for path, leaf in leaves_by_path(example).items() if isinstance(leaf, torch.Tensor)]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
