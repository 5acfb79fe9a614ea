"""The buffers of stages that other replicas of the pipeline hold, too: a step leaves them alike, or fails.

Each replica sees a part of the mini-batch. A `DeferredBatchNorm` counts all of it: at the end of a step the replicas tell one
another what their norms have noted, and each counts the same. Other buffers must not change in a step.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch
from torch import nn

from pippy.drivers.wire.transport import Transport
from pippy.ir.base.errors import StageError
from pippy.ir.batch_norm.deferred_batch_norm import DeferredBatchNorm, Noted
from pippy.ir.run.snapshot import snapshot_of_buffers

_FIELDS = [each.name for each in fields(Noted)]
NOTES = 1 << 24  # the number of notes in the keys of messages


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


@dataclass(frozen=True)
class NotesOfReplicas:
    """Tells the ``twins``, the workers with the same stages in all replicas, what deferred batch norms have noted in a step."""

    twins: Sequence[int]
    index: int
    transport: Transport

    def exchange(self, number: int, notes: Sequence[Sequence[Noted]]) -> list[list[Noted]]:
        """What each norm has noted in all replicas, from what each has noted here."""
        for twin in self.twins:
            if twin != self.index:
                own = [[tuple(getattr(each, name) for name in _FIELDS) for each in of_norm] for of_norm in notes]
                self.transport.send(twin, (number, NOTES, self.index), own)
        found: list[list[Noted]] = [[] for _ in notes]
        for twin in self.twins:
            theirs = notes if twin == self.index else self.transport.receive((number, NOTES, twin), twin)
            for all_of_norm, of_norm in zip(found, theirs):
                all_of_norm += [each if isinstance(each, Noted) else Noted(*each) for each in of_norm]
        return found
