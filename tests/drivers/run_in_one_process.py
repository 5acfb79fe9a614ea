"""Runs a lowered program in this process, worker by worker, with real stages: what lowering says must be enough to train.

Each worker sees only what its instructions give it. A value that is missing, sent to the wrong worker, freed too early or
never freed fails the run.
"""

from collections import deque
from functools import reduce
from typing import Any

import torch

from pippy import Pipe
from pippy.drivers.lowering.lower import Lowered
from pippy.drivers.plan.language.edges import Pass
from pippy.drivers.plan.language.instructions import (
    Add,
    Compute,
    Free,
    Instruction,
    Op,
    Receive,
    ReceiveExchanged,
    Reduce,
    Send,
    SendExchanged,
)
from pippy.ir.base.names import stage_index
from pippy.ir.base.trees import tensors
from pippy.ir.record.compiled import map_nodes
from pippy.ir.run.copies import sum_gradients
from pippy.ir.run.stage_backward import add_gradients, gradient_pairs, stage_backward
from pippy.ir.run.stage_run import StageRun, as_leaf, run_stage

Key = tuple[str, int]


class LocalRun:
    """All workers of one step. ``inputs`` has for each micro-batch the model's inputs by name."""

    def __init__(self, pipe: Pipe, lowered: Lowered, inputs: list[dict[str, Any]]) -> None:
        self.pipe, self.lowered, self.program = pipe, lowered, lowered.program
        self.calls = {str(node.target): node for node in pipe.split_gm.graph.find_nodes(op="call_module")}
        self.returned: dict[Key, Any] = {}
        self.values: list[dict[Key, Any]] = [{} for _ in self.program.orders]
        self.channels: dict[tuple[int, int], deque[tuple[Key, Any]]] = {}
        self.runs: dict[Key, StageRun] = {}
        self.halves: dict[Key, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.sent = self.reduced = 0
        self.peak = [0] * self.program.workers
        self.moved = {edge.value for edge in self.program.flow}
        for microbatch, given in enumerate(inputs):
            for name, value in given.items():
                for worker in lowered.inputs[name]:
                    self.values[worker][name, microbatch] = value

    def run(self) -> None:
        """Let the workers take turns until all are done."""
        positions = [0] * self.program.workers
        while any(at < len(order) for at, order in zip(positions, self.program.orders)):
            before = list(positions)
            for worker, order in enumerate(self.program.orders):
                while positions[worker] < len(order) and self.step(worker, order[positions[worker]]):
                    positions[worker] += 1
            assert positions != before, f"all workers wait, at {positions}"
        for copies in self.pipe.copies():
            sum_gradients(copies)

    def step(self, worker: int, instruction: Instruction) -> bool:
        """Do one instruction; False if it has to wait."""
        held = self.values[worker]
        match instruction:
            case Compute():
                self.compute(worker, instruction)
            case Send(value, microbatch, to):
                self.channels.setdefault((worker, to), deque()).append(((value, microbatch), held[value, microbatch]))
                self.sent += 1
            case Receive(value, microbatch, source):
                channel = self.channels.get((source, worker))
                if not channel:
                    return False
                key, arrived = channel.popleft()
                assert key == (value, microbatch)
                held[key] = arrived
            case Free(value, microbatch):
                del held[value, microbatch]
            case Add(value, microbatch, into):
                held[into, microbatch] = add_gradients(held[into, microbatch], held.pop((value, microbatch)))
            case Reduce():
                self.reduced += 1
            case SendExchanged(_, to, name):
                self.channels.setdefault((worker, to), deque()).append(((name, 0), None))
            case ReceiveExchanged(_, source, name):
                channel = self.channels.get((source, worker))
                if not channel:
                    return False
                assert channel.popleft()[0] == (name, 0)
        return True

    def compute(self, worker: int, compute: Compute) -> None:
        for work in self.lowered.work[Pass("F" if compute.op == Op.FORWARD else "B", compute.stage)]:
            key = (work.call, compute.microbatch)
            if compute.op == Op.FORWARD:
                self.forward(worker, work, key)
            elif compute.op == Op.BACKWARD_WEIGHT:
                self.backward_weight(work, key)
            else:
                self.backward(worker, work, key, compute.op)
        self.peak[worker] = max(self.peak[worker], self.live(worker))

    def live(self, worker: int) -> int:
        """How many stage-micro-batches a worker holds for their backward."""
        stages = [stage_index(call) for call, _ in self.runs]
        return sum(1 for stage in stages if stage is not None and self.program.placement.worker_of[stage] == worker)

    def forward(self, worker: int, work: Any, key: Key) -> None:
        held, leaves, names = self.values[worker], [], iter(work.takes)
        node = self.calls[work.call]

        def take(_: Any) -> Any:
            leaves.append(as_leaf(held[next(names), key[1]]) if self.program.backward else held[next(names), key[1]])
            return leaves[-1]

        outputs = run_stage(work.call, self.pipe.stage(work.call), map_nodes(take, node.args))
        if self.program.backward:
            self.runs[key] = StageRun(outputs, tuple(leaves))
        for name, value in zip(work.gives, [outputs] if len(work.gives) == 1 else outputs, strict=True):
            held[name, key[1]] = value
            if name in self.lowered.outputs:
                self.returned[name, key[1]] = value

    def backward(self, worker: int, work: Any, key: Key, op: Op) -> None:
        held, run = self.values[worker], self.runs[key]
        totals = [
            reduce(add_gradients, (held[name, key[1]] for name in each), None) if isinstance(each, tuple) else each
            for each in work.takes
        ]
        given = totals if len(totals) > 1 else totals[0]
        gradients = (
            stage_backward(run.outputs, given, run.inputs) if op == Op.BACKWARD else self.halved(work, key, given)
        )
        if op == Op.BACKWARD:
            del self.runs[key]
        for name, gradient in zip(work.gives, gradients, strict=True):
            if name is not None:
                held[name, key[1]] = gradient

    def halved(self, work: Any, key: Key, given: Any) -> tuple[Any, ...]:
        """The gradients of the inputs only; those of the weights wait."""
        run = self.runs[key]
        pairs = self.halves[key] = list(gradient_pairs(run.outputs, given))
        inputs = [leaf for leaf in tensors(run.inputs) if leaf.requires_grad]
        if pairs and inputs:
            outputs, gradients = zip(*pairs)
            found = torch.autograd.grad(outputs, inputs, gradients, retain_graph=True, allow_unused=True)
            for leaf, gradient in zip(inputs, found):
                leaf.grad = gradient
        return stage_backward(None, None, run.inputs)

    def backward_weight(self, work: Any, key: Key) -> None:
        pairs, module = self.halves.pop(key), self.pipe.stage(work.call)
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        del self.runs[key]
        if pairs and parameters:
            outputs, gradients = zip(*pairs)
            found = torch.autograd.grad(outputs, parameters, gradients, allow_unused=True)
            for parameter, gradient in zip(parameters, found):
                if gradient is not None:  # it may be a view that repeats one number
                    parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad + gradient

    def left(self) -> set[str]:
        """The sent values that are still held after the step."""
        return {name for held in self.values for name, _ in held if name in self.moved}

    def output(self, name: str, microbatch: int) -> Any:
        return self.returned[name, microbatch]
