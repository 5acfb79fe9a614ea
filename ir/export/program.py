"""One run of `torch.export`: the exported program, with what it keeps whole, and what the example has fixed."""

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo.config
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.fx.experimental import _config
from torch.utils import _pytree

from pippy.ir.base import source
from pippy.ir.base.errors import PippyError, TracingError
from pippy.ir.base.names import named_state
from pippy.ir.base.trees import map_tensors
from pippy.ir.export.kept import KeptCalls
from pippy.ir.export.recording import PythonDraws, recording
from pippy.ir.trace.c_calls import watching_c_calls
from pippy.ir.trace.random_draws import check_no_draw, refusal
from pippy.ir.trace.refusals import raising_refusals
from pippy.ir.trace.returned_caches import CacheReturnedError, cache_in
from pippy.ir.trace.unfit_example import check_call, is_unfit, unfit_example
from pippy.ir.trace.users_caches import forgetting_one_trace

_CONSTANTS = (bool, int, float, str)


@dataclass
class Program:
    """An exported program.

    ``inputs`` has the arguments of ``example`` by their names, on fake tensors; ``sizes`` the sizes of each, by its id.
    """

    exported: ExportedProgram
    kept: KeptCalls
    inputs: dict[str, Any]
    example: dict[str, Any]
    sizes: dict[int, tuple[Any, ...]]

    @property
    def constants(self) -> dict[str, Any]:
        """The arguments that are no tensors and hold none: the graph is specialized to them."""
        return {name: value for name, value in self.inputs.items() if value is None or isinstance(value, _CONSTANTS)}


class Exporter:
    """Exports a model with one example."""

    def __init__(
        self,
        model: nn.Module,
        example: inspect.BoundArguments,
        is_leaf: Callable[[nn.Module, str], bool],
    ) -> None:
        self.model, self.example, self.is_leaf = model, _distinct(model, example), is_leaf

    def export(self, reads: list[nn.Module]) -> Program:
        """The program of forward as the model is now. ``reads`` collects the modules whose training flag is read."""
        draws = PythonDraws()
        program = self._export(reads)
        if draws.seen():  # the line is found only by a slow run
            with watching_c_calls(check_no_draw):
                program = self._export(reads)
            if draws.seen():  # another profiler is on
                raise refusal("Python's random, or torch's seed", None)
        return program

    def _export(self, reads: list[nn.Module]) -> Program:
        inputs: dict[str, Any] = {}
        sizes: dict[int, tuple[Any, ...]] = {}

        def on_start(args: Any, kwargs: Any) -> None:
            inputs.update(inspect.signature(self.model.forward).bind(*args, **kwargs).arguments)
            for leaf in _pytree.tree_leaves(inputs):
                if isinstance(leaf, torch.Tensor):
                    sizes[id(leaf)] = tuple(_size(each) for each in leaf.shape)

        def on_leaf(module: nn.Module, args: Any) -> None:
            check_call(module, args, self.model, self.example.arguments)

        kept = KeptCalls(self.model, self.is_leaf, on_start, on_leaf, reads)
        try:
            with forgetting_one_trace(), raising_refusals(), kept.recording(), recording(self.model, kept):
                exported = self._run()
        except PippyError:
            raise
        except Exception as error:
            if is_unfit(error, self.model, self.example.arguments):
                where = _place(error)
                line = where.excerpt() if where else ""
                raise unfit_example(line, error, self.model, self.example.arguments) from error
            raise explained(error, self.model) from error
        kept.check_all_met()
        return Program(exported, kept, inputs, self.example.arguments, sizes)

    def _run(self) -> ExportedProgram:
        shapes: Any = {name: _pytree.tree_map(_free_sizes, value) for name, value in self.example.arguments.items()}
        if any(each.kind is each.VAR_KEYWORD for each in self._parameters_given()):
            shapes = None  # torch.export does not find the sizes of what **kwargs takes: all stay as in the example
        # Sizes of 0 and 1 are like all others then, so that a micro-batch may have one row.
        oblivious = _config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
        uncached = torch._dynamo.config.patch(
            fake_tensor_cache_enabled=False
        )  # with free sizes, the cache takes longer
        with oblivious, uncached, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The tensor attribute")
            return torch.export.export(
                self.model, self.example.args, self.example.kwargs, dynamic_shapes=shapes, strict=False
            )

    def _parameters_given(self) -> list[inspect.Parameter]:
        return [self.example.signature.parameters[name] for name in self.example.arguments]


def _distinct(model: nn.Module, example: inspect.BoundArguments) -> inspect.BoundArguments:
    """The example with a tensor of its own in each place: torch.export takes one that is there twice for one argument."""
    seen = {id(tensor) for _, tensor in named_state(model)}

    def another(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in seen or tensor.is_inference():
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)
        seen.add(id(tensor))
        return tensor

    arguments = {name: map_tensors(another, value) for name, value in example.arguments.items()}
    return inspect.BoundArguments(example.signature, arguments)


def _free_sizes(leaf: Any) -> Any:
    return dict.fromkeys(range(leaf.dim()), Dim.AUTO) if isinstance(leaf, torch.Tensor) else None


def _size(size: Any) -> int | str:
    return str(size.node._expr) if isinstance(size, torch.SymInt) else size


def _place(error: Exception) -> source.Source | None:
    return source.of_traceback(error.__traceback__, below="trace")


def explained(error: Exception, model: nn.Module) -> TracingError:
    """The error to raise for ``error``, which torch.export raised."""
    where = _place(error)
    text = str(error).strip().split("\n\n")[0]
    if (cache := cache_in(text)) is not None:
        return CacheReturnedError(model, cache)
    lines = [f"torch.export cannot trace {type(model).__name__}: {type(error).__name__}: {text}"]
    lines += [where.excerpt()] if where else []
    lines.append(
        "What to do: move this code into a module of its own, and keep it whole with a tracer whose is_leaf_module says True "
        "for it; or write it with torch functions (torch.where)"
    )
    return TracingError("\n".join(lines))
