"""A Pipe: a model cut into stages, with its loss and its backward pass in one small graph."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn

from pippy.ir.adopt import adopt, adopt_loss, all_tensors, check_still_shared
from pippy.ir.cut.params import MultiUseParamSpec
from pippy.ir.cut.split import Split, split
from pippy.ir.errors import LossError, ModeError, NameLookupError
from pippy.ir.front.sequential import trace_sequential
from pippy.ir.front.trace import Traced, TracerLike, trace
from pippy.ir.names import LOSS, stage_name
from pippy.ir.passes.backward import attach_backward
from pippy.ir.passes.loss import (
    Loss,
    LossSpec,
    attach_loss_function,
    check_loss_function,
    default_loss_spec,
    find_returned_loss,
)
from pippy.ir.passes.verify import verify
from pippy.ir.reference import run_reference
from pippy.ir.run.copies import follow_owners
from pippy.ir.run.graph_module import PipeGraphModule
from pippy.ir.run.shared_tensors import get_tensor
from pippy.ir.show.diagrams import dot, mermaid
from pippy.ir.show.graph_text import graph_text
from pippy.ir.show.notebook import html
from pippy.ir.show.picture import picture_of
from pippy.ir.show.stages_table import stages_table
from pippy.ir.show.svg import svg
from pippy.ir.signature import bind
from pippy.ir.state import load_state

Cut = Callable[[Traced], Any]


class Pipe(nn.Module):
    """A model cut into stages. Make one with `pipeline`, `Pipe.from_tracing` or `Pipe.from_sequential`.

    Called, it runs in this process, backward included: with a loss it returns the loss (or what the model returns
    beside it) and leaves gradients in its parameters' `.grad`. Print it to see the stages and the graph.

    As a module it is the user's model: the same names, parameters, buffers and state dict, in the same order. Copies of
    replicated parameters are not listed: they follow the model's own at each run.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> pipe = Pipe.from_sequential(net, loss_fn=nn.MSELoss())
    >>> loss = pipe(torch.randn(16, 4), torch.randn(16, 1))
    >>> net[0].weight.grad.shape
    torch.Size([8, 4])
    """

    def __init__(self, traced: Traced, parts: Split) -> None:
        super().__init__()
        self.split_gm: PipeGraphModule
        self.__dict__["split_gm"] = parts.split_gm  # no child: what torch sees of a Pipe are the model's own parts
        adopt(self, traced.model, {id(value) for value in traced.attributes.values()})
        self.qualnames = parts.qualnames
        self.replicated_params = parts.replicated_params
        self.wiring = parts.wiring
        self.signature, self.concrete_args, self.given = traced.signature, traced.concrete_args, traced.given
        self.modes = traced.modes
        self.mode: bool | None = None  # what train() or eval() was called for last
        self.training = traced.model.training
        self.loss: Loss | None = None
        self.target_name: str | None = None
        self.balance: Any = None  # what the ``cut`` of `from_tracing` found

    def __setattr__(self, name: str, value: Any) -> None:
        # As in adopt: a part of the model may have the name of one of the Pipe's own attributes.
        if isinstance(value, (nn.Module, torch.Tensor)):
            super().__setattr__(name, value)
        else:
            self.__dict__[name] = value

    @staticmethod
    def from_tracing(
        model: nn.Module,
        multi_use_param_spec: MultiUseParamSpec = None,
        *,
        loss_fn: Callable[..., Any] | None = None,
        output_loss_value_spec: LossSpec = None,
        tracer: TracerLike | None = None,
        concrete_args: Mapping[str, Any] | None = None,
        deep_copy_module: bool = False,
        cut: Cut | None = None,
    ) -> "Pipe":
        """Trace a model and cut it at its marks. `pippy.pipeline` is this, and says what the arguments mean.

        ``cut`` may mark the traced graph itself; what it gives becomes ``balance`` of the Pipe.
        """
        _check_loss(loss_fn, output_loss_value_spec)
        with torch.inference_mode(False):
            traced = trace(copy.deepcopy(model) if deep_copy_module else model, tracer, concrete_args)
            return _cut_and_compile(traced, multi_use_param_spec, loss_fn, output_loss_value_spec, cut)

    @staticmethod
    def from_sequential(
        model: nn.Sequential,
        loss_fn: Callable[..., Any] | None = None,
        *,
        deep_copy_module: bool = False,
        cut: Cut | None = None,
    ) -> "Pipe":
        """Make each child of an `nn.Sequential` a stage. The children are not traced, so they may do anything.

        ``cut`` puts several children into a stage: a `pippy.balance.balancer.Balancer`, whose layers are the children.

        >>> pipe = Pipe.from_sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        >>> pipe.num_stages
        2
        """
        _check_loss(loss_fn, None)
        traced = trace_sequential(copy.deepcopy(model) if deep_copy_module else model, marked=cut is None)
        return _cut_and_compile(traced, None, loss_fn, None, cut)

    @property
    def num_stages(self) -> int:
        """How many stages the Pipe has; `_loss` is not one of them."""
        return sum(1 for _ in self.stages())

    def stages(self) -> Iterator[tuple[str, PipeGraphModule]]:
        """Every stage with its name, in order."""
        for name, module in self.split_gm.named_children():
            if name != LOSS:
                yield name, module  # type: ignore[misc]

    def placeholders(self) -> list[fx.Node]:
        """The inputs of the top-level graph, in order."""
        return list(self.split_gm.graph.find_nodes(op="placeholder"))

    def stage(self, name: str | int) -> Any:
        """A stage by its name or number; `_loss` too, by its name."""
        wanted = stage_name(name) if isinstance(name, int) else name
        if wanted not in self.split_gm._modules:
            raise NameLookupError(f"the Pipe has no stage {name!r}; it has {', '.join(self.split_gm._modules)}")
        return self.split_gm._modules[wanted]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run in this process: outputs or loss, and gradients if there is a loss and gradients are on."""
        self.check_mode()
        check_still_shared(self)
        follow_owners(self.replicas())
        return run_reference(self, bind(self, args, kwargs))

    def check_mode(self) -> None:
        """Raise if the graph is not right in the mode that `train()` or `eval()` has set."""
        if self.mode is not None and not self.modes.allows(self.mode):
            now, other = ("train", "eval") if self.mode else ("eval", "train")
            raise ModeError(
                f"this Pipe was not traced in {now} mode, in which the model does something else from here on:\n"
                f"{self.modes.fixed_at}\nWhat to do: make another Pipe from the model in {now} mode, or call pipe.{other}()"
            )

    def remap_qualname(self, qualname: str) -> str:
        """The user's name for a name inside a stage: of a parameter, a buffer or a module.

        >>> pipe = Pipe.from_sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        >>> pipe.remap_qualname("submod_0.0.weight")
        '0.weight'
        """
        return self.qualnames.remap(qualname)

    def stage_qualnames(self, name: str) -> tuple[str, ...]:
        """Where the user's parameter or buffer lives: the inverse of `remap_qualname`. One used by no stage: nowhere.

        >>> pipe = Pipe.from_sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        >>> pipe.stage_qualnames("0.weight")
        ('submod_0.0.weight',)
        """
        return self.qualnames.locate(name)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict, which has the model's names, into every copy; nothing is written unless all of it fits."""
        return load_state(self, state_dict, strict, assign)

    def get_grad(self, name: str) -> torch.Tensor | None:
        """The gradient of the parameter that the user calls ``name``."""
        places = self.stage_qualnames(name)
        return get_tensor(self.split_gm, places[0]).grad if places else None

    def train(self, mode: bool = True) -> "Pipe":
        """Set every stage to training or evaluation, as `train` of the user's model would."""
        super().train(mode)
        self.split_gm.train(mode)
        self.mode = mode
        for stage, module in self.stages() if self.modes.after else ():
            for path, part in module.named_modules():
                part.training = self.modes.flag(self.remap_qualname(f"{stage}.{path}") if path else "", mode)
        return self

    def replicas(self) -> list[list[torch.Tensor]]:
        """The copies of each replicated parameter, in the order of `replicated_params`; the first is the model's own."""
        return [
            [get_tensor(self.stage(stage), name) for stage, name in group.items()] for group in self.replicated_params
        ]

    def graph_text(self, *args: Any, **kwargs: Any) -> str:
        """Who sends what to whom, as a drawing in text.

        With the arguments of a call (the loss's target included) it says shapes and bytes too. Nothing is computed: they
        come from fake tensors, and no parameter, buffer, gradient or random state changes. So do the other drawings.

        >>> import torch
        >>> pipe = Pipe.from_sequential(nn.Sequential(nn.Linear(2, 5), nn.ReLU()))
        >>> print(pipe.graph_text(torch.zeros(3, 2)))
        ●   input_1  float32[3, 2] 24 B  ─▶ submod_0
        ▼ [submod_0]   15 parameters   60 FLOPs
        ●   _0       float32[3, 5] 60 B  ─▶ submod_1
        ▼ [submod_1]   0 parameters   0 FLOPs
        ●   _1       float32[3, 5] 60 B  ─▶ output
        ▼ [output]
        backward: none, as the Pipe has no loss
        """
        return graph_text(picture_of(self, args, kwargs))

    def stages_table(self, *args: Any, **kwargs: Any) -> str:
        """The size of every stage; with the arguments of a call, what it receives, sends and computes in one forward.

        >>> pipe = Pipe.from_sequential(nn.Sequential(nn.Linear(2, 5), nn.ReLU()))
        >>> print(pipe.stages_table())
        stage      parameters   bytes   buffers   holds
        ───────────────────────────────────────────────
        submod_0           15    60 B       0 B   0
        submod_1            0     0 B       0 B   1
        ───────────────────────────────────────────────
        total              15    60 B       0 B
        backward: none, as the Pipe has no loss
        """
        return stages_table(picture_of(self, args, kwargs))

    def to_mermaid(self, *args: Any, **kwargs: Any) -> str:
        """A Mermaid flowchart, for Markdown pages.

        >>> print(Pipe.from_sequential(nn.Sequential(nn.Linear(2, 5), nn.ReLU())).to_mermaid())
        flowchart LR
            n0(["input_1"])
            n1["submod_0<br/>15 parameters"]
            n2["submod_1<br/>0 parameters"]
            n3(["output"])
            n0 -->|"input_1"| n1
            n1 -->|"_0"| n2
            n2 -->|"_1"| n3
        <BLANKLINE>
        """
        return mermaid(picture_of(self, args, kwargs))

    def to_dot(self, *args: Any, **kwargs: Any) -> str:
        """A Graphviz digraph, in the DOT language.

        >>> dot = Pipe.from_sequential(nn.Sequential(nn.Linear(2, 5), nn.ReLU())).to_dot()
        >>> print(dot.splitlines()[5])
            n1 [shape=box, label="submod_0\\n15 parameters"];
        """
        return dot(picture_of(self, args, kwargs))

    def to_svg(self, *args: Any, **kwargs: Any) -> str:
        """A drawing for a browser or a document.

        >>> Pipe.from_sequential(nn.Sequential(nn.Linear(2, 5), nn.ReLU())).to_svg()[:39]
        '<svg xmlns="http://www.w3.org/2000/svg"'
        """
        return svg(picture_of(self, args, kwargs))

    def _repr_html_(self) -> str:
        """What a notebook shows.

        >>> "submod_1" in Pipe.from_sequential(nn.Sequential(nn.Linear(2, 5), nn.ReLU()))._repr_html_()
        True
        """
        return html(picture_of(self))

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "Pipe":
        """Convert or move every tensor where it is, so that stages, model and optimizer go on sharing it."""
        for tensor in all_tensors(self):
            gradient = tensor.grad
            tensor.data = fn(tensor.data)
            if gradient is not None:
                gradient.data = fn(gradient.data)
        return self

    def __str__(self) -> str:
        return str(self.split_gm)

    def __repr__(self) -> str:
        return str(self)


