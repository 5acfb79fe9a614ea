"""The rules for the top-level graph as a whole: its nodes, their order, its inputs, values, calls and backwards."""

from collections.abc import Callable

from pippy.ir.base.names import LOSS, stage_name
from pippy.ir.record.nodes import is_stage_backward
from pippy.ir.verify.node_rules import NODE_RULES
from pippy.ir.verify.subject import Fault, Faults, Subject, examined
from pippy.ir.verify.value_names import value_name


def check_nodes(subject: Subject) -> Faults:
    """Every node is of a kind in the table, and fits the rule for its kind."""
    for node in subject.nodes:
        rule = next((rule for rule in NODE_RULES if rule.matches(node)), None)
        if rule is None:
            yield Fault(node, f"{node.op} of {node.target} is no kind of node that a Pipe may contain")
        else:
            yield from examined(rule.check, subject, node)


def check_order(subject: Subject) -> Faults:
    """Every node has a name of its own and comes after the nodes that it uses. The output is the last node."""
    seen: set[str] = set()
    for node in subject.nodes:
        late = [
            arg.name for arg in node.all_input_nodes if subject.position.get(arg, len(seen)) >= subject.position[node]
        ]
        if late:
            yield Fault(node, f"uses {', '.join(late)} before it is there")
        if node.name in seen:
            yield Fault(node, "has the name of an earlier node")
        seen.add(node.name)
    if not subject.nodes or subject.nodes[-1].op != "output":
        yield Fault(None, "the graph must end in its output")


def check_inputs(subject: Subject) -> Faults:
    """The placeholders are the model's inputs, in order."""
    names = tuple(node.name for node in subject.nodes if node.op == "placeholder")
    if names != subject.compiled.wiring.inputs:
        yield Fault(None, f"the inputs are {list(names)}; the model's are {list(subject.compiled.wiring.inputs)}")


def check_values(subject: Subject) -> Faults:
    """Every value is recorded under its name, which no other value has."""
    recorded = dict(subject.compiled.wiring.values)
    nodes: dict[str, str] = {}
    for node in subject.nodes:
        name, written = value_name(subject.compiled, node), recorded.pop(node.name, None)
        if written != name:
            yield Fault(node, f"stands for the value {name}, but is recorded as {written}")
        if name is not None and nodes.setdefault(name, node.name) != node.name:
            yield Fault(node, f"stands for the value {name}, and so does {nodes[name]}; two values need two names")
    if recorded:
        yield Fault(None, f"there are no nodes {list(recorded)}, for which values are recorded")


def check_calls(subject: Subject) -> Faults:
    """Every stage is called once, in the order of the numbers, and then `_loss`, if there is a loss function."""
    loss = subject.compiled.loss
    wanted = [stage_name(index) for index in range(len(subject.modules))]
    wanted += [LOSS] if loss is not None and loss.value == LOSS else []
    called = [str(call.target) for call in subject.calls]
    if called != wanted or list(subject.modules) != [name for name in wanted if name != LOSS]:
        yield Fault(None, f"the calls are {called}; they must be {wanted}")
    if loss is not None and subject.loss_node is None:
        yield Fault(None, f"the loss is the value of {loss.value!r}, which the graph does not have")
    if (subject.compiled.loss_module is not None) != (LOSS in wanted):
        yield Fault(None, "the module _loss is there if and only if the Pipe was made with a loss function")


def check_backwards(subject: Subject) -> Faults:
    """Every call that the loss depends on has a backward. They are in the reverse order of the calls."""
    made = [node.kwargs.get("stage_output") for node in subject.nodes if is_stage_backward(node)]
    if made != subject.live:
        yield Fault(
            None,
            f"there are backwards of {[getattr(call, 'name', call) for call in made]}; "
            f"the loss needs those of {[call.name for call in subject.live]}",
        )


GRAPH_RULES: tuple[Callable[[Subject], Faults], ...] = (
    check_nodes,
    check_order,
    check_inputs,
    check_values,
    check_calls,
    check_backwards,
)
