"""Buffers that forward changes, in a step of several micro-batches: they change once, as in the plain model.

    a buffer, as the step finds it ──┬─ a copy for micro-batch 0 ─▶ changed ─┐
                                     ├─ a copy for micro-batch 1 ─▶ changed ─┼─▶ the same: the buffer after the step
                                     └─ ...                                  ┘   not the same: it depends on the rows

So a counter counts steps, and the vectors of spectral norm are refined once. Buffers to which each micro-batch adds its own, as
a count of rows, are not followed: they change with each micro-batch, and are right. Where neither is right, as for a running
mean, nobody can say what the plain model's buffer is: the step is refused.

Where the pipeline has replicas, each sees a part of the mini-batch. A `DeferredBatchNorm` counts all of it: the replicas tell
one another what their norms have noted, and at the end of a step each counts the same. Other buffers must not change in a step.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pippy.ir.base.errors import StageError
from pippy.ir.run.batch_norm import DeferredBatchNorm
from pippy.ir.run.in_place import snapshot_of_buffers

Owner = tuple[nn.Module, str]


def own_buffers(stage: nn.Module) -> Iterator[tuple[str, Owner, torch.Tensor]]:
    """The buffers of a stage, but those of batch norms, which normalize and count each micro-batch by itself.

    >>> [name for name, _, _ in own_buffers(nn.ModuleDict({"a": nn.BatchNorm1d(1), "b": nn.InstanceNorm1d(1, track_running_stats=True)}))]
    ['b.running_mean', 'b.running_var', 'b.num_batches_tracked']
    """  # noqa: E501
    for path, module in stage.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items() if not isinstance(module, _BatchNorm) else ():
            if buffer is not None and buffer.layout is torch.strided:
                yield f"{path}.{name}".lstrip("."), (module, name), buffer


@dataclass(eq=False)
class _Changing:
    """A buffer that forward changes: its name, where modules hold it, and what micro-batches made of it in this step."""

    name: str
    owners: list[Owner]
    made: torch.Tensor | None = None
    disagrees: bool = False

    @property
    def own(self) -> torch.Tensor | None:
        module, name = self.owners[0]
        return module._buffers[name]

    def put(self, tensor: torch.Tensor | None) -> None:
        for module, name in self.owners:
            module._buffers[name] = tensor

    def take(self, tensor: torch.Tensor | None) -> None:
        """Take what a micro-batch made of it."""
        if self.made is None:
            self.made = tensor
        elif tensor is None or not _same(self.made, tensor):
            self.disagrees = True


class StepBuffers:
    """The buffers that forward changes, of the stages of a worker. Which they are is found in trials: `follow`.

    ``stages`` has the stages of each graph of the model, by the graph's number. All graphs have the same buffers.
    """

    def __init__(self, stages: Mapping[int, Mapping[str, nn.Module]]) -> None:
        self.stages = stages
        self.changing: dict[str, list[_Changing]] = {}
        self.active = False
        self._followed: set[tuple[str, str]] = set()

    def follow(self, places: Collection[tuple[str, str]]) -> None:
        """From now on, these buffers change once in a step: the names of stages, and of buffers in them."""
        if not self._followed.issuperset(places):
            self._followed.update(places)
            self.find()

    def find(self) -> None:
        """Find the modules that hold the buffers, in the stages of all graphs that there are now."""
        self.changing = {call: found for call in self.stages[0] if (found := self._changing_in(call))}

    def _changing_in(self, call: str) -> list[_Changing]:
        found: dict[int, _Changing] = {}
        for stages in self.stages.values():
            for name, owner, buffer in own_buffers(stages[call]):
                found.setdefault(id(buffer), _Changing(name, [])).owners.append(owner)
        return [each for each in found.values() if (call, each.name) in self._followed]

    def disagreeing(self) -> list[tuple[str, str]]:
        """The buffers, with their stages, of which the micro-batches of the latest step have made different things."""
        return [(call, each.name) for call, its in self.changing.items() for each in its if each.disagrees]

    @contextmanager
    def step(self, microbatches: int, refuses: bool = True) -> Iterator[None]:
        """A step of so many micro-batches. At its end buffers change; it fails if micro-batches disagree about one."""
        every = [(call, each) for call, its in self.changing.items() for each in its]
        for _, each in every:
            each.made, each.disagrees = None, False
        self.active = bool(every) and microbatches > 1
        try:
            yield
        finally:
            self.active = False
        refused = [f"{name!r} of {call}" for call, name in self.disagreeing()]
        if refused and refuses:
            raise StageError(
                f"forward changes {', '.join(refused)} by the rows that it is given. Each micro-batch would change "
                "them by its own rows, so the buffers would not be the plain model's; run one micro-batch, "
                'chunks=1, or give the driver buffers="per_microbatch"'
            )
        with torch.no_grad():
            for _, each in every:
                own = each.own
                if own is not None and each.made is not None:
                    own.copy_(each.made)

    def of(self, call: str) -> AbstractContextManager[None]:
        """A context in which one micro-batch goes through a stage."""
        return self._of_microbatch(self.changing[call]) if self.active and call in self.changing else nullcontext()

    @contextmanager
    def _of_microbatch(self, buffers: list[_Changing]) -> Iterator[None]:
        own = [each.own for each in buffers]
        for each, buffer in zip(buffers, own):
            each.put(None if buffer is None else buffer.clone())
        try:
            yield
            for each in buffers:
                each.take(each.own)
        finally:
            for each, buffer in zip(buffers, own):
                each.put(buffer)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


class ReplicaBuffers:
    """The buffers of some stages, but those that deferred batch norms count in, by the name of the stage and of the buffer.

    >>> stages = {"submod_0": nn.BatchNorm1d(2)}
    >>> with ReplicaBuffers(stages).unchanged():
    ...     stages["submod_0"](torch.ones(2, 2))
    Traceback (most recent call last):
    pippy.ir.base.errors.StageError: submod_0 changed the buffers 'running_mean', 'running_var', 'num_batches_tracked', ...
    """

    def __init__(self, stages: Mapping[str, nn.Module]) -> None:
        self.modules = [
            (stage, f"{path}.".lstrip("."), module)
            for stage, root in stages.items()
            for path, module in root.named_modules()
            if module._buffers and not isinstance(module, DeferredBatchNorm)
        ]

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """A context that raises at its end if a buffer was changed, or replaced by another tensor."""
        before = snapshot_of_buffers(dict(self._buffers()))
        yield
        changed = before.changed(dict(self._buffers()))
        if changed:
            stage = changed[0][0]
            names = ", ".join(repr(name) for other, name in changed if other == stage)
            raise StageError(
                f"{stage} changed the buffers {names}, so each replica of the pipeline would change its own copy by "
                "its part of the mini-batch; do not change buffers in forward, or leave replicas= out (for batch "
                "norms, use convert_deferred_batch_norm)"
            )

    def _buffers(self) -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
        for stage, path, module in self.modules:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield (stage, f"{path}{name}"), buffer
