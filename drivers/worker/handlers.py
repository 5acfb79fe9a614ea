"""What each instruction does on a worker, in one step. Nothing here decides when: `BoundProgram` says which instruction does
what.

    F  forward   takes values, runs the stage, keeps the run (its inputs and outputs) for the backward
    R  recompute takes what a forward has kept instead of the run, its inputs, and runs the stage again: stage_call.py
    B  backward  takes the run and the gradients of its outputs, gives the gradients of its inputs
    I  the half  as B, but the gradients of the weights are put off
    W  the half  computes those
    C  choose    takes logits, and gives the next token of each row
    send, receive, free      move and drop values, by name and micro-batch
    add                      adds a gradient of a value to another one
    send gradients, reduce, send sum, and what receives      add up the gradients of copies: gradient_sums.py
    send notes, receive notes                                of batch norms that count all replicas: batch_norm.py

A computation is one or more calls, of its stage and of `_loss`, and each has a handler of its own.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch

from pippy.drivers.base.errors import PeerLost
from pippy.drivers.wire.received_values import Interrupted
from pippy.drivers.worker.measure.calls import BoundCall
from pippy.drivers.worker.stage_call import StageCall, cut
from pippy.drivers.worker.step_context import Key, StepContext
from pippy.ir.base.errors import StageError
from pippy.ir.base.names import LOSS
from pippy.ir.base.trees import describe, map_tensors
from pippy.ir.run.random_state import set_draw_key
from pippy.ir.run.stage_backward import add_gradients, loss_inside, weighted
from pippy.ir.run.stage_run import as_leaf, check_opaque_leaves


def computation(
    step: StepContext, calls: Sequence[BoundCall], microbatch: int, own: Sequence[Key], live: int, makes: bool
) -> None:
    """Run the calls of a computation, unless the step was given up.

    ``own`` are the values that no later one takes and that no instruction frees. A computation that ``makes`` something to
    keep is alive while it runs, and ``live`` is by how many there are more after it.
    """
    if step.given_up():
        raise Interrupted
    if makes and step.live >= step.peak_live:
        step.peak_live = step.live + 1
    if step.casts:
        torch.clear_autocast_cache()  # a weight is cast once in a computation, and never kept beyond an update
    if step.statistics is not None:
        step.statistics.microbatch = microbatch
    if step.draw_keys:
        set_draw_key(step.draw_keys[microbatch])
    for handle, operands in calls:
        handle(step, *operands)
    for key in own:
        step.values.pop(key, None)
    step.live += live


def forward(step: StepContext, call: StageCall, microbatch: int, takes: Sequence[Key], gives: Sequence[Key]) -> None:
    """Run a stage, and keep the run if there is a backward."""
    inputs = _inputs(step, call, takes)
    args = inputs if step.own_rows is None else _args(step, call, microbatch, inputs)
    if step.trains and call.backward:
        outputs = _run(step, call, microbatch, inputs, args)
    elif step.slices is None:
        outputs = call.run(args, step.of_graphs)
    else:
        outputs = step.slices.run(call, microbatch, args, step.of_graphs)
    _put(step, microbatch, gives, outputs)


def forward_to_repeat(
    step: StepContext, call: StageCall, microbatch: int, takes: Sequence[Key], gives: Sequence[Key]
) -> None:
    """Run a stage that is run again for its backward, and keep its inputs only."""
    assert call.repeated is not None
    inputs = _inputs(step, call, takes)
    outputs, kept = call.repeated.first(
        inputs, call.outside, lambda leaves: _run(step, call, microbatch, leaves, _args(step, call, microbatch, leaves))
    )
    key = call.name, microbatch
    if kept is None:
        step.not_repeated[key] = outputs
    else:
        step.kept[key] = kept
        del step.runs[key]
        outputs = cut(outputs)
    _put(step, microbatch, gives, outputs)


def gather(step: StepContext, call: StageCall, microbatch: int, takes: Sequence[Key], gives: Sequence[Key]) -> None:
    """Keep what the loss over the whole mini-batch takes of a micro-batch."""
    assert step.single is not None
    step.single.gather(microbatch, _inputs(step, call, takes))


def recompute(step: StepContext, calls: Sequence[tuple[StageCall, int, Sequence[Key], Sequence[Key]]]) -> None:
    """Run the calls of a forward again, for their backwards. What they give goes nowhere else."""
    made: dict[Key, Any] = {}
    for call, microbatch, takes, gives in calls:
        kept = step.kept.pop((call.name, microbatch), None)
        if kept is None:
            outputs = step.not_repeated.pop((call.name, microbatch))
        else:
            assert call.repeated is not None
            outputs = call.repeated.again(
                kept,
                [made.get(key) for key in takes],
                lambda leaves: _run(step, call, microbatch, leaves, _args(step, call, microbatch, leaves)),  # noqa: B023
            )
        made.update(zip(gives, [outputs] if len(gives) == 1 else outputs, strict=True))


def _inputs(step: StepContext, call: StageCall, takes: Sequence[Key]) -> tuple[Any, ...]:
    values = step.values
    if step.place.takes_inputs_up:  # inputs of the model: all at once would take as much memory as the mini-batch
        for key in takes:
            if key[0] in step.inputs:
                values[key] = step.place.here(values[key])
    if step.trains:
        return tuple([_leaf(values[key], key[0] in call.own) for key in takes])
    return tuple([values[key] for key in takes])


def _leaf(value: Any, own: bool) -> Any:
    """A value as a leaf of this call's own; what was sent for this call alone is one already."""
    return value if own and type(value) is torch.Tensor and value.is_leaf else as_leaf(value)


