"""Keeps the names of the target and of the loss for these: an operation that has one, after a module `target`, gets another.

The user gives the target by its name. The name of an operation is only that of a value of the Pipe.
"""

from pippy.ir.base.names import LOSS
from pippy.ir.call.signature import free_name
from pippy.ir.record.traced import Traced


def reserve_names(traced: Traced) -> None:
    """Rename the nodes that have the names which the target and the loss will have."""
    names = {node.name for node in traced.graph.nodes}
    reserved = {traced.name_for_target(), LOSS}
    for node in traced.graph.nodes:
        if node.op != "placeholder" and node.name in reserved:
            node.name = free_name(f"{node.name}_value", names)
