"""The tracer: which modules are leaves, and what symbolic tracing makes of the values that it meets.

Transformers of torch.nn are traced into their layers when there is an example. What their forward asks of numbers is answered
here, since a traced value has none:

    asked                                       answered
    ──────────────────────────────────────────────────────────────────────────────────────────────────────────
    is this mask the causal one?                no: torch may then compute with less speed, and the same numbers
    may the padding be left out, in nested      no; where plain PyTorch would leave it out, and fill the padded
      tensors, in evaluation?                     positions with zeros, the stage raises (`check_padding`)
"""

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.fx.immutable_collections import immutable_dict

from pippy.ir.base.errors import TracingError
from pippy.ir.base.names import first_names, named_state
from pippy.ir.base.trees import children, describe
from pippy.ir.run.batch_norm import DeferredBatchNorm
from pippy.ir.run.functions import check_padding
from pippy.ir.run.in_place import memory_of
from pippy.ir.trace.proxies import RecordingProxy, StateProxy, is_made_in_forward
from pippy.ir.trace.tracing_thread import method_patched_here, patched_here, refused
from pippy.ir.trace.values import has_example

TRACED_THROUGH = (nn.Transformer, nn.TransformerDecoder, nn.TransformerEncoder)


@contextmanager
def tracing_transformers(tracer: fx.Tracer) -> Iterator[None]:
    """A context in which ``tracer`` goes through them as the table above says."""
    encode = nn.TransformerEncoder.forward

    def forward(
        self: nn.TransformerEncoder,
        src: Any,
        mask: Any = None,
        src_key_padding_mask: Any = None,
        is_causal: bool | None = None,
    ) -> Any:
        if getattr(self, "use_nested_tensor", False) and mask is None and src_key_padding_mask is not None:
            first = self.layers[0]
            trained = any(parameter.requires_grad for parameter in first.parameters())
            tracer.create_proxy(
                "call_function", check_padding, (src, src_key_padding_mask, first.training, trained), {}
            )
        return encode(self, src, mask, src_key_padding_mask, is_causal)

    with ExitStack() as stack:
        stack.enter_context(method_patched_here(nn.TransformerEncoder, "forward", forward))
        stack.enter_context(patched_here(torch.backends.mha, "get_fastpath_enabled", lambda: False))
        stack.enter_context(patched_here(nn.modules.transformer, "_detect_is_causal_mask", _is_causal))
        # It asks for isinstance(mask, torch.Tensor), which in a file of torch a traced value is not.
        stack.enter_context(patched_here(nn.functional, "_none_or_dtype", lambda mask: getattr(mask, "dtype", None)))
        yield


def _is_causal(_: Any, is_causal: bool | None = None, size: Any = None) -> bool:
    return is_causal is True


FROM_OUTSIDE = "_tensor_from_outside"
"""How the names of attributes begin that stand for tensors which are none of the model's."""

_DTYPES = {
    int: torch.int64,
    float: torch.float64,
    bool: torch.bool,
}  # what torch takes them for: `torch.zeros(3, dtype=int)`


def _place(tensor: torch.Tensor) -> Any:
    """What tensors have in common that hold the same numbers in the same memory; another object for each that has none."""
    memory = memory_of(tensor)
    return (
        object() if memory is None else (memory, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
    )


def _not_registered(parameter: nn.Parameter, model: nn.Module) -> TracingError:
    """The error for a parameter that no module knows of: most often it is in a list."""
    places = [
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name, held in vars(module).items()
        if any(each is parameter for each in children(held) or ())
    ]
    remedy = "make it in __init__, and keep it as an attribute of a module"
    if places:
        remedy = (
            f"make {places[0]} an nn.ParameterList, or an nn.ParameterDict if it has keys; nn.Module looks into these"
        )
    return TracingError(f"forward uses a parameter of {describe(parameter)} that no module has registered; {remedy}")


class PipeTracer(fx.Tracer):
    """The default tracer: modules of `torch.nn` are leaves, everything else is traced through.

    With example arguments so are `nn.Transformer`, `nn.TransformerEncoder` and `nn.TransformerDecoder`, into their layers.

    Derive from it to choose other leaves:

    >>> class MyTracer(PipeTracer):
    ...     def is_leaf_module(self, m, module_qualified_name):
    ...         return module_qualified_name == "encoder" or super().is_leaf_module(m, module_qualified_name)
    """

    # Otherwise an in-place change of a buffer would happen while tracing, and not when the graph runs.
    proxy_buffer_attributes = True

    def trace(self, root: nn.Module, concrete_args: dict[str, Any] | None = None) -> fx.Graph:  # type: ignore[override]
        self._state_names = first_names(root)
        self._state_places = {_place(each): name for name, each in reversed([*named_state(root)])}
        return super().trace(root, concrete_args)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        # As in fx.Tracer, without its search through all parameters at each access.
        if not isinstance(attr_val, torch.Tensor):
            return attr_val
        name = self._state_names.get(id(attr_val))
        if name is None:
            return attr_val
        if name not in parameter_proxy_cache:
            proxy = self.create_proxy(
                "get_attr", name, (), {}, proxy_factory_fn=lambda node: StateProxy(node, self, attr_val)
            )
            parameter_proxy_cache[name] = proxy
        return parameter_proxy_cache[name]

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return RecordingProxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if type(m) in TRACED_THROUGH and has_example(self):
            return False
        return isinstance(m, (torch.jit.ScriptModule, DeferredBatchNorm)) or super().is_leaf_module(
            m, module_qualified_name
        )

    def create_arg(self, a: Any) -> Any:
        if issubclass(type(a), fx.Proxy):  # most are, and each isinstance() below asks a proxy for its class
            return a.node
        if isinstance(a, type) and a in _DTYPES:
            return _DTYPES[a]
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(a, numpy.generic):  # generated code cannot contain such a number
            return a.item()
        if numpy is not None and isinstance(a, numpy.ndarray):
            return super().create_arg(torch.from_numpy(a.copy()))
        if isinstance(a, nn.Parameter) and id(a) not in self._state_names:
            raise refused(_not_registered(a, self.root))
        if isinstance(a, torch.Tensor) and not isinstance(a, nn.Parameter):
            data_of = None if id(a) in self._state_names else self._state_places.get(_place(a))
            if data_of is not None:  # `parameter.data`
                held = self.create_proxy("get_attr", data_of, (), {})
                return self.create_proxy("call_method", "detach", (held,), {}).node
            self._name_outside_tensor(a)
        if isinstance(a, dict) and type(a) not in (dict, immutable_dict):
            return self._create_mapping(a)
        return super().create_arg(a)

    def _name_outside_tensor(self, tensor: torch.Tensor) -> None:
        """Take a tensor in a list of the model's, or a global, for one of its attributes: what changes it in place lasts.

        fx takes it for a constant that forward has written, and calls it `_tensor_constant0`.
        """
        known = id(tensor) in self._state_names or tensor in self.tensor_attrs
        if not known and not is_made_in_forward(self, tensor):
            name = self.get_fresh_qualname(FROM_OUTSIDE)
            setattr(self.root, name, tensor)
            self.tensor_attrs[tensor] = name

    def _create_mapping(self, mapping: dict[str, Any]) -> fx.Node:
        """Record an OrderedDict, or the output class of a model, as a call of its class. fx would make it a plain dict."""
        if dataclasses.is_dataclass(mapping):
            return self.create_node("call_function", type(mapping), (), super().create_arg(dict(mapping)))
        return self.create_node("call_function", type(mapping), (super().create_arg(dict(mapping)),), {})
