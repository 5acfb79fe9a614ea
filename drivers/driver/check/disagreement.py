"""The text of the error for rows that do not agree: which rows, their losses, and all other differences."""

from collections.abc import Sequence

from pippy.drivers.batch.loss_weights import reduction_of
from pippy.drivers.driver.check.comparisons import RowComparison
from pippy.drivers.driver.check.differences import Difference
from pippy.drivers.driver.check.rows import TriedRows, WholeRows
from pippy.drivers.placement.placed_pipe import PlacedPipe
from pippy.ir.base.errors import NameLookupError
from pippy.ir.base.names import LOSS, stage_name
from pippy.ir.base.readable import listed
from pippy.ir.record.compiled import Compiled

_SHOWN = 5  # differences, and sizes of micro-batches


def disagreement(compiled: Compiled, placed: PlacedPipe, comparison: RowComparison, is_cut: bool = True) -> str:
    """The beginning of an error, which is followed by advice."""
    rows = comparison.rows
    text = f"{_rows_of(rows, is_cut)} The numbers differ, so the step would not be the plain model's. "
    kind = _spelled(compiled, comparison)
    if not is_cut:
        text += f"The loss is {comparison.parts.loss:.6g}, and the plain model's {comparison.loss:.6g}. "
    elif "loss" in comparison.kinds:
        parts = listed([f"{loss:.6g}" for loss in comparison.parts.losses[:_SHOWN]])
        more = ", ..." if len(comparison.parts.losses) > _SHOWN else ""
        text += (
            f"The losses of the micro-batches added up as {kind} are not the loss of the whole: they are {parts}{more}, "
            f"together {comparison.parts.loss:.6g}, and the loss of the whole is {comparison.loss:.6g}. "
        )
    else:
        text += f"The losses of the micro-batches add up as {kind}, but these do not: "
    others = [each for each in comparison.differences if each.kind != "loss"]
    return text.rstrip() + f"\n{_lines_of(placed, others)}\n" if others else text


def _lines_of(placed: PlacedPipe, differences: Sequence[Difference]) -> str:
    """The worst differences, a line each."""
    lines = [
        f"  {each.kind} of {_user_name(placed, each)}: off by {each.off:.2g} of its size"
        for each in differences[:_SHOWN]
    ]
    more = len(differences) - _SHOWN
    return "\n".join([*lines, *([f"  and {more} more"] if more > 0 else [])])


def stages_with(placed: PlacedPipe, name: str) -> str:
    """The stages that hold a parameter or buffer; "" if none does."""
    try:
        calls = [place.call for _, place in placed.locations(name)]
    except NameLookupError:  # a tensor of forward's own
        return ""
    return ", ".join(dict.fromkeys(stage_of_call(placed, call) for call in calls))


def stage_of_call(placed: PlacedPipe, call: str) -> str:
    """The stage of a call: that of the loss is the one that it runs with."""
    return stage_name(placed.loss_stage) if call == LOSS else call


def disagreement_of_workers(placed: PlacedPipe, differences: Sequence[Difference]) -> str:
    """The error for a step of which only the run on the workers is wrong."""
    return (
        "the step was run by the plain model and, as a trial, by the workers. Numbers differ by more than rounding, "
        "though they agree when the same micro-batches are run all forwards first:\n"
        f"{_lines_of(placed, differences)}\n"
        "This is a fault of a worker, of what is sent, or of pippy: please report it"
    )


def disagreement_of_graphs(placed: PlacedPipe, differences: Sequence[Difference]) -> str:
    """The error for a step whose micro-batches go by several graphs."""
    return f"the step was run by the plain model and, as a trial, by the workers:\n{_lines_of(placed, differences)}"


def _rows_of(rows: TriedRows, is_cut: bool) -> str:
    """Which rows were run, and how."""
    count, sizes = len(rows.order), list(map(str, rows.sizes))
    mini_batch = isinstance(rows, WholeRows)
    who = f"All {count} rows" if mini_batch else f"{count} of the rows"
    who += f"{_edits_of(rows)} were run as one micro-batch by the plain model"
    slices = rows.mini_batch.slices
    cut = f", each in {slices} slices of its sequences" * (slices > 1)
    if not is_cut:
        return f"{who}, and uncut by the stages."
    if len(sizes) > _SHOWN:
        return f"{who}, and again as {len(sizes)} micro-batches of the pipeline{cut}."
    count_of = "two" if len(sizes) == 2 else str(len(sizes))
    return f"{who}, and again as {count_of} of {listed(sizes)} rows by the pipeline{cut}."


def _edits_of(rows: TriedRows) -> str:
    """The text that says which numbers were put into the rows, as later batches may have them."""
    users = {name: user for user, name in rows.division.names.items()}
    said = [f"{users.get(place[0], place[0])!r} is {_listed(edit.values)}" for place, edit in rows.edits.items()]
    return f", in some of which {' and '.join(said)}," if said else ""


def _spelled(compiled: Compiled, comparison: RowComparison) -> str:
    if comparison.reduction.single:
        return "one loss over all"
    if callable(comparison.reduction.how):
        return "loss_reduction counts"
    kind = comparison.reduction.how or reduction_of(compiled.loss_module).kind
    return "a sum" if kind == "sum" else "a mean over rows"


def _user_name(placed: PlacedPipe, each: Difference) -> str:
    stage = "" if each.name.startswith(f"{LOSS}.") else stages_with(placed, each.name)
    return f"{each.name!r} ({stage})" if stage else repr(each.name)


def _listed(values: Sequence[float]) -> str:
    return " or ".join(dict.fromkeys(f"{value:g}" if isinstance(value, float) else str(value) for value in values))
