"""Notes what a model asks of numbers on the way to a mean, while a trial runs.

labels ── pad, [:, 1:], view, to ──▶ shifted == -100      a question, about the user's tensor ``labels``
                                          │
logits[shifted != -100].mean()   ◀────────┘               chosen by a mask: so many of so many
(losses * mask).sum() / mask.sum()                        divided by a count: so many of so many

one_hot(p.argmax(-1)).mean(0) * p.mean(0)                 a mean of choices: so many of so many rows choose alike
"""

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from pippy.drivers.batch.division import Division, divided_leaves
from pippy.drivers.compare.trial_notes import ComputedChoice, InputTensor, Question, TrialNotes
from pippy.ir.base import source
from pippy.ir.base.trees import tensors

# A question and its contrary are the same.
_SIGNS = {"eq": "==", "ne": "==", "gt": ">", "le": ">", "ge": ">=", "lt": ">="}
_SAME_NUMBERS = frozenset(
    "to float double half bfloat16 long int type view reshape flatten squeeze unsqueeze getitem contiguous expand expand_as "
    "transpose permute clone detach pad cpu cuda type_as select narrow split chunk".split()
)
_SAME_COUNT = frozenset("to float double half bfloat16 long int type clamp clamp_min max item reshape detach".split())
_MEANS = frozenset("mean cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div nanmean".split()) | {
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
}
_RANKS = frozenset("argmax argmin topk sort argsort".split())
_SAME_CHOICES = _SAME_NUMBERS | frozenset("one_hot scatter eq ne lt le gt ge mul sum mean amax any".split())
_OVER_ROWS = frozenset({"sum", "mean"})
_SUMS = frozenset({"sum", "count_nonzero", "mean"})
_MOST_VALUES = 8  # of a table that targets are looked up in
_MOST_CLASSES = 64  # whose weights travel to the controller
_MOST_NODES = 4096  # of autograd's graph that are looked at for one mean
_SCATTERS = ("IndexPut", "IndexAdd", "IndexCopy", "Scatter", "MaskedScatter")  # the size is that of before again


