"""Marks another graph of a model so that each of its stages uses only tensors that one stage of a Pipe has.

    the Pipe, which trains      [ wte  h.0  h.1 ]  [ h.2  h.3 ]  [ ln_f  lm_head ]
    the graph of a token          wte  h.0  h.1  |   h.2  h.3  |   ln_f  lm_head

An operation goes to the stage that has its parameters and buffers, and one without them to the stage of the operation before
it. Of a tensor that several stages have, the next one counts.
"""

from collections.abc import Mapping

from pippy.ir.base.errors import GenerationError, PippyError
from pippy.ir.base.names import stage_index
from pippy.ir.cut.cuts import mark
from pippy.ir.cut.uses import TensorUses, operations, uses_of_tensors
from pippy.ir.record.compiled import Compiled
from pippy.ir.record.traced import Traced


class _UsedBefore(Exception):
    """Raised for a tensor that the other graph uses in an earlier stage."""


def holders(compiled: Compiled, name: str) -> dict[int, str]:
    """The stages that have a tensor of the model, with its name there; empty if none does."""
    names = compiled.qualnames
    places = [place.partition(".") for place in names.places.get(names.canonical.get(name, name), ())]
    return {index: local for stage, _, local in places if (index := stage_index(stage)) is not None}


def copied_parameters(compiled: Compiled) -> list[str]:
    """The parameters of which several stages have copies, so that another graph finds them there."""
    return [compiled.remap_qualname(".".join(next(iter(group.items())))) for group in compiled.replicated_params]


def mark_alike(
    traced: Traced, compiled: Compiled, error: type[PippyError] = GenerationError, do: str = "generate"
) -> list[int]:
    """Mark a traced graph. Returns the stage of ``compiled`` that each of its stages belongs to.

    Raises an ``error`` that says what the model cannot ``do``, if it uses its tensors in another order.
    """
    nodes, stages = operations(traced), [0]
    marks = []
    uses = _uses_by_operation(traced)
    for at, node in enumerate(nodes):
        try:
            wanted = [_next_holder(compiled, each, at, stages[-1]) for each in uses.get(at, ())]
        except _UsedBefore as fault:
            raise error(f"the model cannot {do} as it is cut: it {fault}") from None
        stage = max((each for each in wanted if each is not None), default=stages[-1])
        if stage > stages[-1]:
            stages.append(stage)
            marks.append(node)
    if marks and marks[0] is nodes[0]:
        del marks[0], stages[0]
    mark(traced, marks)
    return stages


def _uses_by_operation(traced: Traced) -> Mapping[int, list[TensorUses]]:
    found: dict[int, list[TensorUses]] = {}
    for uses in uses_of_tensors(traced).values():
        for at in uses.all:
            found.setdefault(at, []).append(uses)
    return found


def _next_holder(compiled: Compiled, uses: TensorUses, at: int, now: int) -> int | None:
    """The first stage from ``now`` on that has a tensor; None if any stage may compute the operation with number ``at``."""
    holding = sorted(holders(compiled, uses.name))
    later = [stage for stage in holding if stage >= now]
    if later:
        return later[0]
    if not holding or at not in uses.by_leaf:
        return None  # no stage has it, so that it goes along; or it travels as a value, from the stage that has it
    raise _UsedBefore(
        f"uses {uses.name!r} of stage {holding[-1]} after stage {now}, but "
        "in training it uses it before; cut the Pipe between the layers of the model"
    )


def held_tensors(
    cut: Compiled,
    stages: list[int],
    compiled: Compiled,
    error: type[PippyError] = GenerationError,
    do: str = "generate",
) -> dict[int, tuple[str, str]]:
    """Where ``compiled`` has each tensor of the model that a stage of ``cut`` uses: by its id, its stage and its name there.

    Raises an ``error`` that says what the model cannot ``do``, if another stage has it.
    """
    places: dict[int, tuple[str, str]] = {}
    for index, (_, module) in enumerate(cut.stages()):
        named = {
            **dict(module.named_parameters(remove_duplicate=False)),
            **dict(module.named_buffers(remove_duplicate=False)),
        }
        for local, tensor in named.items():
            user_name = cut.remap_qualname(f"submod_{index}.{local}")
            there = holders(compiled, user_name)
            if stages[index] in there:
                places[id(tensor)] = f"submod_{stages[index]}", there[stages[index]]
            elif there:
                raise error(
                    f"the model cannot {do} as it is cut: stage {stages[index]} of the Pipe needs "
                    f"{user_name!r}, which only stage {', '.join(map(str, there))} has; cut the Pipe between the "
                    "layers of the model"
                )
    return places
