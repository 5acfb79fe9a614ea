"""What the user holds: the user's model, compiled. A Pipe has the names of the model, and shows what was compiled."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pippy.ir.base.compiling import original_of
from pippy.ir.base.errors import InputError
from pippy.ir.base.interrupts import heard
from pippy.ir.base.public_calls import placing_words
from pippy.ir.base.readable import count_with_noun
from pippy.ir.base.trees import map_tensors, tensors
from pippy.ir.call.signature import bind, check_guards
from pippy.ir.compile import compile_traced
from pippy.ir.cut.params import MultiUseParamSpec
from pippy.ir.loss.loss_function import LossWrapper
from pippy.ir.loss.returned_loss import LossSpec
from pippy.ir.model_parts import (
    all_tensors,
    check_dtypes,
    constants_of,
    load_state,
    parts_come_first,
    put_loss_parameters,
    put_model_parts,
)
from pippy.ir.record.compiled import Compiled, Traced
from pippy.ir.record.model_watch import ModelWatch
from pippy.ir.reference import run_reference
from pippy.ir.request import Cut, Request
from pippy.ir.run.copies import deep_copy, follow_owners
from pippy.ir.show.content import content_of
from pippy.ir.show.drawing import Drawing
from pippy.ir.trace.arguments import Example, signature_of
from pippy.ir.trace.exported import ExportedModel, module_of
from pippy.ir.trace.sequential import Layers, trace_sequential
from pippy.ir.trace.trace import TracerLike, trace
from pippy.ir.trace.untraceable import check_model
from pippy.ir.verify.verify import check_rules

_COMPILED = "pippy.compiled"  # no part of a model can have this name, since it has a dot
_WATCH = "pippy.watch"
_MODEL = "pippy.model"
_EXAMPLE = "pippy.example"
_FIELDS = frozenset(field.name for field in dataclasses.fields(Compiled))
_SHOWN = _FIELDS | {name for name in vars(Compiled) if not name.startswith("_")}


@parts_come_first
@placing_words(owner="pipe")
class Pipe(nn.Module):
    """A model cut into stages. Make one with `pipeline`, `Pipe.from_tracing` or `Pipe.from_sequential`.

    Called, it runs in this process, backward included: with a loss it returns the loss (or what the model returns
    beside it) and leaves gradients in its parameters' `.grad`. Print it to see the stages and the graph.

    As a module it is the user's model: the same names, parameters, buffers and state dict, in the same order. Copies of
    replicated parameters are not listed: they follow the model's own at each run. What was compiled, `pipe.split_gm` or
    `pipe.stages()`, can be read from it too, unless a part of the model has that name: the part comes first.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> pipe = Pipe.from_sequential(net, loss_fn=nn.MSELoss())
    >>> loss = pipe(torch.randn(16, 4), torch.randn(16, 1))
    >>> net[0].weight.grad.shape
    torch.Size([8, 4])
    """

    def __init__(self, traced: Traced, compiled: Compiled, loss: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.__dict__[_COMPILED] = compiled
        put_model_parts(self, traced.model, {id(value) for value in traced.attributes.values()})
        if compiled.target_name is not None:
            put_loss_parameters(self, compiled)
        self.training = traced.model.training
        self.__dict__[_MODEL] = TracedModel(traced.model, loss)
        self.__dict__[_WATCH] = watch = ModelWatch()
        watch.begin(self, compiled, traced.model, loss, traced.reads)

    @staticmethod
    def from_tracing(
        model: nn.Module,
        multi_use_param_spec: MultiUseParamSpec = None,
        *,
        loss_fn: Callable[..., Any] | None = None,
        output_loss_value_spec: LossSpec = None,
        tracer: TracerLike | None = None,
        concrete_args: Mapping[str, Any] | None = None,
        example_args: Sequence[Any] | None = None,
        example_kwargs: Mapping[str, Any] | None = None,
        deep_copy_module: bool = False,
        cut: Cut | None = None,
    ) -> "Pipe":
        """Trace a model and cut it at its marks. `pippy.pipeline` is this, and says what the arguments mean.

        ``cut`` may mark the traced graph itself; what it gives becomes ``balance`` of the Pipe.
        """
        request = Request(
            loss_fn=loss_fn,
            output_loss_value_spec=output_loss_value_spec,
            multi_use_param_spec=multi_use_param_spec,
            tracer=tracer,
            concrete_args=concrete_args,
            example_args=example_args,
            example_kwargs=example_kwargs,
            deep_copy_module=deep_copy_module,
            cut=cut,
        )
        return pipe_of(model, request)

    @staticmethod
    def from_sequential(
        model: nn.Sequential | Layers,
        loss_fn: Callable[..., Any] | None = None,
        *,
        deep_copy_module: bool = False,
        cut: Cut | None = None,
    ) -> "Pipe":
        """Make each child of an `nn.Sequential`, or layer of a list, a stage. They are not traced, so they may do anything.

        In a list there may be functions, too. ``cut`` puts several children into a stage: a `pippy.balance.balancer.Balancer`,
        whose layers are the children.

        >>> Pipe.from_sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU())).num_stages
        2
        >>> import torch
        >>> Pipe.from_sequential([nn.Linear(2, 2), lambda x: torch.flatten(x), nn.ReLU()])(torch.ones(3, 2)).shape
        torch.Size([6])
        """
        model, request = original_of(model), Request(loss_fn=loss_fn, deep_copy_module=deep_copy_module, cut=cut)
        traced = trace_sequential(deep_copy(model) if deep_copy_module else model, marked=cut is None)
        return _made(traced, request)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        compiled = compiled_of(self)
        watch_of(self).begin(self, compiled, self, compiled.loss_module, ())

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # a part of the model
        except AttributeError:
            if name in _SHOWN and _COMPILED in self.__dict__:
                return getattr(compiled_of(self), name)
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        parts = {**self._parameters, **self._buffers, **self._modules} if name in _FIELDS else {}
        if name in _FIELDS and name not in parts and not isinstance(value, (nn.Module, torch.Tensor)):
            setattr(compiled_of(self), name, value)
        else:
            super().__setattr__(name, value)

    def __dir__(self) -> Iterable[str]:
        return sorted((set(super().__dir__()) | _SHOWN) - {_COMPILED, _WATCH, _MODEL, _EXAMPLE})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run in this process: outputs or loss, and gradients if there is a loss and gradients are on."""
        compiled = compiled_of(self)
        follow_changes(self)
        inputs = bind(compiled, args, kwargs)
        check_guards(compiled, inputs)
        if any(not each.is_meta for each in tensors(inputs)) and any(each.is_meta for each in self.parameters()):
            raise InputError(
                "the Pipe cannot be called, because its model is on the meta device; make a driver, call "
                "driver.initialize(), which makes the parameters on the workers, and run the driver"
            )
        return run_reference(compiled, inputs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict, which has the model's names, into every copy; nothing is written unless all of it fits."""
        return load_state(self, compiled_of(self), state_dict, strict, assign)

    def train(self, mode: bool = True) -> "Pipe":
        """Set every stage, and the user's model, to training or evaluation, as `train` of the user's model would."""
        super().train(mode)
        compiled = compiled_of(self)
        compiled.split_gm.train(mode)
        for stage, module in compiled.stages() if compiled.modes.after else ():
            for path, part in module.named_modules():
                user_name = compiled.remap_qualname(f"{stage}.{path}") if path else ""
                part.training = compiled.modes.flag(user_name, mode)
        watch_of(self).flags.set_mode(self, compiled, mode)
        return self

    def draw(self, *args: Any, **kwargs: Any) -> Drawing:
        """A drawing of who sends what to whom: print it, or let a notebook show it. It has other formats, too.

        With the arguments of a call (the loss's target included) it shows shapes and bytes too. Nothing is computed: they
        come from fake tensors, and no parameter, buffer, gradient or random state changes.

        >>> import torch
        >>> pipe = Pipe.from_sequential(nn.Sequential(nn.Linear(2, 5), nn.ReLU()))
        >>> print(pipe.draw(torch.zeros(3, 2)))
        ●   input_1  float32[3, 2] 24 B  ─▶ submod_0
        ▼ [submod_0]   15 parameters   60 FLOPs
        ●   _0       float32[3, 5] 60 B  ─▶ submod_1
        ▼ [submod_1]   0 parameters   0 FLOPs
        ●   _1       float32[3, 5] 60 B  ─▶ output
        ▼ [output]
        backward: none, as the Pipe has no loss
        >>> print(pipe.draw().table())
        stage      parameters   bytes   buffers   holds
        ───────────────────────────────────────────────
        submod_0           15    60 B       0 B   0
        submod_1            0     0 B       0 B   1
        ───────────────────────────────────────────────
        total              15    60 B       0 B
        backward: none, as the Pipe has no loss
        """
        if any(parameter.is_meta for parameter in self.parameters()):
            args, kwargs = map_tensors(lambda tensor: tensor.to("meta"), (args, kwargs))
        return Drawing(content_of(compiled_of(self), args, kwargs))

    def _repr_html_(self) -> str:
        return self.draw()._repr_html_()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "Pipe":
        """Convert or move every tensor where it is, so that stages, model and optimizer go on sharing it.

        Constants of forward are moved, and keep the dtype that they were written with, as in the plain model.
        """
        constants = constants_of(self, compiled_of(self))
        for tensor in all_tensors(self, compiled_of(self)):
            gradient, changed = tensor.grad, fn(tensor.data)
            is_constant = id(tensor) in constants and not tensor.is_meta
            tensor.data = tensor.data.to(changed.device) if is_constant else changed
            if gradient is not None:
                gradient.data = fn(gradient.data)
        return self

    def __str__(self) -> str:
        return str(compiled_of(self).split_gm)

    def __repr__(self) -> str:
        """
        >>> Pipe.from_sequential(nn.Sequential(nn.Linear(2, 5), nn.ReLU()))
        <Pipe: 2 stages, 15 parameters, no loss; print it to see its graph>
        """
        compiled, count = compiled_of(self), sum(each.numel() for each in self.parameters())
        loss = "no loss" if compiled.loss is None else "with its loss and backward"
        stages = count_with_noun(compiled.num_stages, "stage")
        return f"<Pipe: {stages}, {count:,} parameters, {loss}; print it to see its graph>"


class TracedModel:
    """The model that a Pipe was made from, the loss, and the request. A copy of a Pipe has none: its tensors are not those of
    the model."""

    def __init__(self, model: nn.Module | None = None, loss: Callable[..., Any] | None = None) -> None:
        self.model, self.loss = model, loss
        self.request: Request | None = None

    def __reduce__(self) -> Any:
        return TracedModel, ()


def model_of(pipe: Pipe) -> nn.Module | None:
    """The model that a Pipe was made from, which shares its tensors; None for a copy of a Pipe."""
    model: nn.Module | None = pipe.__dict__[_MODEL].model
    return model


def loss_of(pipe: Pipe) -> Callable[..., Any] | None:
    """The loss function that was given for a Pipe; None if the model returns its loss."""
    loss: Callable[..., Any] | None = pipe.__dict__[_MODEL].loss
    return loss


def request_of(pipe: Pipe) -> Request | None:
    """What was asked for when the model of a Pipe was traced; None for a copy, and for one that was not traced."""
    request: Request | None = pipe.__dict__[_MODEL].request
    return request


def compiled_of(pipe: Pipe) -> Compiled:
    """What a Pipe shows: the record of what was compiled."""
    return pipe.__dict__[_COMPILED]


def example_of(pipe: Pipe) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the example that a Pipe was made with, the target included; its tensors have no numbers."""
    example: Example | None = pipe.__dict__.get(_EXAMPLE)
    if example is None:
        raise InputError(
            "this Pipe was made without an example, so the sizes of its inputs are not known; give the arguments of a call, as "
            "in driver.memory(4, x, target). Tensors of the meta device are enough: torch.empty(32, 8, device='meta')"
        )
    return example.args, example.kwargs


def given_in_example(pipe: Pipe) -> frozenset[str]:
    """The names of the arguments of forward that the example of a Pipe gave."""
    example: Example | None = pipe.__dict__.get(_EXAMPLE)
    model = model_of(pipe)
    if example is None or model is None:
        return frozenset()
    signature = signature_of(model)
    args, kwargs = example.of_model(signature)
    return frozenset(signature.bind_partial(*args, **kwargs).arguments)


def pipe_of(model: Any, request: Request) -> Pipe:
    """Trace a module or an exported program, cut it at its marks or at those that the request places, and compile it."""
    model = module_of(original_of(model))
    check_model(model)
    with heard(), torch.inference_mode(False):
        model = deep_copy(model) if request.deep_copy_module else model
        example = request.example(model)
        traced = trace(model, request.tracer, request.concrete_args, example)
        pipe = _made(traced, request)
        pipe.__dict__[_MODEL].request = None if isinstance(model, ExportedModel) else request
        pipe.__dict__[_EXAMPLE] = None if example is None else _without_numbers(example)
        return pipe


def _made(traced: Traced, request: Request) -> Pipe:
    return Pipe(traced, compile_traced(traced, request), request.loss_fn)


def pipe_alike(pipe: Pipe, traced: Traced, compiled: Compiled) -> Pipe:
    """A Pipe of another graph of the model that ``pipe`` was made from. It is called with the same example."""
    alike = Pipe(traced, compiled, loss_of(pipe))
    alike.__dict__[_EXAMPLE] = pipe.__dict__.get(_EXAMPLE)
    return alike


def _without_numbers(example: Example) -> Example:
    def empty(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device="meta") if tensor.layout is torch.strided else tensor

    args, kwargs = map_tensors(empty, (example.args, example.kwargs))
    return dataclasses.replace(example, args=args, kwargs=kwargs)


def modules_of_model(pipe: Pipe) -> list[nn.Module]:
    """The modules of this process that are, or stand for, modules of the user's model."""
    modules = [*pipe.modules(), *watch_of(pipe).flags.modules()]
    return list({id(module): module for module in modules}.values())


def models_of(pipe: Pipe) -> list[nn.Module]:
    """What the user may call in this process: the model, also inside of its `LossWrapper`, and the Pipe."""
    models = [pipe, *watch_of(pipe).flags.models()]
    models += [each.module for each in models if isinstance(each, LossWrapper)]
    return list({id(module): module for module in models}.values())


def watch_of(pipe: Pipe) -> ModelWatch:
    """What is noted of the model and the loss of a Pipe, which the script may change."""
    watch: ModelWatch = pipe.__dict__[_WATCH]
    return watch


def follow_changes(pipe: Pipe) -> None:
    """Before a Pipe runs here, or is sent to workers: it follows what the script has changed. Raises if it cannot."""
    compiled = compiled_of(pipe)
    watch_of(pipe).follow(pipe, compiled, in_process=True)
    check_dtypes(compiled)
    follow_owners(compiled.copies())


def follow_training_flags(pipe: Pipe) -> None:
    """Before a Pipe runs: have all modules follow what was switched, and raise if the graph is not right in these modes."""
    flags, compiled = watch_of(pipe).flags, compiled_of(pipe)
    flags.follow(pipe, compiled)
    flags.check(compiled.modes)


def verify(pipe: Pipe) -> None:
    """Check that a Pipe is what its stages make, and raise once with what is wrong.

    >>> pipe = Pipe.from_sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    >>> verify(pipe)
    >>> pipe.split_gm.graph.output_node().args = (None,)
    >>> verify(pipe)
    Traceback (most recent call last):
      ...
    pippy.ir.base.errors.VerificationError: the Pipe breaks 1 rule:
        input_1
        submod_0 = submod_0(input_1)
        submod_1 = submod_1(submod_0)
        return None
        ^^^ must be return submod_1
    """
    if not isinstance(pipe, Pipe):
        raise InputError(
            f"verify checks a Pipe, and this is a {type(pipe).__name__}; make one: pipeline(model, loss_fn)"
        )
    check_rules(compiled_of(pipe))