class Watch(TorchFunctionMode):
    """Notes questions inside. ``inputs`` are those of the trial.

    >>> from pippy.drivers.batch.divide import divide
    >>> labels = torch.tensor([[1, 2], [3, 4]])
    >>> with Watch(divide({"labels": labels}, chunks=1)) as watch:
    ...     _ = F.cross_entropy(torch.zeros(2, 5), labels[:, 1:].reshape(-1))
    >>> [(each.sign, each.value, each.place) for each in watch.asked().questions]
    [('==', -100, ('labels', 0))]
    """

    def __init__(self, inputs: Division) -> None:
        super().__init__()
        self._storages = {
            tensor.untyped_storage().data_ptr(): (name, number)
            for name in inputs.arguments
            for number, leaf in enumerate(divided_leaves(inputs.arguments[name]))
            for tensor in tensors(leaf.held())
            if tensor.layout is torch.strided
        }
        self._derived: Any = WeakTensorKeyDictionary()
        self._masks: Any = WeakTensorKeyDictionary()  # how many of how many are True, or for a count, are counted
        self._choices: Any = WeakTensorKeyDictionary()  # what is computed from the choice of each row
        self._means: Any = WeakTensorKeyDictionary()  # and over rows
        self._questions: dict[Question, None] = {}
        self._chosen: list[ComputedChoice] = []

    def asked(self) -> TrialNotes:
        """What was noted."""
        return TrialNotes(tuple(self._questions), tuple(self._chosen))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        with suppress(Exception):  # what is noted must not disturb what is computed
            self._note(getattr(func, "__name__", "").strip("_"), args, kwargs, made)
        return made

    def _note(self, name: str, args: Any, kwargs: Mapping[str, Any], made: Any) -> None:
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if first is None:
            return
        if name in _SIGNS or name in ("isin", "isnan"):
            for question in self._compared(name, [*args, *kwargs.values()]):
                self._questions.setdefault(question)
            self._masks[made] = float(made.sum()), float(made.numel())
        elif isinstance(made, torch.Tensor):
            self._follow(name, first, args, made)
        self._follow_choices(name, args, kwargs, made)
        if name in _MEANS and isinstance(made, torch.Tensor) and made.numel() == 1:
            if name in ("cross_entropy", "nll_loss"):
                self._note_entropy(getattr(F, name), args, kwargs)
            self._chosen += list(_chosen_for(made))
        if name in ("truediv", "div", "divide") and made.numel() == 1 and len(args) > 1:
            self._note_divisor(args[1])

    def _place(self, tensor: torch.Tensor) -> InputTensor | None:
        found = self._storages.get(tensor.untyped_storage().data_ptr())
        return found if found is not None else self._derived.get(tensor)

    def _follow(self, name: str, first: torch.Tensor, args: Any, made: torch.Tensor) -> None:
        if name in _SAME_NUMBERS:
            place = self._place(first)
            if place is not None:
                self._derived[made] = place
        mask = first.dtype == torch.bool and (float(first.sum()), float(first.numel()))
        counted = self._masks.get(first, mask or None)
        if counted is None:
            return
        as_many = made.numel() in (1, first.numel())
        if (name in _SUMS and made.numel() == 1) or (name in _SAME_COUNT and as_many):
            self._masks[made] = counted

    def _follow_choices(self, name: str, args: Any, kwargs: Mapping[str, Any], made: Any) -> None:
        """Follow which of its numbers each row chooses, to a mean over rows that what is trained depends on."""
        first = args[0]
        if name in _RANKS and first.is_floating_point() and first.dim() > 1:
            self._choices[made if isinstance(made, torch.Tensor) else made[1]] = True
            return
        if not isinstance(made, torch.Tensor):
            return
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        means = [self._means[each] for each in given if each in self._means]
        if means and made.requires_grad:
            self._chosen += [each for each in means if each not in self._chosen]
        elif means:
            self._means[made] = means[0]
        elif not made.requires_grad and name in _SAME_CHOICES and any(each in self._choices for each in given):
            if name in _OVER_ROWS and _is_over_rows(first, args, kwargs):
                alike = (first == first[:1]).flatten(1).all(1) if first.dim() > 1 else first == first[0]
                self._means[made] = ComputedChoice(_here(), float(alike.sum()), float(len(first)), ranked=True)
            else:
                self._choices[made] = True

    def _compared(self, name: str, operands: Any) -> Iterator[Question]:
        first, other = operands[0], operands[1] if len(operands) > 1 else None
        place = self._place(first)
        if place is None and isinstance(other, torch.Tensor) and self._place(other) is not None:
            return  # the user's tensor is on the right, and is compared with computed numbers
        if name == "isnan" or other is first:
            if place is not None and first.is_floating_point():
                yield Question("nan", 0, place)
        elif place is None and not _is_index(first):
            return
        elif isinstance(other, torch.Tensor):
            few = other.numel() <= (_MOST_VALUES if name == "isin" else 1) and self._place(other) is None
            values = other.flatten().tolist() if few else ()
            yield from (Question(_SIGNS.get(name, "=="), value, place) for value in values)
        elif isinstance(other, (int, float)) and not isinstance(other, bool):
            yield Question(_SIGNS[name], other, place)

    def _note_entropy(self, function: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
        target = given["target"]
        if given.get("reduction", "mean") != "mean" or target.is_floating_point():
            return
        weight = given.get("weight")
        weights = () if weight is None or len(weight) > _MOST_CLASSES else tuple(weight.double().tolist())
        self._questions.setdefault(Question("==", given.get("ignore_index", -100), self._place(target), True, weights))

    def _note_divisor(self, divisor: Any) -> None:
        counted = self._masks.get(divisor) if isinstance(divisor, torch.Tensor) else None
        if counted is not None:
            self._chosen.append(ComputedChoice(_here(), *counted))


def _is_index(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _is_over_rows(tensor: torch.Tensor, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a sum or mean of a tensor goes over its first dimension."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    dims = range(tensor.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    return any(each in (0, -tensor.dim()) for each in dims)


def _chosen_for(mean: torch.Tensor) -> Iterator[ComputedChoice]:
    """The choices by a mask that a mean is made of, found in autograd's graph."""
    todo: list[Any] = [mean.grad_fn]
    seen: set[Any] = set()
    while todo and len(seen) < _MOST_NODES:
        node = todo.pop()
        if node is None or node in seen or node.name().startswith(_SCATTERS):
            continue
        seen.add(node)
        if node.name().startswith("IndexBackward"):
            masks = [each for each in node._saved_indices if each is not None and each.dtype == torch.bool]
            yield from (ComputedChoice(_here(), float(mask.sum()), float(mask.numel())) for mask in masks)
        elif node.name().startswith("MaskedSelect"):
            mask = node._saved_mask
            yield ComputedChoice(_here(), float(mask.sum()), float(mask.numel()))
        todo += [each for each, _ in node.next_functions]


def _here() -> str:
    found = source.of_frame(sys._getframe())
    return "" if found is None else f"{found}: {found.code}"
