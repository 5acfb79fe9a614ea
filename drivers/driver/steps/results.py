"""What a step gives back, also one that runs while the script goes on: micro-batches' losses weighted and added, outputs put
together.

The argument ``outputs`` of `driver.run` says what a step gives beside the loss.

outputs    the step gives                                     the workers return
─────────────────────────────────────────────────────────────────────────────────────────
None       what the Pipe gives                                those values
True       `LossAndOutputs`: the loss, the model's outputs    the loss, and all that the model returns
False      the loss                                           the loss alone
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx

from pippy.drivers.base.errors import DriverError
from pippy.drivers.batch.columns import loaded_columns
from pippy.drivers.batch.divide import advising
from pippy.drivers.batch.division import Division, SameForAll
from pippy.drivers.batch.loss_weights import loss_weights, reduction_of, weighing_inputs
from pippy.drivers.batch.merge import LOSS_PLACE, check_leaves_loss_alone, merge_outputs
from pippy.drivers.batch.slices import joined_slices
from pippy.drivers.protocol.steps import StepResult
from pippy.drivers.session.command_log import PendingCommand
from pippy.drivers.session.session import Session
from pippy.ir.base.names import LOSS
from pippy.ir.base.readable import brief
from pippy.ir.base.trees import UNKNOWN, children, describe, leaves, with_children
from pippy.ir.call.row_sizes import dims_of
from pippy.ir.call.signature import call_signature
from pippy.ir.record.compiled import Compiled, map_nodes
from pippy.ir.run.stage_backward import loss_inside

_NAME = "outputs"


class LossAndOutputs(NamedTuple):
    """What a step gives with ``outputs=True``: ``loss, outputs = driver.run(4, x, target, outputs=True)``.

    ``loss`` is None if the Pipe has no loss. ``outputs`` are what the model returns for the whole mini-batch, detached.
    """

    loss: Any
    outputs: Any


def model_output(compiled: Compiled) -> Any:
    """What the model returns, with nodes for its values. Where there is a loss function, the graph returns the loss."""
    graph = compiled.split_gm.graph
    for loss in graph.find_nodes(op="call_module", target=LOSS):
        return loss.args[0]
    return graph.output_node().args[0]


def values_to_return(compiled: Compiled, outputs: bool | None) -> dict[fx.Node, Any] | None:
    """The values that the workers return. Each has None if all of it is returned, or a seed that marks the loss in it.

    Returns None if these are the values that the program returns.
    """
    if outputs is None or compiled.loss is None:
        return None
    loss = next(node for node in compiled.split_gm.graph.nodes if node.name == compiled.loss.value)
    if not outputs:
        return {loss: compiled.loss.seed}
    returned: dict[fx.Node, Any] = {loss: None}
    fx.node.map_arg(model_output(compiled), lambda node: returned.setdefault(node, None))
    return returned


def asked_outputs(
    compiled: Compiled, outputs: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[bool | None, dict[str, Any]]:
    """The argument ``outputs`` of `run`, and the keyword arguments of the model, which may have an ``outputs`` of its own."""
    if outputs is None:
        return None, kwargs
    parameters = call_signature(compiled).parameters.values()
    named = any(each.name == _NAME for each in parameters) and not _by_position(compiled, args, kwargs)
    takes = named or any(each.kind is each.VAR_KEYWORD for each in parameters)
    if not isinstance(outputs, bool):
        if takes:
            return None, {**kwargs, _NAME: outputs}
        raise DriverError(
            f"outputs={describe(outputs)}: give True for the loss and the model's outputs, False for the loss alone, or leave "
            "it out"
        )
    if named:
        raise DriverError(
            f"outputs={brief(outputs)} is ambiguous, because the model has an argument {_NAME!r} too; give the "
            "model's argument by position, and the keyword is the driver's"
        )
    if compiled.loss is None and not outputs:
        raise DriverError("outputs=False on a Pipe without a loss would return nothing; leave it out")
    return outputs, kwargs


def _by_position(compiled: Compiled, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the model's own argument of that name is among the positional arguments."""
    own = args if compiled.target_name is None or compiled.target_name in kwargs else args[:-1]
    try:
        return _NAME in call_signature(compiled).bind_partial(*own).arguments
    except TypeError:  # too many; the call is refused later
        return True


