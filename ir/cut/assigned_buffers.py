"""Moves the writing of buffers that forward assigns to where their values are made, so that it is in the same stage."""

from pippy.ir.cut.effects import find_mutations
from pippy.ir.record.traced import Traced
from pippy.ir.run.functions import assign_


def write_early(traced: Traced) -> None:
    """Put each `assign_` behind its value, behind the copy of what the buffer was, and behind all that changes the value."""
    writes = traced.graph.find_nodes(op="call_function", target=assign_)
    if not writes:
        return
    mutations, roots = find_mutations(traced.graph, traced.attributes)
    order = {node: index for index, node in enumerate(traced.graph.nodes)}
    for write in writes:
        buffer, value = write.all_input_nodes
        changes = [each.node for each in mutations if each.root in roots[value] and each.node not in writes]
        copies = [user for user in buffer.users if user not in writes]
        after = [*changes, *copies, *write.all_input_nodes]
        max((each for each in after if each.op != "placeholder"), key=order.__getitem__).append(write)
    traced.graph.lint()
