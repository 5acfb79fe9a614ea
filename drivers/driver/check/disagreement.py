"""The text of the error for rows that do not agree: which rows, their losses, and all other differences."""

from collections.abc import Sequence

from pippy.drivers.batch.loss_weights import reduction_of
from pippy.drivers.driver.check.comparisons import RowComparison
from pippy.drivers.driver.check.rows import TriedRows
from pippy.drivers.protocol.trials import TrialDifference
from pippy.ir.base.names import LOSS
from pippy.ir.record.compiled import Compiled

_SHOWN = 5  # differences


def disagreement(compiled: Compiled, comparison: RowComparison) -> str:
    """The beginning of an error, which is followed by advice."""
    one, two = comparison.rows.sizes
    count = one + two
    slices = comparison.rows.mini_batch.slices
    cut = f", each in {slices} slices of its sequences" * (slices > 1)
    text = (
        f"{count} of the rows{_edits_of(comparison.rows)} were run as one micro-batch, and again as two of {one} and {two} "
        f"rows{cut}. The numbers differ, so the step would not be the plain model's. The losses of the micro-batches "
    )
    kind = _spelled(compiled, comparison)
    if comparison.loss_differs:
        parts = " and ".join(f"{loss:.6g}" for loss in comparison.parts.losses)
        text += (
            f"added up as {kind} are not the loss of the whole: they are {parts}, together {comparison.parts.loss:.6g}, "
            f"and the loss of the whole is {comparison.whole.loss:.6g}. "
        )
    else:
        text += f"add up as {kind}, but these do not: "
    differences = comparison.differences
    text = text.rstrip() if differences else text
    for each in differences[:_SHOWN]:
        text += f"\n  {each.kind} of {_user_name(compiled, each)}: off by {each.share:.2g} of its size"
    more = len(differences) - _SHOWN
    return text + (f"\n  and {more} more" if more > 0 else "") + "\n" * bool(differences)


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


def _user_name(compiled: Compiled, each: TrialDifference) -> str:
    if each.call == LOSS:
        return repr(f"{LOSS}.{each.name}")
    return f"{compiled.remap_qualname(f'{each.call}.{each.name}')!r} ({each.call})"


def _listed(values: Sequence[float]) -> str:
    return " or ".join(dict.fromkeys(f"{value:g}" if isinstance(value, float) else str(value) for value in values))
