"""What a step gives back: micro-batches' losses weighted and added, outputs put together."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from pippy.drivers.batches.division import Division, SameForAll
from pippy.drivers.batches.loss_weights import loss_weights, reduction_of
from pippy.drivers.batches.merge import LOSS_PLACE, check_leaves_loss_alone, merge_outputs
from pippy.drivers.errors import DriverError
from pippy.ir.compiled import Compiled
from pippy.ir.names import LOSS
from pippy.ir.nodes import map_nodes
from pippy.ir.trees import children, with_children


class Results:
    """Turns the values that the workers return for one step into what the user is given.

    ``names`` has the names of the top-level graph's values, by which the workers return them. The other arguments are what
    the driver was given. ``assumes`` says that nobody knows how the loss is reduced, so that it must be checked.
    """

    def __init__(
        self,
        compiled: Compiled,
        names: Mapping[fx.Node, str],
        division: Division,
        output_spec: Any = None,
        loss_reduction: str | Callable[..., Any] | None = None,
        single_loss: bool = False,
        trains: bool = False,
    ) -> None:
        self.trains = trains
        self.compiled, self.names, self.division = compiled, names, division
        self.output_spec, self.single_loss = output_spec, single_loss
        self.reduction = reduction_of(self._loss())
        self.assumes = compiled.loss is not None and not (single_loss or loss_reduction or self.reduction.known)
        self.weights = self._weights(loss_reduction)
        if self.compiled.loss is not None and output_spec is not None:
            output = self.compiled.split_gm.graph.output_node().args[0]
            check_leaves_loss_alone(output_spec, map_nodes(self._loss_in, output))

    def _loss(self) -> Any:
        """The loss's module; None if the model returns its loss."""
        return self.compiled.stage(LOSS) if LOSS in self.compiled.split_gm._modules else None

    def _weights(self, loss_reduction: str | Callable[..., Any] | None) -> tuple[float, ...]:
        if self.compiled.loss is None or self.single_loss:
            return (1.0,) * self.division.chunks
        return loss_weights(self._loss(), self.division, self.compiled.target_name, loss_reduction)

    def assemble(self, returned: Mapping[str, Any]) -> Any:
        """The whole mini-batch's result."""
        output = self.compiled.split_gm.graph.output_node().args[0]
        if isinstance(output, fx.Node) and self._is_loss(output) and not isinstance(self.loss_seed, list):
            return self._total(returned[self.names[output]])
        chunks = range(self.division.chunks)
        values = {name: self._listed(name, packed) for name, packed in returned.items()}
        parts = [map_nodes(partial(self._value, values, each), output) for each in chunks]
        if self.compiled.loss is None:
            return self._merged(output, parts)
        losses = values[LOSS] if self.single_loss else [next(self._losses(output, part)) for part in parts]
        total = self._total(list(losses))
        others = [self._with_loss(output, part, LOSS_PLACE) for part in parts]
        return self._with_loss(output, self._merged(output, others), total)

    def _merged(self, output: Any, parts: Sequence[Any]) -> Any:
        shared = _map_output(self._is_shared, output)
        return merge_outputs(parts, self.division.sizes, self.output_spec, mask=self.division.mask, shared=shared)

    def _is_shared(self, value: Any) -> bool:
        """Whether all micro-batches have the same value: a constant of the graph, or an input that is not cut."""
        if not isinstance(value, fx.Node):
            return True
        return value.op == "placeholder" and isinstance(self.division.arguments.get(value.name), SameForAll)

    def _loss_in(self, node: fx.Node) -> Any:
        """What stands for the loss, if the node is it."""
        return LOSS_PLACE if self._is_loss(node) and not isinstance(self.loss_seed, list) else node

    def _is_loss(self, node: fx.Node) -> bool:
        return self.compiled.loss is not None and node.name == self.compiled.loss.value

    @property
    def loss_seed(self) -> Any:
        """Where in its value the loss is: nested lists, if it is inside of something."""
        return None if self.compiled.loss is None else self.compiled.loss.seed

    def _total(self, losses: Any) -> torch.Tensor:
        """The loss of the mini-batch. A micro-batch in which nothing counts has a loss that is no number: left out."""
        shape = losses[0].shape  # one number, but it may be in brackets
        losses = torch.stack([loss.reshape(()) for loss in losses]) if isinstance(losses, list) else losses
        weights = torch.tensor(self.weights[: len(losses)], dtype=losses.dtype)
        if 0.0 in self.weights:
            losses, weights = losses[weights != 0], weights[weights != 0]
        total = (losses * weights).cumsum(0)[-1].reshape(shape)  # in order, however many there are
        return explaining_backward(total) if self.trains else total

    def _listed(self, name: str, packed: Any) -> Sequence[Any]:
        return list(packed.unbind()) if isinstance(packed, torch.Tensor) else packed

    def _value(self, values: Mapping[str, Sequence[Any]], microbatch: int, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self.division.take(node.name, microbatch)
        name = self.names[node]
        return values[name][0 if self.single_loss and name == LOSS else microbatch]

    def _losses(self, output: Any, part: Any) -> Iterator[Any]:
        """The loss inside of what one micro-batch returns."""
        found: list[Any] = []
        self._with_loss(output, part, None, found)
        return iter(found)

    def _with_loss(self, output: Any, value: Any, loss: Any, found: list[Any] | None = None) -> Any:
        """``value``, the value of the graph's ``output``, with another loss in it."""
        if isinstance(output, fx.Node):
            assert self.compiled.loss is not None
            is_loss = output.name == self.compiled.loss.value
            return _replaced(self.compiled.loss.seed, value, loss, found) if is_loss else value
        if isinstance(output, Mapping):
            return {key: self._with_loss(item, value[key], loss, found) for key, item in output.items()}
        if isinstance(output, (tuple, list)):
            return with_children(value, [self._with_loss(item, its, loss, found) for item, its in zip(output, value)])
        return value


def explaining_backward(loss: torch.Tensor) -> torch.Tensor:
    """A loss whose `backward()` says that its gradients are there already. In all else it is a tensor like others.

    To require a gradient would change more: `float(loss)` would warn, `loss.numpy()` raise, and a list of losses hold graphs.

    >>> explaining_backward(torch.ones(())).backward()
    Traceback (most recent call last):
    pippy.drivers.errors.DriverError: loss.backward() after driver.run: the gradients are on the workers already; ...
    """
    loss.backward = _explain_backward  # type: ignore[method-assign]
    loss.__getstate__ = dict  # type: ignore[method-assign]  # saved as the plain tensor that it is
    return loss


def _explain_backward(*args: Any, **kwargs: Any) -> None:
    raise DriverError(
        "loss.backward() after driver.run: the gradients are on the workers already; leave it out, and call step() of the "
        "optimizer that driver.instantiate_optimizer gave"
    )


def _map_output(function: Callable[[Any], Any], output: Any) -> Any:
    if isinstance(output, Mapping):
        return {key: _map_output(function, item) for key, item in output.items()}
    if isinstance(output, (tuple, list)) and not isinstance(output, torch.Size):
        return [_map_output(function, item) for item in output]
    return function(output)


def _replaced(seed: Any, value: Any, loss: Any, found: list[Any] | None) -> Any:
    """A value with the part that a seed marks replaced."""
    if seed is None:
        return value
    if isinstance(seed, list):
        items = children(value) or ()
        return with_children(value, [_replaced(inner, item, loss, found) for inner, item in zip(seed, items)])
    if found is not None:
        found.append(value)
    return loss
