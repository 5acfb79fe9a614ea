"""The lines below every drawing: which parameters are replicated, the backward, and what is unknown and why."""

from pippy.ir.show.content import Content
from pippy.ir.show.structure import ParameterCopies, Structure

_LONGEST_WAY = 6


def backward_text(structure: Structure) -> str:
    """One line about the backward, which is not drawn."""
    if not structure.backward:
        return "backward: none, as the Pipe has no loss"
    computing = [box.name for box in reversed(structure.boxes) if box.computes]
    steps = [name for name in computing if name in structure.backward]
    order = " → ".join(steps if len(steps) <= _LONGEST_WAY else [*steps[:2], "…", *steps[-2:]])
    without = [name for name in reversed(computing) if name not in structure.backward]
    none = f"; none in {', '.join(without)}" if without else ""
    return f"backward: {order}; gradients take the same ways back{none}"


def copies_text(structure: Structure, copies: ParameterCopies) -> str:
    """One line about parameters of which several stages hold a copy."""
    holders = ", ".join(structure.boxes[index].name for index in copies.boxes)
    return f"replicated: {', '.join(copies.names)} in {holders}; gradients are summed"


def notes(content: Content) -> list[str]:
    """The lines below a drawing: replicated parameters, the backward, and unknown values with their reasons."""
    lines = [copies_text(content.structure, each) for each in content.structure.copies]
    lines.append(backward_text(content.structure))
    unknown = content.shapes.unknown if content.shapes else []
    return lines + [f"unknown: {each.explain()}" for each in unknown]
