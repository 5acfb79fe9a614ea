"""All messages between the controller and the workers.

The controller numbers its commands. All workers of a cluster see the same numbers, so a number also says in which step a
value was sent, and which commands to give up after a failure. A worker carries out its commands in order, and answers
each of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pippy.drivers.batches.division import Division
from pippy.drivers.batches.loss_check import LossCheck, LossReport
from pippy.drivers.checkpoints.safetensors_files import StoredTensor
from pippy.drivers.checkpoints.synced_files import WrittenFile
from pippy.drivers.lowering.flow import Work
from pippy.drivers.schedules.programs.edges import Pass
from pippy.drivers.schedules.programs.instructions import Instruction, Receive, Send
from pippy.drivers.transport.pickling import Pickled
from pippy.ir.run.keyed_draws import RandomStep
from pippy.ir.surroundings import Surroundings

ZeroGrad = bool | tuple[int, ...]


@dataclass(frozen=True)
class Command:
    """What a worker does for one driver. Commands up to ``settled`` have succeeded on all workers.

    With ``zero_grad`` the worker drops the driver's gradients first: all, or those of the parameters that the optimizers with
    these numbers have. ``dropped`` lists drivers that are gone: the worker
    forgets them.
    """

    number: int
    settled: int
    driver: int
    body: Any
    zero_grad: ZeroGrad = False
    dropped: tuple[int, ...] = ()


@dataclass(frozen=True)
class CommandElsewhere(Command):
    """A command whose call was surrounded by something else than the last one that these workers were told of."""

    surroundings: Surroundings | None = None


@dataclass(frozen=True)
class TensorLocation:
    """Where a worker finds a parameter or buffer: the name of the stage (or `_loss`), and the tensor's name in that stage."""

    call: str
    name: str


@dataclass(frozen=True)
class ReplicatedParameter:
    """The user's name of a parameter of which there are copies, and the worker and location of each: those of the first
    replica of the pipeline first, and in a replica in the order of the stages."""

    name: str
    copies: tuple[tuple[int, TensorLocation], ...]


@dataclass(frozen=True)
class GradientBucket:
    """Parameters of which the same workers have copies, and whose gradients are added up together, by the worker ``owner``."""

    owner: int
    parameters: tuple[ReplicatedParameter, ...]

    @property
    def workers(self) -> list[int]:
        """The workers that have copies."""
        return list(dict.fromkeys(worker for worker, _ in self.parameters[0].copies))


class NeedsPeers(ABC):
    """A message after which a worker passes values to other workers, or takes theirs."""

    @abstractmethod
    def peers(self, worker: int) -> set[int]:
        """The other workers, if the message goes to this one."""


@dataclass(frozen=True)
class Load(NeedsPeers):
    """The stages that a worker will run.

    ``modules`` holds the stages by their names in the graph. ``constant`` names the tensors of each stage that other stages
    read too. ``buckets`` have all parameters of which there are copies. ``twins`` are the workers that hold the same stages,
    one for each replica of the pipeline, if there are replicas; ``notes`` says that they have deferred batch norms. ``compile``
    has the options of torch.compile, or None if the stages are not compiled.
    """

    modules: Pickled
    constant: Mapping[str, Sequence[str]]
    buckets: tuple[GradientBucket, ...]
    seed: int
    compile: Pickled | None = None
    twins: tuple[int, ...] = ()
    notes: bool = False

    def peers(self, worker: int) -> set[int]:
        """Those with which it adds up gradients: the owner of a bucket has to do with all others. And those that it tells what
        deferred batch norms have noted."""
        found = {*self.twins} - {worker} if self.notes else set()
        for bucket in self.buckets:
            others = {*bucket.workers} - {bucket.owner}
            found |= others if worker == bucket.owner else {bucket.owner} if worker in others else set()
        return found


