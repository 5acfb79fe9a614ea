"""What a worker is given before steps: stages, the programs that it runs, those that make tokens, and datasets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pippy.drivers.lowering.flow import Work
from pippy.drivers.plan.language.edges import Pass
from pippy.drivers.plan.language.instructions import Instruction
from pippy.drivers.protocol.commands import NeedsPeers, others_in
from pippy.drivers.protocol.state import GradientBucket
from pippy.drivers.wire.pickling import Pickled
from pippy.ir.base.trees import map_instances

# The stages that a worker will run.


@dataclass(frozen=True)
class Load(NeedsPeers):
    """The stages that a worker will run.

    ``modules`` holds the stages by their names in the graph. ``constant`` names the tensors of each stage that other stages
    read too. ``buckets`` have all parameters with copies. ``replicas`` says whether other workers hold the same stages, for
    other replicas of the pipeline. ``compile`` says how the stages are compiled; it is None if they are not.
    """

    modules: Pickled
    constant: Mapping[str, Sequence[str]]
    buckets: tuple[GradientBucket, ...]
    seed: int
    compile: Pickled | None = None
    replicas: bool = False

    def peers(self, worker: int) -> set[int]:
        """The workers that it adds up gradients with: the owner of a bucket with all others."""
        found: set[int] = set()
        for bucket in self.buckets:
            others = {*bucket.workers} - {bucket.owner}
            found |= others if worker == bucket.owner else {bucket.owner} if worker in others else set()
        return found


@dataclass(frozen=True)
class AskCompiled:
    """Ask how the stages run, by their names."""


@dataclass(frozen=True)
class Unload:
    """Drop everything that belongs to the driver."""


@dataclass(frozen=True)
class ForgetPeers:
    """Drop the connections with these workers: other processes have taken their places."""

    peers: tuple[int, ...]


@dataclass(frozen=True)
class InputIndex:
    """Stands for an input in the template of a `CallForm`."""

    index: int


def filled(template: Any, inputs: Sequence[Any]) -> Sequence[Any]:
    """A template with the inputs in their places. Without a template, the inputs.

    >>> filled((InputIndex(1), [InputIndex(0), "x"]), inputs=["a", "b"])
    ('b', ['a', 'x'])
    """
    if template is None:
        return inputs
    return map_instances(InputIndex, lambda each: inputs[each.index], template)


@dataclass(frozen=True)
class CallForm:
    """How the graph calls a stage: with its inputs in order, or with the arguments ``template``.

    An `InputIndex` in the template stands for an input. ``seen`` has the numbers and names of the inputs that the stage must
    not change in place.
    """

    name: str
    template: Any = None
    seen: Sequence[tuple[int, str]] = ()


@dataclass(frozen=True)
class OutOfOrderLimits:
    """Limits for a worker that runs out of order.

    It holds at most ``limit`` micro-batches of its stages at a time; None stands for the program's own peak. ``depth`` is
    the number of workers that a micro-batch visits from here to the last stage: as many micro-batches keep them all busy.
    """

    limit: int | None
    depth: int


@dataclass(frozen=True)
class AddGraph:
    """The stages of another graph of the model, under a number from 1 on: their code, by their names in the graph.

    ``modules`` has a `TensorLocation` for each tensor and each module that the worker has in its stages. ``constant`` is as in
    `Load`.
    """

    graph: int
    modules: Pickled
    constant: Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class AddProgram(NeedsPeers):
    """A worker's part of a program, under a number: sent once, run in many steps.

    ``value_numbers`` numbers the values that are sent between workers, notes of batch norms included. The numbers before these
    are those of buckets: of their gradients and sums, and behind them of their updated parameters.
    ``ranks`` has the cluster's worker for each worker of the program; ``worker`` is this one's number in it. ``returns`` lists
    the values that go back to the controller. Without ``out_of_order``, the worker keeps the order of its instructions.
    ``share`` are the micro-batches that it computes. ``slices`` is how many slices a row of them has, if the stages keep keys
    and values from one slice of a sequence to the next; 0 if they keep none. ``graph`` is the graph of the model whose stages
    it calls: 0 for those of `Load`, or the number of an `AddGraph`.
    """

    program: int
    order: tuple[Instruction, ...]
    work: Mapping[Pass, tuple[Work, ...]]
    calls: Mapping[str, CallForm]
    value_numbers: Mapping[str, int]
    ranks: tuple[int, ...]
    worker: int
    returns: tuple[str, ...]
    single_loss: bool
    share: range
    out_of_order: OutOfOrderLimits | None = None
    slices: int = 0
    graph: int = 0

    def peers(self, worker: int) -> set[int]:
        """The workers that it sends to, or receives from."""
        return {self.ranks[other] for other in others_in(self.order)}


# Making tokens.


@dataclass(frozen=True)
class AddGeneration(NeedsPeers):
    """A worker's part of the programs that make tokens, in so many micro-batches: for a prompt, and for each token behind it.

    ``modules`` has the code of its stages for a prompt, and for a token, with a `TensorLocation` for each tensor that the
    worker has already. It is sent once. With ``one_token``, a prompt is one token, and runs the code for that.
    """

    prompt: AddProgram
    token: AddProgram
    one_token: bool
    modules: tuple[Pickled, Pickled] | None

    def peers(self, worker: int) -> set[int]:
        """Those of both programs."""
        return self.prompt.peers(worker) | self.token.peers(worker)


@dataclass(frozen=True)
class AllEnded:
    """Goes in place of the values of a micro-batch whose rows have all ended."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, and the random state to draw them with."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    state: torch.Tensor


@dataclass(frozen=True)
class Generate:
    """Make up to ``length`` tokens behind each prompt, in chunks of so many ``rows``.

    ``inputs`` are those of the prompts, by name. With ``one_token``, each prompt is one token. A row ends with one of the
    tokens ``ends``, and has ``padding`` behind it.
    """

    inputs: Mapping[str, torch.Tensor]
    one_token: bool
    rows: tuple[int, ...]
    length: int
    ends: tuple[int, ...]
    padding: int
    sampling: Sampling | None


@dataclass(frozen=True)
class Generated:
    """The tokens of each chunk, and the random state after they were drawn."""

    tokens: tuple[torch.Tensor, ...]
    state: torch.Tensor | None


# Datasets that inputs of steps are loaded from.


@dataclass(frozen=True)
class AddDataset:
    """A dataset that inputs of steps are loaded from, under a number: sent once.

    ``dataset`` is the dataset, or a dataset for each of some columns, or "package.module:function", which makes it. ``collate``
    puts items together; None stands for torch's own. ``keys`` are the columns that this worker needs. Workers that make the
    dataset compare their row ``sample``. ``rules`` has the Pipe's guards and what weighs losses.
    The datasets with the numbers ``gone`` are dropped. With ``beside``, threads load the next mini-batches during the steps.
    """

    number: int
    dataset: Pickled | Mapping[Any, Pickled] | str
    collate: Pickled | None
    keys: tuple[Any, ...]
    sample: tuple[Any, ...]
    rules: Pickled
    gone: tuple[int, ...] = ()
    beside: bool = False


@dataclass(frozen=True)
class DatasetSeen:
    """What a worker has made of the name of a dataset: how many rows it has, and in words its class and a digest of a row."""

    rows: int | None = None
    words: str = ""
