"""The argument ``outputs`` of `driver.run`: what a step gives beside the loss.

outputs    the step gives                                     the workers return
─────────────────────────────────────────────────────────────────────────────────────────
None       what the Pipe gives                                those values
True       `LossAndOutputs`: the loss, the model's outputs    the loss, and all that the model returns
False      the loss                                           the loss alone
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import fx

from pippy.drivers.base.errors import DriverError
from pippy.ir.base.names import LOSS
from pippy.ir.base.readable import brief
from pippy.ir.base.trees import describe
from pippy.ir.call.signature import call_signature
from pippy.ir.record.compiled import Compiled

_NAME = "outputs"


class LossAndOutputs(NamedTuple):
    """What a step gives with ``outputs=True``: ``loss, outputs = driver.run(4, x, target, outputs=True)``.

    ``loss`` is None if the Pipe has no loss. ``outputs`` are what the model returns for the whole mini-batch, detached.
    """

    loss: Any
    outputs: Any


def model_output(compiled: Compiled) -> Any:
    """What the model returns, with nodes for its values. Where there is a loss function, the graph returns the loss."""
    graph = compiled.split_gm.graph
    for loss in graph.find_nodes(op="call_module", target=LOSS):
        return loss.args[0]
    return graph.output_node().args[0]


def values_to_return(compiled: Compiled, outputs: bool | None) -> dict[fx.Node, Any] | None:
    """The values that the workers return. Each has None if all of it is returned, or a seed that marks the loss in it.

    Returns None if these are the values that the program returns.
    """
    if outputs is None or compiled.loss is None:
        return None
    loss = next(node for node in compiled.split_gm.graph.nodes if node.name == compiled.loss.value)
    if not outputs:
        return {loss: compiled.loss.seed}
    returned: dict[fx.Node, Any] = {loss: None}
    fx.node.map_arg(model_output(compiled), lambda node: returned.setdefault(node, None))
    return returned


def asked_outputs(
    compiled: Compiled, outputs: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[bool | None, dict[str, Any]]:
    """The argument ``outputs`` of `run`, and the keyword arguments of the model, which may have an ``outputs`` of its own."""
    if outputs is None:
        return None, kwargs
    parameters = call_signature(compiled).parameters.values()
    named = any(each.name == _NAME for each in parameters) and not _by_position(compiled, args, kwargs)
    takes = named or any(each.kind is each.VAR_KEYWORD for each in parameters)
    if not isinstance(outputs, bool):
        if takes:
            return None, {**kwargs, _NAME: outputs}
        raise DriverError(
            f"outputs={describe(outputs)}: give True for the loss and the model's outputs, False for the loss alone, or leave "
            "it out"
        )
    if named:
        raise DriverError(
            f"outputs={brief(outputs)} is ambiguous, because the model has an argument {_NAME!r} too; give the "
            "model's argument by position, and the keyword is the driver's"
        )
    if compiled.loss is None and not outputs:
        raise DriverError("outputs=False on a Pipe without a loss would return nothing; leave it out")
    return outputs, kwargs


def _by_position(compiled: Compiled, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the model's own argument of that name is among the positional arguments."""
    own = args if compiled.target_name is None or compiled.target_name in kwargs else args[:-1]
    try:
        return _NAME in call_signature(compiled).bind_partial(*own).arguments
    except TypeError:  # too many; the call is refused later
        return True
