"""The verifier: every rule, every violation, one error that prints the graph with the faults marked."""

from typing import TYPE_CHECKING

from torch import fx

from pippy.ir.errors import VerificationError
from pippy.ir.passes.rules import GRAPH_RULES, Fault, Subject, examined
from pippy.ir.passes.stage_rules import STAGE_RULES

if TYPE_CHECKING:
    from pippy.ir.pipe import Pipe


def verify(pipe: "Pipe", before_backward: bool = False) -> None:
    """Check a Pipe against the rules of the IR, and raise once with all violations.

    ``before_backward`` is for a Pipe that has its loss and awaits its backward pass.

    >>> from torch import nn
    >>> from pippy.ir.pipe import Pipe
    >>> pipe = Pipe.from_sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    >>> verify(pipe)
    >>> pipe.split_gm.graph.output_node().args = (None,)
    >>> verify(pipe)
    Traceback (most recent call last):
      ...
    pippy.ir.errors.VerificationError: the Pipe breaks 1 rule:
        input_1
        submod_0 = submod_0(input_1)
        submod_1 = submod_1(submod_0)
        return None
        ^^^ returns None; the model returns _1
    """
    subject = Subject(pipe, before_backward)
    faults = [fault for rule in (*GRAPH_RULES, *STAGE_RULES) for fault in examined(rule, subject)]
    if faults:
        count = "1 rule" if len(faults) == 1 else f"{len(faults)} rules"
        raise VerificationError(
            f"the Pipe breaks {count}:\n{marked_graph(subject.nodes, faults)}",
            tuple(f"{fault.node.name}: {fault.message}" if fault.node else fault.message for fault in faults),
        )


def marked_graph(nodes: list[fx.Node], faults: list[Fault]) -> str:
    """The graph as text, each fault under the node that it is about, the others at the end."""
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