def _args(step: StepContext, call: StageCall, microbatch: int, inputs: tuple[Any, ...]) -> Sequence[Any]:
    if step.own_rows is not None and call.name == LOSS:
        return tuple(step.own_rows(value, microbatch) for value in inputs)
    return inputs


def _run(step: StepContext, call: StageCall, microbatch: int, inputs: tuple[Any, ...], args: Sequence[Any]) -> Any:
    """Run a stage, and keep the run for its backward."""
    if step.slices is None:
        outputs, run = call.begin(inputs, args, step.of_graphs)
    else:
        outputs, run = step.slices.begin(call, microbatch, inputs, args, step.of_graphs)
    step.runs[call.name, microbatch] = run
    return outputs


def _put(step: StepContext, microbatch: int, gives: Sequence[Key], outputs: Any) -> None:
    """Put the outputs of a stage among the values, and those that are returned aside."""
    for key, value in zip(gives, (outputs,) if len(gives) == 1 else outputs, strict=True):
        step.values[key] = value
        if step.returned and key[0] in step.returned:
            assert step.returns is not None
            seed = step.returns[key[0]]
            kept = map_tensors(torch.Tensor.detach, value if seed is None else loss_inside(seed, value))
            step.returned[key[0]][microbatch] = kept if step.trains else step.place.leaves(kept)


def given_gradients(step: StepContext, takes: Sequence[Any], microbatch: int) -> Any:
    """The gradients of a call's outputs: the sum over the uses of each output, or the weight of the loss."""
    if len(takes) == 1 and type(takes[0]) is tuple and len(takes[0]) == 1:  # most often
        return step.values[takes[0][0]]
    totals = [
        reduce(add_gradients, [step.values[key] for key in each], None)
        if isinstance(each, tuple)
        else weighted(each, step.weights[microbatch])
        for each in takes
    ]
    return totals if len(totals) > 1 else totals[0]


def backward(
    step: StepContext, call: StageCall, microbatch: int, takes: Sequence[Any], gives: Sequence[Key | None]
) -> None:
    """Run the backward of a stage: with the gradients of its weights."""
    run = step.runs.pop((call.name, microbatch))
    give(step, gives, run.backward(given_gradients(step, takes, microbatch)))


def backward_input(
    step: StepContext, call: StageCall, microbatch: int, takes: Sequence[Any], gives: Sequence[Key | None]
) -> None:
    """Run the backward of a stage, and put off the gradients of its weights."""
    run = step.runs[call.name, microbatch]
    give(step, gives, run.backward_input(given_gradients(step, takes, microbatch)))


def backward_weight(
    step: StepContext, call: StageCall, microbatch: int, takes: Sequence[Any], gives: Sequence[Key | None]
) -> None:
    """Compute the gradients of weights that were put off."""
    step.runs.pop((call.name, microbatch)).backward_weight()


