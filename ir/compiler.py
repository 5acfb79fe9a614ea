"""The compiler: the passes in their order."""

from collections.abc import Callable
from typing import Any

from pippy.ir.base.brief import brief
from pippy.ir.base.errors import BalanceError, LossError
from pippy.ir.cut.assigned_buffers import write_early
from pippy.ir.cut.name_draws import name_draws
from pippy.ir.cut.params import MultiUseParamSpec
from pippy.ir.cut.split import split
from pippy.ir.cut.views import connect_views
from pippy.ir.loss.backward import attach_backward
from pippy.ir.loss.loss_function import attach_loss_function, check_loss_function
from pippy.ir.loss.reserved_names import reserve_names
from pippy.ir.loss.returned_loss import LossSpec, default_loss_spec, find_returned_loss
from pippy.ir.record.compiled import Compiled
from pippy.ir.record.traced import Traced
from pippy.ir.verify.verify import check_rules

Cut = Callable[[Traced], Any]


def compile_traced(
    traced: Traced,
    multi_use_param_spec: MultiUseParamSpec = None,
    loss_fn: Callable[..., Any] | None = None,
    loss_spec: LossSpec = None,
    cut: Cut | None = None,
) -> Compiled:
    """From a marked graph to stages with their loss and backward. Each pass takes a verified record and leaves one.

    ``cut`` may mark the graph first; what it gives is kept as ``balance``.
    """
    if cut is not None and not callable(cut):
        raise BalanceError(
            f"cut={brief(cut)} is a {type(cut).__name__}; give a pippy.balance.balancer.Balancer, or leave it out"
        )
    write_early(traced)
    connect_views(traced)
    balance = None if cut is None else cut(traced)
    name_draws(traced)
    if loss_fn is not None:
        reserve_names(traced)
    compiled = split(traced, multi_use_param_spec)
    compiled.balance = balance
    check_rules(compiled)
    if loss_fn is not None:
        attach_loss_function(compiled, loss_fn, traced.name_for_target())
    else:
        find_returned_loss(compiled, default_loss_spec(compiled, traced.model) if loss_spec is None else loss_spec)
    if compiled.loss is not None:
        check_rules(compiled, before_backward=True)
        attach_backward(compiled)
        check_rules(compiled)
    return compiled


def check_loss_arguments(loss_fn: object, output_loss_value_spec: LossSpec) -> None:
    """Refuse a loss that cannot be compiled, before anything is traced."""
    if loss_fn is None:
        return
    check_loss_function(loss_fn)
    if output_loss_value_spec is not None:
        raise LossError(
            f"both loss_fn and output_loss_value_spec={brief(output_loss_value_spec)} are given, but only one can "
            "be used: loss_fn computes the loss from the outputs, and output_loss_value_spec says which output is "
            "the loss; give one of them"
        )
