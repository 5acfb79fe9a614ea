"""The verifier: it checks every rule, and reports all violations in one error, which prints the graph with the faults."""

from torch import fx

from pippy.ir.base.errors import VerificationError
from pippy.ir.record.compiled import Compiled
from pippy.ir.verify.graph_rules import GRAPH_RULES
from pippy.ir.verify.stage_rules import STAGE_RULES
from pippy.ir.verify.subject import Fault, Subject, examined


def check_rules(compiled: Compiled, before_backward: bool = False) -> None:
    """Check a compiled model against the rules of the IR, and raise one error with all violations.

    ``before_backward`` says that the model has its loss, but not its backward pass yet.
    """
    subject = Subject(compiled, before_backward)
    faults = [fault for rule in (*GRAPH_RULES, *STAGE_RULES) for fault in examined(rule, subject)]
    if faults:
        count = "1 rule" if len(faults) == 1 else f"{len(faults)} rules"
        raise VerificationError(
            f"the Pipe breaks {count}:\n{marked_graph(subject.nodes, faults)}",
            tuple(f"{fault.node.name}: {fault.message}" if fault.node else fault.message for fault in faults),
        )


def marked_graph(nodes: list[fx.Node], faults: list[Fault]) -> str:
    """The graph as text, with each fault under its node. Faults without a node are at the end."""
    lines = []
    for node in nodes:
        lines.append(f"    {_line(node)}")
        lines += [f"    ^^^ {fault.message}" for fault in faults if fault.node is node]
    lines += [f"- {fault.message}" for fault in faults if fault.node is None]
    return "\n".join(lines)


def _line(node: fx.Node) -> str:
    if node.op == "placeholder":
        return node.name
    if node.op == "output":
        return f"return {', '.join(map(str, node.args))}"
    arguments = [str(arg) for arg in node.args] + [f"{name}={value}" for name, value in node.kwargs.items()]
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.target)
    return f"{node.name} = {target}({', '.join(arguments)})"