def _check_loss(loss_fn: object, output_loss_value_spec: LossSpec) -> None:
    if loss_fn is None:
        return
    check_loss_function(loss_fn)
    if output_loss_value_spec is not None:
        raise LossError(
            f"both loss_fn and output_loss_value_spec={output_loss_value_spec!r} are given; a loss function computes the "
            "loss from the outputs, and the specification says which output already is the loss: give one of them"
        )


def _cut_and_compile(
    traced: Traced,
    spec: MultiUseParamSpec,
    loss_fn: Callable[..., Any] | None,
    loss_spec: LossSpec,
    cut: Cut | None,
) -> Pipe:
    found = None if cut is None else cut(traced)
    pipe = _compile(traced, spec, loss_fn, loss_spec)
    pipe.balance = found
    return pipe


def _compile(traced: Traced, spec: MultiUseParamSpec, loss_fn: Callable[..., Any] | None, loss_spec: LossSpec) -> Pipe:
    """The passes, in order. Each takes a verified Pipe and leaves one."""
    pipe = Pipe(traced, split(traced, spec))
    verify(pipe)
    if loss_fn is not None:
        attach_loss_function(pipe, loss_fn)
        adopt_loss(pipe)
    else:
        find_returned_loss(pipe, default_loss_spec(pipe, traced.model) if loss_spec is None else loss_spec)
    if pipe.loss is not None:
        verify(pipe, before_backward=True)
        attach_backward(pipe)
        verify(pipe)
    return pipe