class Results:
    """Makes the result of a step from the values that the workers return.

    ``names`` has the names of the top-level graph's values, by which the workers return them. The other arguments are what
    the driver was given. ``assumes`` says that the reduction of the loss is not known, so that it must be checked. ``renames``
    has for each part of the step the names that its values have here.
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
        outputs: bool | None = None,
        renames: Sequence[Mapping[str, str]] = (),
    ) -> None:
        self.trains, self.outputs, self.loss_reduction = trains, outputs, loss_reduction
        self.compiled, self.names, self.division = compiled, names, division
        self.output_spec, self.single_loss, self.renames = output_spec, single_loss, renames
        self.result: Any = None
        self.reduction = reduction_of(compiled.loss_module)
        self.assumes = compiled.loss is not None and not (single_loss or loss_reduction or self.reduction.known)
        self.weighs_elsewhere = compiled.loss is not None and not single_loss and self._weighs_elsewhere()
        self.weights = self._weights()
        self.output = model_output(compiled)
        self.merges = outputs or (outputs is None and not self._gives_loss())
        if self.merges:
            map_nodes(self._check_has_output, self.output)
        if self.compiled.loss is not None and output_spec is not None:
            check_leaves_loss_alone(output_spec, map_nodes(self._loss_in, self.output))

    def _weights(self) -> tuple[float, ...]:
        if self.compiled.loss is None or self.single_loss or self.weighs_elsewhere:
            return (1.0,) * self.division.chunks
        return loss_weights(self.compiled.loss_module, self.division, self.compiled.target_name, self.loss_reduction)

    def _weighs_elsewhere(self) -> bool:
        """Whether a worker computes the weights of the losses, as it loads the inputs that they depend on."""
        if self.division.chunks == 1:
            return False
        names = weighing_inputs(self.division, self.compiled.target_name, self.loss_reduction)
        return any(loaded_columns(self.division.arguments[name]) for name in names)

    def _check_has_output(self, node: fx.Node) -> fx.Node:
        """Raise if the model returns an input that is loaded by the workers."""
        is_input = node.op == "placeholder" and node.name in self.division.arguments
        for leaf in loaded_columns(self.division.arguments[node.name]) if is_input else ():
            raise DriverError(
                f"the model returns its input {leaf.path!r}, which only the workers load, so this process cannot "
                "return it; give it as a tensor, or ask for the loss alone: outputs=False"
            )
        return node

    def _gives_loss(self) -> bool:
        """Whether the Pipe gives the loss, and nothing else."""
        output = self.compiled.split_gm.graph.output_node().args[0]
        return isinstance(output, fx.Node) and self._is_loss(output) and not isinstance(self.loss_seed, list)

    def accept(self, answers: Mapping[int, StepResult]) -> Any:
        """Make the result of the mini-batch from the answers of the workers. If that fails, the step has failed."""
        values: dict[str, Any] = {}
        for answer in answers.values():  # in the order of the replicas
            self.weights = answer.weights or self.weights
            for at, part in enumerate((answer, *answer.then)):
                named = self.renames[at] if at else {}
                for own, value in part.values.items():
                    name = named.get(own, own)
                    values[name] = joined_micro_batches(values[name], value) if name in values else value
        by_chance = [each for answer in answers.values() for each in answer.by_chance]
        self.result = self.assemble(values, by_chance)
        return self.result

    def assemble(self, returned: Mapping[str, Any], by_chance: Sequence[tuple[str, int]] = ()) -> Any:
        """The result of the mini-batch. ``by_chance`` names tensors that have as many rows as a micro-batch by chance."""
        loss = None if self.compiled.loss is None else self._total(self._losses(returned))
        if not self.merges:
            return loss
        values = {name: self._listed(packed) for name, packed in returned.items()}
        self.row_dims: dict[int, int | None] = {
            id(list(leaves(values[name][0]))[number]): None for name, number in by_chance
        }
        self.row_dims |= self._known_row_dims(values)
        parts = [map_nodes(partial(self._value, values, each), self.output) for each in range(self.division.chunks)]
        parts = joined_slices([*map(self._without_loss, parts)], self.division)
        outputs = self._with_loss(self.output, self._merged(self.output, parts), loss)
        return LossAndOutputs(loss, outputs) if self.outputs else outputs

    def _known_row_dims(self, values: Mapping[str, Sequence[Any]]) -> dict[int, int | None]:
        """The dimension of the rows of the first micro-batch's tensors, as far as tracing with one more row has shown it."""
        if not self.division.has_rows_in_front():
            return {}
        found = ((its[0], self.compiled.row_sizes.get(name, UNKNOWN)) for name, its in values.items() if len(its))
        pairs = [pair for value, sizes in found for pair in zip(leaves(value), dims_of(sizes, value))]
        return {id(leaf): dim.dim if dim else None for leaf, dim in pairs if dim is not UNKNOWN}

    def _losses(self, returned: Mapping[str, Any]) -> Any:
        """The losses of the micro-batches: a tensor of all, or a list."""
        losses = returned[next(name for node, name in self.names.items() if self._is_loss(node))]
        if self.outputs is False or not isinstance(self.loss_seed, list):
            return losses
        return [loss_inside(self.loss_seed, value) for value in losses]

    def _without_loss(self, part: Any) -> Any:
        return self._with_loss(self.output, part, LOSS_PLACE)

    def _merged(self, output: Any, parts: Sequence[Any]) -> Any:
        shared = _map_output(self._is_shared, output)
        given = parts, self.division.sizes and self.division.sizes[:: self.division.slices], self.output_spec
        return merge_outputs(*given, mask=self.division.mask, shared=shared, row_dims=self.row_dims)

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
        """The seed that marks the loss in its value: nested lists, if the loss is inside of containers."""
        return None if self.compiled.loss is None else self.compiled.loss.seed

    def _total(self, losses: Any) -> torch.Tensor:
        """The loss of the mini-batch. A micro-batch in which no target counts is left out, as its loss is not finite."""
        shape = losses[0].shape  # one number, but it may be in brackets
        losses = torch.stack([loss.reshape(()) for loss in losses]) if isinstance(losses, list) else losses
        weights = torch.tensor(self.weights[: len(losses)], dtype=losses.dtype)
        if 0.0 in self.weights:
            losses, weights = losses[weights != 0], weights[weights != 0]
        total = (losses * weights).cumsum(0)[-1].reshape(shape)  # in order, however many there are
        return explaining_backward(total) if self.trains else total

    def _listed(self, packed: Any) -> Sequence[Any]:
        return list(packed.unbind()) if isinstance(packed, torch.Tensor) else packed

    def _value(self, values: Mapping[str, Sequence[Any]], microbatch: int, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self.division.take(node.name, microbatch)
        return values[self.names[node]][microbatch]

    def _with_loss(self, output: Any, value: Any, loss: Any) -> Any:
        """``value``, the value of the graph's ``output``, with another loss in it."""
        if isinstance(output, fx.Node):
            return _replaced(self.loss_seed, value, loss) if self._is_loss(output) else value
        if isinstance(output, Mapping):
            return {key: self._with_loss(item, value[key], loss) for key, item in output.items()}
        if isinstance(output, (tuple, list)):
            return with_children(value, [self._with_loss(item, part, loss) for item, part in zip(output, value)])
        return value


class PostedStep:
    """A step that was sent. ``rows`` is the number of its rows; None if the mini-batch has none.

    ``results`` has the result when all workers have answered. ``note`` is given the answers, if the step is recorded.
    """

    def __init__(
        self,
        session: Session,
        posted: PendingCommand,
        results: Results,
        note: Callable[[Mapping[int, StepResult]], None] | None,
    ) -> None:
        self._session, self._note = session, note
        self._posted: PendingCommand | None = posted
        self._results: Results | None = results
        self.rows = results.division.rows
        self._result: Any = None

    def __repr__(self) -> str:
        return f"<PostedStep, {'done' if self._posted is None else 'not waited for'}>"

    def result(self) -> Any:
        """Wait for the step, and return what `run` returns."""
        posted, results = self._posted, self._results
        if posted is not None and results is not None:
            with advising(results.division):
                self._end(self._session.wait(posted), results)
        return self._result

    def _end(self, answers: Mapping[int, StepResult], results: Results) -> None:
        with self._session.lock:
            if self._posted is None:  # another thread was here
                return
            self.peak_live = {
                worker: max(part.peak_live for part in (answer, *answer.then)) for worker, answer in answers.items()
            }
            if self._note is not None:
                self._note(answers)
            self._result = results.result
            self._posted = self._results = None  # they hold the inputs and the outputs of the micro-batches


def joined_micro_batches(values: Any, more: Any) -> Any:
    """Join the values of some micro-batches with those of the micro-batches after them.

    >>> joined_micro_batches(torch.ones(1), torch.zeros(2))
    tensor([1., 0., 0.])
    """
    if isinstance(values, torch.Tensor) and isinstance(more, torch.Tensor) and values.dtype == more.dtype:
        return torch.cat([values, more])
    return [*values, *more]


def explaining_backward(loss: torch.Tensor) -> torch.Tensor:
    """A loss whose `backward()` raises, and says that the gradients are on the workers. In all else it is a usual tensor.

    It does not require a gradient: else `float(loss)` would warn, `loss.numpy()` would raise, and a list of losses would keep
    graphs.

    >>> explaining_backward(torch.ones(())).backward()
    Traceback (most recent call last):
    pippy.drivers.base.errors.DriverError: loss.backward() is not needed after driver.run, ...
    """
    loss.backward = _explain_backward  # type: ignore[method-assign]
    loss.__getstate__ = dict  # type: ignore[method-assign]  # saved as the plain tensor that it is
    return loss


def _explain_backward(*args: Any, **kwargs: Any) -> None:
    raise DriverError(
        "loss.backward() is not needed after driver.run, which has computed the gradients on the workers; leave it "
        "out, and call step() of the optimizer that driver.instantiate_optimizer returned"
    )


def _map_output(function: Callable[[Any], Any], output: Any) -> Any:
    if isinstance(output, Mapping):
        return {key: _map_output(function, item) for key, item in output.items()}
    if isinstance(output, (tuple, list)) and not isinstance(output, torch.Size):
        return [_map_output(function, item) for item in output]
    return function(output)


def _replaced(seed: Any, value: Any, loss: Any) -> Any:
    """A value whose part that the seed marks is replaced by the loss."""
    if seed is None:
        return value
    if isinstance(seed, list):
        items = children(value) or ()
        return with_children(value, [_replaced(inner, item, loss) for inner, item in zip(seed, items)])
    return loss
