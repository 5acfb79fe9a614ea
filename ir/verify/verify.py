"""The verifier: it checks every rule, and reports the violations in one error, which prints the graph with the faults."""

from collections.abc import Callable
from functools import partial

from torch import fx

from pippy.ir.base.errors import VerificationError
from pippy.ir.base.readable import count_with_noun
from pippy.ir.record.compiled import Compiled
from pippy.ir.verify.stage_rules import STAGE_RULES, Fault, FoundFaults, examined
from pippy.ir.verify.top_level import check_top_level, text_of_node


def check_rules(compiled: Compiled, before_backward: bool = False) -> None:
    """Check a compiled model against the rules of the IR, and raise one error with all violations.

    ``before_backward`` says that the model has its loss, but not its backward pass yet.
    """
    rules: list[Callable[[Compiled], FoundFaults]] = [
        partial(check_top_level, before_backward=before_backward),
        *STAGE_RULES,
    ]
    faults = [fault for rule in rules for fault in examined(rule, compiled)]
    if faults:
        raise VerificationError(
            f"the Pipe breaks {count_with_noun(len(faults), 'rule')}:\n"
            f"{marked_graph(list(compiled.split_gm.graph.nodes), faults)}",
            tuple(f"{fault.node.name}: {fault.message}" if fault.node else fault.message for fault in faults),
        )


def marked_graph(nodes: list[fx.Node], faults: list[Fault]) -> str:
    """The graph as text, with each fault under its node. Faults without a node are at the end."""
    lines = []
    for node in nodes:
        lines.append(f"    {text_of_node(node, node.args, node.kwargs)}")
        lines += [f"    ^^^ {fault.message}" for fault in faults if fault.node is node]
    lines += [f"- {fault.message}" for fault in faults if fault.node is None]
    return "\n".join(lines)
