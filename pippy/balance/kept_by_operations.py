"""The storages that operations of a traced graph keep for their backwards, by their profile, and the values in them."""

from collections.abc import Iterator, Mapping

from torch import fx

from pippy.balance.kept_bytes import KeptBytes, Storage, UnitValue
from pippy.balance.profile import Profile
from pippy.ir.base.trees import nbytes
from pippy.ir.cut.cuts import travelling_parameters
from pippy.ir.cut.params import MultiUseParamSpec
from pippy.ir.cut.uses import operations
from pippy.ir.record.traced import Traced
from pippy.ir.run.checkpointed_parts import is_begin

INPUT = -1  # what makes the inputs of the model


def kept_by_operations(traced: Traced, profile: Profile, with_loss: bool, spec: MultiUseParamSpec = None) -> KeptBytes:
    """The bytes that runs of operations keep of the micro-batch that was profiled.

    >>> import torch
    >>> from torch import nn
    >>> from pippy.balance.profile import profile
    >>> from pippy.ir.trace.trace import trace
    >>> traced = trace(nn.Sequential(nn.Linear(4, 2), nn.Tanh()))
    >>> found = profile(traced, {"input_1": torch.ones(8, 4)}, timed=False)
    >>> kept = kept_by_operations(traced, found, with_loss=False)
    >>> kept.of(0, 1), kept.of(1, 2), kept.of(0, 2)  # inputs, and the output of the second, which it saves
    (128, 128, 192)
    """
    return _Reading(traced, profile, with_loss, spec).read()


class _Reading:
    def __init__(self, traced: Traced, profile: Profile, with_loss: bool, spec: MultiUseParamSpec) -> None:
        self.traced, self.profile, self.spec = traced, profile, spec
        self.nodes = operations(traced)
        self.number = {node: index for index, node in enumerate(self.nodes)}
        returned = [self.number[each] for each in _output(traced.graph).all_input_nodes if each in self.number]
        self.last = max(returned, default=len(self.nodes) - 1)  # the loss is computed in its stage
        self.with_loss = with_loss
        self.after = (self.last, len(self.nodes)) if with_loss else (len(self.nodes),)

    def read(self) -> KeptBytes:
        makers, sizes, saved = dict[int, int](), dict[int, int](), dict[int, list[int]]()
        for number, storages in self._seen():
            for key, size in storages.items():
                makers.setdefault(key, number)
                sizes[key] = size
        for number, storages in self._saved():
            for key in storages:
                saved.setdefault(key, []).append(number)
        values: dict[int | None, list[UnitValue]] = {}
        for node, storages in self.profile.storages.items():
            for place, value in self._values(node, storages):
                values.setdefault(place, []).append(value)
        values |= {
            key: [UnitValue(INPUT, (self.last,), size)]
            for key, size in self.profile.target.items()
            if key not in values
        }
        pieces = [
            Storage(makers[key], size, tuple(sorted(set(saved.get(key, ())))), tuple(values.get(key, ())))
            for key, size in sizes.items()
        ]
        pieces += [Storage(INPUT, 0, (), (each,)) for each in (*values.get(None, ()), *self._parameters())]
        return KeptBytes(len(self.nodes), tuple(pieces))

    def _seen(self) -> Iterator[tuple[int, Mapping[int, int]]]:
        """The operation that makes each storage: the first whose value is in it."""
        yield INPUT, self.profile.target
        for node in self.traced.graph.nodes:
            if node in self.profile.storages:
                yield self.number.get(node, INPUT), self.profile.storages[node]
            if node in self.number:
                yield self.number[node], self.profile.costs[self.number[node]].saved
        yield self.last, self.profile.loss.saved

    def _saved(self) -> Iterator[tuple[int, Mapping[int, int]]]:
        """The saved storages that a backward reads. Those that lead to no output are dropped at the end of the forward."""
        reached = set[fx.Node]()
        for node in reversed(self.nodes):
            if node in self.profile.with_gradient and any(
                user in reached or user.op == "output" or is_begin(user) for user in node.users
            ):
                reached.add(node)
                yield self.number[node], self.profile.costs[self.number[node]].saved
            elif is_begin(node):
                yield self.number[node], self.profile.costs[self.number[node]].saved
        yield self.last, self.profile.loss.saved
        for node in _output(self.traced.graph).all_input_nodes:  # held by the loss, or as a result
            yield self.last if self.with_loss else self.number.get(node, INPUT), self.profile.storages.get(node, {})

    def _values(self, node: fx.Node, storages: Mapping[int, int]) -> Iterator[tuple[int | None, UnitValue]]:
        """A value in each of its storages; None stands for a view of a parameter."""
        maker, users = self.number.get(node, INPUT), set[int]()
        for user in node.users:
            users.update(self.after if user.op == "output" else [self.number[user]] if user in self.number else [])
        later = tuple(sorted(each for each in users if each > maker))
        left = self.profile.sizes[node]
        for key, size in storages.items():
            part = min(size, left) if len(storages) > 1 else left
            yield key, UnitValue(maker, later, part)
            left -= part
        if left:
            yield None, UnitValue(maker, later, left)

    def _parameters(self) -> Iterator[UnitValue]:
        """Parameters that travel to the other stages that use them."""
        for uses, tensor in travelling_parameters(self.traced, self.spec):
            yield UnitValue(uses[0], tuple(uses[1:]), nbytes(tensor))


def _output(graph: fx.Graph) -> fx.Node:
    (node,) = graph.find_nodes(op="output")
    return node