@dataclass(frozen=True)
class Call:
    """How the graph calls a stage: with its inputs in order, or as ``template`` has them, with an `InputIndex` for each.

    ``seen`` has the numbers and names of the inputs that the stage must not change in place.
    """

    name: str
    template: Any = None
    seen: Sequence[tuple[int, str]] = ()


@dataclass(frozen=True)
class InputIndex:
    """Stands for an input in the template of a `Call`."""

    index: int


@dataclass(frozen=True)
class OutOfOrderLimits:
    """Limits for a worker that runs out of order.

    It holds at most ``limit`` micro-batches of its stages at a time; None stands for the program's own peak. ``depth`` is
    the number of workers that a micro-batch visits from here to the last stage: as many micro-batches keep them all busy.
    """

    limit: int | None
    depth: int


@dataclass(frozen=True)
class AddProgram(NeedsPeers):
    """A worker's part of a program, under a number: sent once, run in many steps.

    ``value_numbers`` numbers the values that are sent between workers. ``ranks`` has the cluster's worker for each worker of
    the program. ``returns`` lists the values that go back to the controller. Without ``out_of_order``, the worker keeps the
    order of its instructions. ``share`` are the micro-batches that it computes.
    """

    program: int
    order: tuple[Instruction, ...]
    work: Mapping[Pass, tuple[Work, ...]]
    calls: Mapping[str, Call]
    value_numbers: Mapping[str, int]
    ranks: tuple[int, ...]
    returns: tuple[str, ...]
    single_loss: bool
    share: range
    out_of_order: OutOfOrderLimits | None = None

    def peers(self, worker: int) -> set[int]:
        """Those to which it sends, and from which it receives."""
        others = {
            each.to if isinstance(each, Send) else each.source
            for each in self.order
            if isinstance(each, Send | Receive)
        }
        return {self.ranks[other] for other in others}


@dataclass(frozen=True)
class StageFlags:
    """The training flag of each module of a stage, and whether each of its parameters requires a gradient."""

    training: tuple[bool, ...]
    requires_grad: tuple[bool, ...]


@dataclass(frozen=True)
class Step:
    """Run a program once.

    ``weights`` has the weight of each micro-batch's loss. ``flags`` has the flags of each stage, or None if they did not
    change. With ``reduce``, the gradients of replicated parameters are added up at the end. With ``record``, the times of all
    instructions are recorded; with ``count_memory``, also what is held then. With ``weigh``, the worker measures how many
    bytes each stage keeps for its backward. ``loss_check`` asks it to check how the losses of the micro-batches add up. With
    ``scale``, the loss is multiplied by it for the backward, and the gradients are divided by it in the end. With
    ``probe_outputs``, it is checked which returned values have the rows of a micro-batch by chance. ``random`` says of which
    step the random numbers are; None if the worker goes on with its own. ``weighed``: the worker has found ``weights``.
    """

    program: int
    trains: bool
    inputs: Division
    weights: tuple[float, ...]
    flags: Mapping[str, StageFlags] | None = None
    reduce: bool = False
    record: bool = False
    weigh: bool = False
    loss_check: LossCheck | None = None
    scale: float | None = None
    probe_outputs: bool = False
    count_memory: bool = False
    random: RandomStep | None = None
    weighed: bool = False


@dataclass(frozen=True)
class StepReturning(Step):
    """A step that returns other values than its program says: those in ``returns``.

    Each has None for all of it, or a seed: only the loss, which is at that place in it, is returned.
    """

    returns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AddDataset:
    """A dataset that inputs of steps are loaded from, under a number: sent once.

    ``dataset`` is the dataset, or for some of its columns a dataset of each; or "package.module:function", which makes it.
    ``collate`` puts items together; None for torch's own. ``keys`` are the columns that this worker needs. ``sample`` is an
    index, whose row is compared among workers that make the dataset. ``rules`` has the Pipe's guards and what weighs losses,
    once for a driver. The datasets with the numbers ``gone`` are dropped. ``beside``: mini-batches that come next are loaded on
    threads, beside the steps.
    """

    number: int
    dataset: Pickled | Mapping[Any, Pickled] | str
    collate: Pickled | None
    keys: tuple[Any, ...]
    sample: tuple[Any, ...]
    rules: Pickled | None = None
    gone: tuple[int, ...] = ()
    beside: bool = False


