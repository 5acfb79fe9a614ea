"""The compiler: the passes in their order."""

from pippy.ir.cut.effects import name_draws
from pippy.ir.cut.split import split
from pippy.ir.loss.backward import attach_backward
from pippy.ir.loss.loss_function import attach_loss_function, reserve_names
from pippy.ir.loss.returned_loss import default_loss_spec, find_returned_loss
from pippy.ir.record.compiled import Compiled, Traced
from pippy.ir.request import Request
from pippy.ir.verify.verify import check_rules


def compile_traced(traced: Traced, request: Request) -> Compiled:
    """From a graph to stages with their loss and backward. Each pass takes a verified record and leaves one.

    The graph is marked already, or the request marks it.
    """
    balance = None if request.cut is None else request.cut(traced)
    name_draws(traced)
    if request.loss_fn is not None:
        reserve_names(traced)
    compiled = split(traced, request.multi_use_param_spec)
    compiled.balance = balance
    check_rules(compiled)
    if request.loss_fn is not None:
        attach_loss_function(compiled, request.loss_fn, traced.name_for_target(), traced.model_tensors)
    else:
        spec = request.output_loss_value_spec
        find_returned_loss(compiled, default_loss_spec(compiled, traced.model) if spec is None else spec)
    if compiled.loss is not None:
        check_rules(compiled, before_backward=True)
        attach_backward(compiled)
        check_rules(compiled)
    return compiled
