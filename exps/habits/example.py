"""One random example: a model of parts with habits, its loss, its batches, and how it is run."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from exps.habits import derivatives, functions, losses, parts, reaching
from exps.habits.changes import CHANGES, OPTIMIZERS
from exps.habits.losses import IGNORED, REDUCTIONS
from exps.habits.more_losses import MORE_LOSSES, SETTINGS
from exps.habits.parts import HARMLESS, WIDTH
from pippy import MultiUseParameterConfig, Pipe, PipelineDriver, PipeTracer, pipe_split, pipeline

SCHEDULES = ("fill_drain", "1f1b", "interleaved_1f1b", "looped_bfs", "zb_h1", "zb_h2", "eager_1f1b")
PADDING = {"none": 0.0, "some": 0.3, "much": 0.7}
PARTS = parts.PARTS | functions.PARTS | reaching.PARTS | derivatives.PARTS
HABITS = tuple(name for name in PARTS if name not in HARMLESS)
LOSSES = losses.LOSSES | MORE_LOSSES
PLAIN_LOSSES = ("cross entropy", "module", "sum", "weights", "smoothed", "squares", "by hand", "missing are zero")


@dataclass(frozen=True)
class Example:
    """All that decides an example's numbers. Its text, as `repr` gives it, makes it again."""

    seed: int
    parts: tuple[str, ...]  # linear layers come before the first and after the last
    cuts: tuple[bool, ...]  # whether a stage ends after each part
    loss: str
    rows: tuple[int, ...]  # of each step
    padding: tuple[str, ...]
    chunks: int
    whole: tuple[bool, ...] = ()  # which parts tracing does not look into
    tokens: int = 0  # the length of sequences; 0 for rows without
    returns: str | None = None  # how the model returns its loss; None if the loss is a function
    reduction: str = "omitted"
    schedule: str = "fill_drain"
    config: str = "TRANSMIT"
    single_loss: bool = False
    checkpoint: str = "never"
    replicas: int = 1
    late_hooks: bool = False
    example_given: bool = False  # an example of one micro-batch
    optimizer: str = "sgd"
    change: str | None = None  # what the script does before the second step, or in it

    @property
    def loss_reduction(self) -> str | Callable[..., Any] | None:
        fits = LOSSES[self.loss].fits
        return fits if self.reduction == "fits" else REDUCTIONS[self.reduction]

    @property
    def draws(self) -> bool:
        return "dropout" in self.parts or "shuffled" in (*self.parts, self.loss)

    def model(self, dropout: bool) -> "Model":
        """The model, the same each time."""
        torch.manual_seed(self.seed)
        SETTINGS.update(smoothing=0.0, factor=1.0)
        model = (Model if self.returns is None else Returning)(self).double()
        for each in (*model.parts, model.loss):
            if isinstance(each, parts.Dropout) and not dropout:
                each.layer.p = 0.0
            if hasattr(each, "draws"):
                each.draws = dropout
        return model

    def batches(
        self, padding: tuple[str, ...] | None = None, of_inputs: bool = True, apart: float = 1.0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The inputs and targets of each step. Without ``of_inputs``, only targets are padded, as those of a prompt are.

        ``apart``: how far inputs are from 0.
        """
        generator = torch.Generator().manual_seed(self.seed + 1)
        for rows, padded in zip(self.rows, padding or self.padding, strict=True):
            shape = (rows, self.tokens) if self.tokens else (rows,)
            x = apart * torch.randn(*shape, WIDTH, dtype=torch.float64, generator=generator)
            drawn = torch.rand(shape, generator=generator)
            keep = drawn >= PADDING[padded]
            if self.tokens:  # padding is at the right
                keep = keep.cummin(1).values
            keep[0] = True
            if LOSSES[self.loss].numbers:
                target = torch.randn(shape, dtype=torch.float64, generator=generator).masked_fill(~keep, torch.nan)
            else:
                target = torch.randint(0, WIDTH, shape, generator=generator).masked_fill(~keep, IGNORED)
            yield x * keep.unsqueeze(-1) if of_inputs else x, target

    def pipe(self, model: "Model") -> Pipe:
        """The model cut. Raises what pippy refuses."""
        options: dict[str, Any] = {}
        if self.returns is None:
            options["loss_fn"] = model.loss_fn()
        else:
            options["output_loss_value_spec"] = {"loss": True, "dict": "loss", "tuple": 0}[self.returns]
        if self.example_given:
            options["example_args"] = [each[: max(1, self.rows[0] // self.chunks)] for each in next(self.batches())]
        return pipeline(model, multi_use_param_spec=MultiUseParameterConfig[self.config], tracer=KeepsWhole, **options)

    def driver(self, pipe: Pipe, workers: Any, **more: Any) -> PipelineDriver:
        return PipelineDriver(
            pipe,
            workers,
            schedule=self.schedule,
            loss_reduction=self.loss_reduction,
            single_loss=self.single_loss,
            checkpoint=self.checkpoint,
            replicas=self.replicas,
            keyed_random=7,
            step_timeout=60,
            **more,
        )


ADDING = {name for name in PARTS if name.startswith(("term: ", "experts")) or name == "decay"}


class Model(nn.Module):
    """Runs its parts. Returns their values, and the sum of their terms if there are any."""

    def __init__(self, example: Example) -> None:
        super().__init__()
        self.example = example
        self.shared = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList(PARTS[name](self.shared) for name in example.parts)
        for part, whole in zip(self.parts, example.whole):
            part.kept_whole = whole  # type: ignore[assignment]
        for part in self.parts:
            if hasattr(part, "meet"):
                part.meet(self)  # type: ignore[operator]
        for index, parameter in enumerate(self.parameters()):
            parameter.lr_scale = 1 + index % 3  # type: ignore[attr-defined]
        self.wants_gradient = any(map(derivatives.wants_gradient, example.parts))
        self.keep_loss(LOSSES[example.loss].made(self))
        if not example.late_hooks:
            self.put_on_hooks()

    def keep_loss(self, loss: Callable[[Any, Any], Any]) -> None:
        """A script has the loss beside the model."""
        self.hidden = [loss]

    @property
    def loss(self) -> Any:
        return self.hidden[0]

    def loss_fn(self) -> Callable[[Any, Any], Any]:
        """The loss of what the model returns: its values, and its terms if it has some."""
        function = self.loss
        if not any(name in ADDING for name in self.example.parts):
            return function
        return lambda output, target: function(output[0], target) + output[1]

    def decayed(self, h: Any, target: Any) -> Any:
        """A loss that is a method of the model."""
        return F.cross_entropy(*losses.flat(h, target)) + 0.01 * self.first.weight.square().sum()

    def put_on_hooks(self) -> None:
        hooked = {id(getattr(part, "weight", part)): part for part in self.parts if hasattr(part, "put_on")}
        self.hooks = [part.put_on() for part in hooked.values()]  # type: ignore[operator]  # a shared weight gets one

    def take_off_hooks(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def forward(self, x: Any) -> Any:
        if self.wants_gradient:
            x = (
                x.requires_grad_()
                if "grad: by the input, in place" in self.example.parts
                else x.detach().requires_grad_()
            )
        h, terms = torch.tanh(self.first(x)), []
        for part, cut in zip(self.parts, self.example.cuts, strict=True):
            h = part(h, x)
            if part_adds(part):
                h, term = h
                terms.append(term)
            if cut:
                pipe_split()
        h = self.last(h)
        return (h, sum(terms[1:], terms[0])) if terms else h


def part_adds(part: nn.Module) -> bool:
    return type(part).__name__ in ("Adds", "Decays", "Experts", "Penalizes")


class Returning(Model):
    """Returns its loss, alone or with its values."""

    def keep_loss(self, loss: Callable[[Any, Any], Any]) -> None:
        self.criterion = loss

    @property
    def loss(self) -> Any:
        return self.criterion

    def forward(self, x: Any, target: Any) -> Any:  # type: ignore[override]
        result = super().forward(x)
        loss = self.loss_fn()(result, target)
        h = result[0] if isinstance(result, tuple) else result
        return {"loss": loss, "dict": {"loss": loss, "values": h}, "tuple": (loss, h)}[self.example.returns or "loss"]


class KeepsWhole(PipeTracer):
    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return getattr(module, "kept_whole", False) or super().is_leaf_module(module, name)


def draw(seed: int) -> Example:
    """A random example."""
    chosen = random.Random(seed)
    tokens = chosen.choice((0, 0, 3))
    habits = chosen.choices(HABITS, k=chosen.choice((0, 1, 1, 1, 2)))
    parts = habits + chosen.choices(HARMLESS, k=chosen.randint(1, 3))
    fitting = [name for name, each in LOSSES.items() if each.tokens is None or each.tokens == bool(tokens)]
    loss = chosen.choice(fitting if chosen.random() < 0.5 else [name for name in PLAIN_LOSSES if name in fitting])
    change = chosen.choice(list(CHANGES)) if chosen.random() < 0.25 else None
    optimizer = chosen.choice((*OPTIMIZERS, "sgd", "sgd", "sgd", "sgd", "sgd"))
    if change is not None:
        needs = CHANGES[change]
        parts += [needs.part] if needs.part else []
        optimizer, loss = needs.optimizer or optimizer, needs.loss or loss
        tokens = 0 if needs.loss else tokens
    chosen.shuffle(parts)
    fits = LOSSES[loss].fits not in (None, "none")
    count = "present" if LOSSES[loss].numbers else "counted"
    reductions = ["omitted"] * 4 + ["fits"] * 3 * fits + ["sum", "mean", "rows", count]
    schedule, returns = chosen.choice(SCHEDULES), chosen.choice((None, None, "loss", "dict", "tuple"))
    padding = chosen.choice(
        (("none",) * 3, ("none", "some", "much"), ("none", "none", "some"), ("some", "much", "none"), ("some",) * 3)
    )
    return Example(
        seed=seed,
        parts=tuple(parts),
        cuts=tuple(chosen.random() < 0.5 for _ in parts),
        loss=loss,
        rows=tuple(chosen.choice(((6, 6, 6), (5, 5, 5), (7, 7, 7), (10, 10, 10), (6, 7, 5)))),
        padding=padding,
        # a batch norm normalizes each micro-batch by itself, as docs/microbatches.md says
        chunks=1 if "batch norm" in parts else chosen.choice((1, 2, 2, 3, 4)),
        whole=tuple(chosen.random() < 0.2 for _ in parts),
        tokens=tokens,
        returns=returns,
        reduction=chosen.choice(reductions),
        schedule=schedule,
        config=chosen.choice(("TRANSMIT", "REPLICATE")),
        single_loss=schedule == "fill_drain" and returns is None and chosen.random() < 0.4,
        checkpoint=chosen.choice(("never", "never", "never", "always")),
        late_hooks=chosen.random() < 0.3,
        example_given=chosen.random() < 0.25,
        optimizer=optimizer,
        change=change,
    )