@dataclass(frozen=True)
class DatasetSeen:
    """What a worker has made of the name of a dataset: its class, how many rows it has, and a digest of the sample."""

    kind: str = ""
    rows: int | None = None
    digest: str = ""


@dataclass(frozen=True)
class WorkerRecord:
    """One worker's times in a recorded step, in seconds of its monotonic clock. ``clock`` names the clock: one for each host.

    The worker took up the step at ``began``, and was done at ``ended``. The first instruction began at ``started``, and each
    of the others when the one before it ended. ``ends`` has the end of each instruction, by the instruction's number, and
    ``sizes`` the bytes of each send. At ``adding`` the worker began to add up the gradients of replicated parameters.
    ``memory`` is the peak in bytes, and ``memory_of`` says what was measured. ``cpu`` is the processor time of the worker's
    thread; None where the thread waits for a device. ``held`` has the most bytes that were held while each instruction ran,
    and those after it, with those of the end of the step behind them; None if they were not asked for.
    """

    clock: str
    began: float
    started: float
    ends: Sequence[float]
    adding: float | None
    ended: float
    sizes: Mapping[int, int]
    memory: int
    memory_of: str
    cpu: float | None = None
    held: tuple[Sequence[int], Sequence[int]] | None = None

    def spans(self) -> list[tuple[float, float]]:
        """When each instruction began and ended, by its number."""
        found = [(0.0, 0.0)] * len(self.ends)
        start = self.started
        for at in sorted(range(len(self.ends)), key=self.ends.__getitem__):
            found[at] = start, self.ends[at]
            start = self.ends[at]
        return found

    def shifted(self, by: float) -> "WorkerRecord":
        """The same times on a clock that is ``by`` seconds ahead."""
        return replace(
            self,
            began=self.began + by,
            started=self.started + by,
            ends=[end + by for end in self.ends],
            adding=None if self.adding is None else self.adding + by,
            ended=self.ended + by,
        )


@dataclass(frozen=True)
class StepResult:
    """What a worker gives back after a step: the returned values by name.

    ``peak_live`` is the largest number of micro-batches that its stages held at a time. ``kept`` has the bytes that one
    micro-batch of each stage keeps, and those of its inputs alone, if the step was asked to measure them, and
    ``loss_report`` what a check of the loss found. ``nonfinite`` has the parameters whose gradients are not finite, if the loss
    was scaled. ``by_chance`` has the values, and the numbers of the tensors in them, that have as many rows as a micro-batch,
    and not its rows. ``weights`` are those of the losses, if a worker was to find them.
    """

    values: Mapping[str, Any]
    peak_live: int
    record: WorkerRecord | None = None
    kept: Mapping[int, tuple[int, int]] | None = None
    loss_report: LossReport | None = None
    nonfinite: tuple[TensorLocation, ...] = ()
    by_chance: tuple[tuple[str, int], ...] = ()
    weights: tuple[float, ...] | None = None


@dataclass(frozen=True)
class TokenStage:
    """How a stage takes part in making a token.

    ``receives`` has the stages on other workers that send it values, with their workers and the names of the values, and
    ``sends`` the workers that it sends values to.
    """

    stage: int
    call: Call
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    receives: tuple[tuple[int, int, tuple[str, ...]], ...]
    sends: tuple[tuple[int, tuple[str, ...]], ...]


@dataclass(frozen=True)
class TokenGraph:
    """A worker's part of the graph that makes a token.

    ``modules`` has the code of the stages, with a `TensorLocation` for each tensor that the worker has already. ``logits``
    is the value that the token is chosen from, by the worker ``choosing``, and ``told`` are the workers that it tells.
    """

    stages: tuple[TokenStage, ...]
    modules: Pickled
    logits: str
    choosing: int
    told: tuple[int, ...]

    def peers(self, worker: int) -> set[int]:
        """The workers with which a worker passes values and tokens."""
        found = {source for stage in self.stages for _, source, _ in stage.receives}
        found |= {to for stage in self.stages for to, _ in stage.sends}
        found |= set(self.told) if worker == self.choosing else {self.choosing} if worker in self.told else set()
        return found - {worker}


