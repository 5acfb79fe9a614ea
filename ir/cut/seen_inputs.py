"""Which inputs of a stage it must not change in place, because somebody else would see that in the plain model.

The graph shows most changes, and `constraints` refuses them, or lets the stage take a copy first. A module that is not
traced may change its input too. Stages are checked for that when they run, and this says which inputs to look at:

    an input of the model                    the caller has the tensor
    a parameter or buffer that travels       the stage that owns it has it
    a value that a later stage also uses     or the caller gets; or a view of it
    a value and a view of it                 the stage is given two copies, and changes one
"""

from collections.abc import Mapping, Sequence

from torch import fx

from pippy.ir.base.node_notes import STAGE
from pippy.ir.cut.effects import Roots

NamedInput = tuple[int, str]  # the number and the name of a stage's input


def seen_inputs(values: Sequence[fx.Node], stage: int, roots: Roots) -> list[int]:
    """The numbers of those inputs of a stage whose change in place would be seen elsewhere."""
    families = _sharing_memory(values, roots)
    return [
        index
        for index, value in enumerate(values)
        if any(root.op == "get_attr" for root in roots[value])
        or value.op == "placeholder"
        or _is_seen(families[value], values, stage)
    ]


def _sharing_memory(values: Sequence[fx.Node], roots: Roots) -> Mapping[fx.Node, list[fx.Node]]:
    """For each value, all nodes that may share its memory."""
    by_root: dict[fx.Node, list[fx.Node]] = {root: [] for value in values for root in roots[value]}
    for node, its_roots in roots.items():
        for root in its_roots:
            if root in by_root:
                by_root[root].append(node)
    return {value: [node for root in roots[value] for node in by_root[root]] for value in values}


def _is_seen(family: Sequence[fx.Node], given: Sequence[fx.Node], stage: int) -> bool:
    foreign = {node for node in family if STAGE.get(node) != stage}
    if sum(value in foreign for value in given) > 1:
        return True
    users = [user for value in foreign for user in value.users]
    return any(user.op == "output" or (STAGE.is_at(user) and STAGE.of(user) > stage) for user in users)
