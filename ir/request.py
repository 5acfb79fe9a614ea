"""What is asked of the compiler: how a model is traced, what its loss is, what becomes of parameters that stages share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from pippy.ir.base.compiling import original_of
from pippy.ir.base.errors import BalanceError, LossError
from pippy.ir.base.readable import brief
from pippy.ir.cut.params import MultiUseParamSpec
from pippy.ir.loss.loss_function import check_loss_function
from pippy.ir.loss.returned_loss import LossSpec
from pippy.ir.record.compiled import Traced
from pippy.ir.trace.arguments import Example, check_examples
from pippy.ir.trace.trace import TracerLike

Cut = Callable[[Traced], Any]  # marks a traced graph, and gives what it knows of the stages


@dataclass(frozen=True, eq=False, kw_only=True)
class Request:
    """What `pippy.pipeline` was asked for, but for the model; `pipeline` says what each means. ``cut`` is None if the model is
    marked.

    What cannot be done with any model is refused here, before anything is traced.
    """

    loss_fn: Callable[..., Any] | None = None
    output_loss_value_spec: LossSpec = None
    multi_use_param_spec: MultiUseParamSpec = None
    tracer: TracerLike | None = None
    concrete_args: Mapping[str, Any] | None = None
    example_args: Sequence[Any] | None = None
    example_kwargs: Mapping[str, Any] | None = None
    deep_copy_module: bool = False
    cut: Cut | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss_fn", original_of(self.loss_fn))
        check_examples(self.example_args, self.example_kwargs)
        if self.loss_fn is not None:
            check_loss_function(self.loss_fn)
        if self.loss_fn is not None and self.output_loss_value_spec is not None:
            raise LossError(
                f"both loss_fn and output_loss_value_spec={brief(self.output_loss_value_spec)} are given, but only one can "
                "be used: loss_fn computes the loss from the outputs, and output_loss_value_spec says which output is "
                "the loss; give one of them"
            )
        if self.cut is not None and not callable(self.cut):
            raise BalanceError(
                f"cut={brief(self.cut)} is a {type(self.cut).__name__}; give a pippy.balance.balancer.Balancer, or leave it out"
            )

    @property
    def has_example(self) -> bool:
        """Whether there are example arguments."""
        return self.example_args is not None or bool(self.example_kwargs)

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The example arguments by their places, and those by their names."""
        return tuple(self.example_args or ()), dict(self.example_kwargs or {})

    def example(self, model: nn.Module) -> Example | None:
        """The example arguments, of which the last may be the target of the loss; None if there are none."""
        if not self.has_example:
            return None
        return Example.of(model, *self.arguments, with_target=self.loss_fn is not None)