@dataclass(frozen=True)
class AddGeneration(NeedsPeers):
    """What a worker does to generate: for a prompt, and for each token behind it. Sent once."""

    prompt: TokenGraph
    token: TokenGraph

    def peers(self, worker: int) -> set[int]:
        """Those of both graphs."""
        return self.prompt.peers(worker) | self.token.peers(worker)


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

    ``inputs`` are those of the prompts, by their names, which are of ``one_token`` or of more. A row is finished by one of the
    tokens ``ends``, and is ``padding`` from then on.
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


@dataclass(frozen=True)
class Unload:
    """Drop everything that belongs to the driver."""


@dataclass(frozen=True)
class ForgetPeers:
    """Other processes are in the places of these workers: drop the connections with those that were there."""

    peers: tuple[int, ...]


@dataclass(frozen=True)
class Fetch:
    """Give the tensors at these locations, or their gradients."""

    locations: tuple[TensorLocation, ...]
    gradients: bool = False


@dataclass(frozen=True)
class Store:
    """Copy these values into the tensors at their locations."""

    tensors: Mapping[TensorLocation, torch.Tensor]


@dataclass(frozen=True)
class ReduceGradients:
    """Add up the gradients of replicated parameters, unless that was done."""


@dataclass(frozen=True)
class GradientNorms:
    """Give the norm of each gradient at these locations. With ``reduce``, add up those of replicated parameters first."""

    locations: tuple[TensorLocation, ...]
    norm_type: float
    reduce: bool


@dataclass(frozen=True)
class Initialize:
    """Have the modules make the tensors with these names, the user's, at these locations, one for each copy on the worker.

    ``model`` is the model, in which a name stands for each of the tensors, and the function that initializes its modules. The
    answer lists the names of those that nothing has written.
    """

    model: Pickled
    tensors: Mapping[str, Sequence[TensorLocation]]
    seed: int


@dataclass(frozen=True)
class ElsewhereTensor:
    """Stands for a tensor of the model that is not to be made on this worker, and has no numbers there."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_parameter: bool


@dataclass(frozen=True)
class ScaleGradients:
    """Multiply all gradients by a number."""

    factor: float


@dataclass(frozen=True)
class ClampGradients:
    """Clamp every element of all gradients between -limit and limit, after adding up those of copies if need be."""

    limit: float
    reduce: bool


@dataclass(frozen=True)
class MakeOptimizer:
    """Make an optimizer, and keep it under a number. A group has the locations of its parameters, and its options.

    With ``master_dtype`` the optimizer has copies of that dtype of the parameters that have another. If there are replicas of
    the pipeline, ``names`` are those of all its parameters, and ``divided`` says that each worker has the state of those
    alone whose gradients it adds up; it sends them to the others.
    """

    optimizer: int
    factory: Pickled
    groups: tuple[tuple[tuple[TensorLocation, ...], Mapping[str, Any]], ...]
    master_dtype: torch.dtype | None = None
    names: tuple[str, ...] = ()
    divided: bool = False


@dataclass(frozen=True)
class OptimizerStep:
    """Run an optimizer's step. ``groups`` has the options of each group, or None if they did not change."""

    optimizer: int
    groups: tuple[Mapping[str, Any], ...] | None
    reduce: bool


@dataclass(frozen=True)
class OptimizerState:
    """Give an optimizer's state for the parameters at these locations."""

    optimizer: int
    locations: tuple[TensorLocation, ...]


@dataclass(frozen=True)
class LoadOptimizerState:
    """Replace an optimizer's state."""

    optimizer: int
    state: Mapping[TensorLocation, Mapping[str, Any]]