def backward_of_gathered(
    step: StepContext, call: StageCall, microbatch: int, takes: Sequence[Any], gives: Sequence[Key | None]
) -> None:
    """Give the gradients that the loss over the whole mini-batch has for a micro-batch."""
    assert step.single is not None
    set_draw_key(step.draw_keys.get(None))
    give(step, gives, step.single.backward(microbatch, step.weights[microbatch]))


def choose_tokens(
    step: StepContext, call: StageCall, microbatch: int, takes: Sequence[Key], gives: Sequence[Key]
) -> None:
    """Choose the next token of each row, from the logits that a stage has given."""
    assert step.choose is not None
    give(step, gives, [step.choose(microbatch, step.values[key]) for key in takes])


def give(step: StepContext, gives: Sequence[Key | None], gradients: Sequence[Any]) -> None:
    """Put gradients among the values."""
    for key, gradient in zip(gives, gradients, strict=True):
        if key is not None:
            step.values[key] = gradient


def send(step: StepContext, key: Key, to: int, number: int, ahead: int = 0) -> None:
    """Send a value to a worker, under its number. The value may be for a run that is so many micro-batches ``ahead``."""
    value = step.values[key]
    if step.trains and type(value) is not torch.Tensor:
        check_opaque_leaves(value)
    try:
        step.transport.send(to, (step.number, number, step.earlier + ahead + key[1]), value)
    except StageError:  # of a value that was to leave the device before
        raise
    except Exception as error:
        what = f"{key[0]} of micro-batch {key[1]}, {describe(step.values[key])}"
        raise StageError(f"{what}, could not be sent to worker {to}: {type(error).__name__}: {error}") from error


def receive(step: StepContext, key: Key, source: int, number: int) -> None:
    """Wait for a value of a worker."""
    try:
        step.values[key] = step.transport.receive((step.number, number, step.earlier + key[1]), source)
    except (Interrupted, PeerLost, StageError):
        raise
    except Exception as error:
        what = f"{key[0]} of micro-batch {key[1]}, from worker {source}"
        raise StageError(f"{what}, could not be read: {type(error).__name__}: {error}") from error


def free(step: StepContext, key: Key) -> None:
    """Drop a value."""
    del step.values[key]


def add(step: StepContext, key: Key, into: Key) -> None:
    """Add a gradient of a value to another one, and drop it."""
    step.values[into] = add_gradients(step.values[into], step.values.pop(key))


def send_gradients(step: StepContext, name: str, to: int) -> None:
    """Send this worker's gradients of a sum to the one that adds them up."""
    if step.given_up():
        raise Interrupted
    if step.adding is not None:
        for at, gradients in step.adding.leaving(name):
            step.transport.send(to, (step.number, at, step.adding.sums.index), gradients)


def receive_gradients(step: StepContext, name: str, source: int, whole: bool) -> None:
    """Wait for another worker's gradients of a sum. ``whole`` says that those of this worker will not change."""
    if step.adding is not None:
        for at in step.adding.sums.buckets_of(name):
            found = step.transport.receive((step.number, at, source), source)
            step.adding.arrived(at, source, found, whole)


def add_up(step: StepContext, name: str) -> None:
    """Make a sum, if this step adds up gradients."""
    if step.adding is not None:
        step.adding.add_up(name)


def send_sum(step: StepContext, name: str, to: int) -> None:
    """Send a sum to another worker."""
    if step.adding is not None:
        for at, totals in step.adding.leaving_sums(name):
            step.transport.send(to, (step.number, at, to), totals)


def receive_sum(step: StepContext, name: str, source: int) -> None:
    """Wait for a sum."""
    if step.adding is not None:
        for at in step.adding.awaited(name):
            key = step.number, at, step.adding.sums.index
            step.adding.take(at, step.transport.receive(key, source))


def send_notes(step: StepContext, to: int, key: tuple[int, int]) -> None:
    """Tell a worker of another replica what batch norms have noted, if this step counts it."""
    if step.statistics is not None and step.statistics.counts:
        step.transport.send(to, (step.number, *key), step.statistics.notes())


def receive_notes(step: StepContext, source: int, key: tuple[int, int]) -> None:
    """Wait for what the batch norms of another replica have noted."""
    if step.statistics is not None and step.statistics.counts:
        step.statistics.take(step.transport.receive((step.number, *key), source))


def nothing(step: StepContext) -> None:
    """Do nothing."""