@dataclass(frozen=True)
class WriteState:
    """Write what the worker holds to files in a folder, and give a `WrittenState`.

    ``tensors`` has the locations of parameters and buffers, by their names in ``file``. ``optimizers`` has for each
    optimizer, by its number, its file and the locations of its parameters. With ``copy``, copy all that, and write it while
    other commands run: `AskWritten` asks what became of it.
    """

    file: str
    folder: str
    tensors: Mapping[str, TensorLocation]
    tied: Mapping[str, str]
    optimizers: Mapping[int, tuple[str, Mapping[str, TensorLocation]]]
    copy: bool


@dataclass(frozen=True)
class WrittenState:
    """What a worker has written. ``others`` has what is no tensor of the states of optimizers, by their numbers and by the
    names of parameters; ``random`` the state of the worker's random numbers."""

    files: tuple[WrittenFile, ...]
    others: Mapping[int, Mapping[str, Mapping[str, Any]]]
    random: Mapping[str, Any]


@dataclass(frozen=True)
class AskWritten:
    """Urgent: give the `WrittenState` of what a driver's worker writes, a `Failure`, or None while it is under way."""

    driver: int


@dataclass(frozen=True)
class ReadState:
    """Read tensors from files, and keep them beside those that the worker has, until `TakeState`.

    ``tensors`` has where each parameter and buffer is read from; ``optimizers`` so for each item of the states of optimizers.
    """

    tensors: Mapping[TensorLocation, StoredTensor]
    optimizers: Mapping[int, Mapping[TensorLocation, Mapping[str, StoredTensor]]]


@dataclass(frozen=True)
class TakeState:
    """Take what was read, or drop it. ``others`` has what is no tensor of the states of optimizers."""

    take: bool
    others: Mapping[int, Mapping[TensorLocation, Mapping[str, Any]]] = field(default_factory=dict)
    random: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class KeepState(NeedsPeers):
    """Copy what the worker holds, send the copy to worker ``to``, and keep that of worker ``of`` beside it.

    Copies of other points than ``before`` are dropped.
    """

    point: int
    before: int | None
    to: int
    of: int

    def peers(self, worker: int) -> set[int]:
        """The neighbours."""
        return {self.to, self.of} - {worker}


@dataclass(frozen=True)
class TakeKept(NeedsPeers):
    """Go back to a point: send copies that others lack, and take those that this worker lacks.

    ``sends`` and ``receives`` have whose copy it is, and where it goes, or comes from.
    """

    point: int
    sends: tuple[tuple[int, int], ...]
    receives: tuple[tuple[int, int], ...]

    def peers(self, worker: int) -> set[int]:
        """Those that copies go to, and come from."""
        return {other for _, other in (*self.sends, *self.receives)} - {worker}


@dataclass(frozen=True)
class GiveUp:
    """Urgent: give up those of the commands from ``first`` to ``last`` that are not done yet."""

    first: int
    last: int


@dataclass(frozen=True)
class Dump:
    """Urgent: say what the worker is doing, or waiting for."""


@dataclass(frozen=True)
class Ping:
    """Urgent: answer anything, to show that the worker lives."""


@dataclass(frozen=True)
class Connect:
    """Urgent: give two workers a connection with each other. Both are of this worker's host, or one is this worker."""

    one: int
    other: int


@dataclass(frozen=True)
class Invite:
    """Urgent, from worker ``guest`` of another host: open a door for it. The answer is an Invitation, or None."""

    guest: int


@dataclass(frozen=True)
class Failure:
    """What went wrong on a worker. ``peer`` is another worker that seems to be dead, if that is the reason."""

    message: str
    traceback: str
    where: str = ""
    instruction: str = ""
    stage: int | None = None
    microbatch: int | None = None
    peer: int | None = None


@dataclass(frozen=True)
class Answer:
    """The answer to a command: a value, or what went wrong."""

    value: Any = None
    failure: Failure | None = None
