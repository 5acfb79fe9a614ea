"""A Pipe whose stages have their workers: where everything is, and what each worker is sent."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, count, groupby
from typing import Any

import torch
from torch import fx, nn

from pippy.drivers.base.errors import DriverError, PackingError
from pippy.drivers.lowering.flow import Work, loss_stage, outputs_of, value_names
from pippy.drivers.lowering.lower import Lowered
from pippy.drivers.plan.language.exchanges import ExchangeProgram
from pippy.drivers.plan.language.instructions import NOTES, Payload
from pippy.drivers.plan.language.placement import Placement
from pippy.drivers.plan.language.program import Program, computations_of
from pippy.drivers.plan.passes.communicate import exchange
from pippy.drivers.protocol.compile_options import CompileOptions
from pippy.drivers.protocol.programs import AddProgram, CallForm, InputIndex, Load, OutOfOrderLimits
from pippy.drivers.protocol.state import GradientBucket, NamedHooks, ReplicatedParameter, TensorLocation, WorkerHooks
from pippy.drivers.protocol.steps import StageFlags, StageSettings
from pippy.drivers.wire.pickling import Pickled, pickle_by_value
from pippy.ir.base.names import named_state, stage_index
from pippy.ir.pipe import Pipe
from pippy.ir.record.compiled import Compiled, map_nodes
from pippy.ir.record.reached import reached_by
from pippy.ir.run.copies import GradientHooks
from pippy.ir.run.in_place import get_tensor
from pippy.ir.run.key_value_cache import extended_cache

# Which worker adds up the gradients of which parameters, and what goes in one message.


BUCKET_BYTES = 8 << 20  # a message has no more, unless one parameter has

Sized = tuple[ReplicatedParameter, int]


def gradient_buckets(parameters: Sequence[ReplicatedParameter], sizes: Mapping[str, int]) -> tuple[GradientBucket, ...]:
    """Divide parameters into buckets. All workers with copies add up about as many bytes. ``sizes`` are the bytes by name.

    Parameters of different stages are in different buckets, as their gradients are complete at different times.

    >>> from pippy.drivers.protocol.state import TensorLocation
    >>> places = {name: TensorLocation(f"submod_{stage}", name) for name, stage in [("a", 0), ("b", 0), ("c", 0), ("d", 2)]}
    >>> parameters = [ReplicatedParameter(name, ((0, place), (2, place))) for name, place in places.items()]
    >>> buckets = gradient_buckets(parameters, {"a": 100, "b": 300, "c": 200, "d": 50})
    >>> [(bucket.owner, [each.name for each in bucket.parameters]) for bucket in buckets]
    [(0, ['b']), (2, ['a', 'c']), (0, ['d'])]
    """
    by_stages: dict[tuple[Any, ...], list[Sized]] = {}
    for each in parameters:
        key = tuple(worker for worker, _ in each.copies), tuple(place.call for _, place in each.copies)
        by_stages.setdefault(key, []).append((each, sizes[each.name]))
    loads: dict[tuple[int, ...], dict[int, int]] = {}  # for the same workers, the bytes that each of them adds up
    return tuple(
        GradientBucket(owner, bucket)
        for (workers, _), sized in by_stages.items()
        for owner, parts in _divided(sized, loads.setdefault(workers, dict.fromkeys(workers, 0))).items()
        for bucket in _filled(parts)
    )


def _divided(sized: Sequence[Sized], loads: dict[int, int]) -> dict[int, list[Sized]]:
    """The parameters that each worker adds up: the largest first, each to the worker that has the least so far."""
    owners: dict[str, int] = {}
    for each, size in sorted(sized, key=lambda pair: -pair[1]):
        owners[each.name] = owner = min(loads, key=loads.__getitem__)
        loads[owner] += size
    return {worker: [pair for pair in sized if owners[pair[0].name] == worker] for worker in loads}


def _filled(sized: Iterable[Sized]) -> Iterator[tuple[ReplicatedParameter, ...]]:
    """The parameters of one worker in buckets, in their order."""
    full = total = 0
    numbered = []
    for each, size in sized:
        if total and total + size > BUCKET_BYTES:
            full, total = full + 1, 0
        total += size
        numbered.append((full, each))
    for _, bucket in groupby(numbered, key=lambda pair: pair[0]):
        yield tuple(each for _, each in bucket)


# Who sends which updated parameters to whom, for an optimizer whose state is divided among replicas of the pipeline.


def passing_on(buckets: Iterable[GradientBucket], names: Container[str]) -> ExchangeProgram:
    """The program that follows an update of the parameters with these names: who adds up their gradients updates them.

    >>> from pippy.drivers.protocol.state import ReplicatedParameter
    >>> buckets = [GradientBucket(2, (ReplicatedParameter("weight", ((0, "here"), (2, "there"))),), "stage 0 part 1")]
    >>> print(passing_on(buckets, {"weight"}))
    exchange parameters
    worker 0
      receive parameters of stage 0 part 1 from 2
    worker 2
      send parameters of stage 0 part 1 to 0
    """
    own = [bucket for bucket in buckets if any(each.name in names for each in bucket.parameters)]
    moved = dict.fromkeys((each.sum, each.owner, to) for each in own for to in each.workers if to != each.owner)
    return exchange("parameters", Payload.PARAMETERS, moved)


class PlacedPipe:
    """A Pipe whose stages are placed on workers. ``ranks`` has the worker of the cluster for each stage.

    ``compile`` says how the stages are to be compiled, if they are. ``further`` has the ranks of each further replica of the
    pipeline. ``graph`` is the number of the graph of the model: 0 for the Pipe's own.
    """

    def __init__(
        self,
        compiled: Compiled,
        ranks: Sequence[int],
        compile: CompileOptions | None = None,
        further: Iterable[Sequence[int]] = (),
        graph: int = 0,
        buckets: tuple[GradientBucket, ...] | None = None,
    ) -> None:
        self.compiled, self.compile, self.graph = compiled, compile, graph
        self.settings: dict[str, StageSettings] = {}  # of each stage, that the script has changed
        self.place([ranks, *further])
        if buckets is not None:  # those of another graph
            self.buckets = buckets
        self.loss_stage = loss_stage(compiled)
        self.nodes = {str(node.target): node for node in compiled.split_gm.graph.find_nodes(op="call_module")}

    def place(self, replicas: Iterable[Sequence[int]]) -> None:
        """Place the stages on these workers: that of each stage, for each replica."""
        self.replicas = tuple(map(tuple, replicas))
        for name in ("replicated", "buckets", "_owners"):
            vars(self).pop(name, None)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The worker for each stage, in the first replica."""
        return self.replicas[0]

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers that hold a stage, those of each replica after those of the one before it."""
        return tuple(dict.fromkeys(chain(*self.replicas)))

    def worker_of(self, call: str) -> int:
        """The worker that holds a stage, or `_loss`; of the first replica."""
        return self.workers_of(call)[0]

    def workers_of(self, call: str) -> list[int]:
        """The worker of each replica that holds a stage, or `_loss`."""
        index = stage_index(call)
        return [ranks[self.loss_stage if index is None else index] for ranks in self.replicas]

    def calls_on(self, worker: int) -> list[str]:
        """The stages that a worker holds, and `_loss`."""
        return [call for call in self.nodes if worker in self.workers_of(call)]

    def loads(self, workers: Iterable[int] | None = None) -> dict[int, Load]:
        """For each worker, or for those given, the message with its stages."""
        seed = torch.initial_seed() % 2**62
        return {worker: self._load(worker, seed) for worker in (self.workers if workers is None else workers)}

    def _load(self, worker: int, seed: int) -> Load:
        calls = self.calls_on(worker)
        for call in calls:
            self._check_reached(call)
        constant = self.compiled.qualnames.read_by_several
        return Load(
            modules=self._pickled(calls),
            constant={call: tuple(constant[call]) for call in calls if call in constant},
            buckets=self.buckets,
            seed=seed,
            compile=None if self.compile is None else pickle_by_value(self.compile),
            replicas=len(self.replicas) > 1,
        )

    def _pickled(self, calls: Sequence[str]) -> Pickled:
        """Stages, as one worker gets them. Where they reach a tensor of the model by a plain reference, the worker has the one
        that it holds, or a copy that it holds; a tensor of other workers cannot be read there."""
        modules = {call: self.compiled.stage(call) for call in calls}
        here = {id(tensor) for module in modules.values() for _, tensor in named_state(module)}
        held: dict[int, Any] = {}
        for key, name in self._names.items():
            if key not in here:
                places = (place for place in self.compiled.stage_qualnames(name) if place.partition(".")[0] in modules)
                held[key] = next((get_tensor(self.compiled.split_gm, place) for place in places), name)
        return pickle_by_value(modules, held, self._empty_ids, own={*here, *held})

    def _check_reached(self, call: str) -> None:
        """Raise if a stage, or the loss, reaches a parameter that it does not hold: by a hook that came after `pipeline()`."""
        for each in reached_by(self.compiled.stage(call), call):
            name = self._names.get(id(each.value)) if isinstance(each.value, nn.Parameter) else None
            if name is not None and not any(p.startswith(f"{call}.") for p in self.compiled.stage_qualnames(name)):
                raise DriverError(
                    f"{each} is {name!r}, which {call} does not hold, because the code that reaches it came after pipeline(); "
                    "call pipeline() again"
                )

    @cached_property
    def _names(self) -> Mapping[int, str]:
        """The names of the model's own parameters and buffers, not of copies of them, by their ids."""
        names, top = self.compiled.qualnames, self.compiled.split_gm
        held = {id(get_tensor(top, places[0])): name for name, places in names.places.items()}
        return {**held, **{id(tensor): name for name, tensor in names.unused.items()}}

    @cached_property
    def empty(self) -> frozenset[str]:
        """The tensors of the model that are on the meta device and have no numbers, by the user's names."""
        places = self.compiled.qualnames.places
        return frozenset(name for name, found in places.items() if get_tensor(self.compiled.split_gm, found[0]).is_meta)

    @cached_property
    def _empty_ids(self) -> frozenset[int]:
        places = self.compiled.qualnames.places
        return frozenset(id(get_tensor(self.compiled.split_gm, place)) for name in self.empty for place in places[name])

    @cached_property
    def value_names(self) -> dict[fx.Node, str]:
        """The name of each value of the top-level graph."""
        return value_names(self.compiled)

    @cached_property
    def replicated(self) -> tuple[ReplicatedParameter, ...]:
        """The parameters with copies, and where the copies are. With replicas of the pipeline, all parameters have copies."""
        groups = [
            tuple(TensorLocation(call, name) for call, name in each.items()) for each in self.compiled.replicated_params
        ]
        if len(self.replicas) > 1:
            copied = {place for group in groups for place in group}
            groups += [(place,) for place in self._parameter_places() if place not in copied]
        return tuple(map(self._copies, groups))

    @cached_property
    def buckets(self) -> tuple[GradientBucket, ...]:
        """The parameters with copies, in buckets. Those of a bucket are added up together. One that several stages have is in
        a bucket of its own."""
        shared = [each for each in self.replicated if len(each.copies) > len(self.replicas)]
        alone = [each for each in self.replicated if len(each.copies) == len(self.replicas)]
        sizes = {}
        for each in alone:
            place = each.copies[0][1]
            tensor = get_tensor(self.compiled.stage(place.call), place.name)
            sizes[each.name] = tensor.numel() * tensor.element_size()
        parts = []
        for bucket in gradient_buckets(alone, sizes):
            index = stage_index(bucket.parameters[0].copies[0][1].call)
            part = bucket.workers.index(bucket.owner)
            parts.append(replace(bucket, sum=f"stage {self.loss_stage if index is None else index} part {part}"))
        return (*(GradientBucket(each.copies[0][0], (each,), each.name) for each in shared), *parts)

    def _parameter_places(self) -> Iterator[TensorLocation]:
        """Where each parameter is."""
        for call in self.nodes:
            for name, _ in self.compiled.stage(call).named_parameters():
                yield TensorLocation(call, name)

    def _copies(self, places: Sequence[TensorLocation]) -> ReplicatedParameter:
        """The copies at these places, in every replica."""
        call, local = places[0].call, places[0].name
        name = self.compiled.remap_qualname(f"{call}.{local}")
        by_replica = zip(*(self.workers_of(place.call) for place in places))
        copies = [(worker, place) for workers in by_replica for worker, place in zip(workers, places)]
        return ReplicatedParameter(self.compiled.qualnames.canonical.get(name, name), tuple(copies))

    def loss_call(self, lowered: Lowered) -> tuple[str, Work]:
        """The name of the value that is the loss, or contains it, and the call that computes it."""
        assert self.compiled.loss is not None
        name = next(name for node, name in self.value_names.items() if node.name == self.compiled.loss.value)
        calls = (call for key, calls in lowered.work.items() if key.phase == "F" for call in calls)
        return name, next(call for call in calls if name in call.gives)

    def returns(self, values: Mapping[fx.Node, Any]) -> dict[int, dict[str, Any]]:
        """Sort ``values`` by the worker that makes each: by its rank, then by name."""
        by_worker: dict[int, dict[str, Any]] = {worker: {} for worker in self.workers}
        for call, node in self.nodes.items():
            for value in outputs_of(node):
                for worker in self.workers_of(call) if value in values else ():
                    by_worker[worker][self.value_names[value]] = values[value]
        return by_worker

    def locations(self, name: str) -> list[tuple[int, TensorLocation]]:
        """The worker and location of each copy of a parameter or buffer of the user's, those of the first replica first.
        Empty if no stage uses it."""
        found = []
        for qualname in self.compiled.stage_qualnames(name):
            call, _, local = qualname.partition(".")
            found.append([(worker, TensorLocation(call, local)) for worker in self.workers_of(call)])
        return [copy for copies in zip(*found) for copy in copies]

    @cached_property
    def _owners(self) -> dict[str, int]:
        """The worker that adds up the gradients of each parameter with copies."""
        return {each.name: bucket.owner for bucket in self.buckets for each in bucket.parameters}

    def owned(self, name: str) -> list[tuple[int, TensorLocation]]:
        """The worker and location of the copies on the worker that adds up the gradients of this parameter."""
        owner = self._owners.get(self.compiled.qualnames.canonical.get(name, name))
        return [copy for copy in self.locations(name) if owner is None or copy[0] == owner]

    def owned_by_stage(self) -> dict[int, dict[int, frozenset[str]]]:
        """The names of the parameters whose gradients each worker adds up, by worker and stage."""
        by_worker: dict[int, dict[int, set[str]]] = {worker: {} for worker in self.workers}
        for bucket in self.buckets:
            for each in bucket.parameters:
                for worker, place in each.copies:
                    if worker == bucket.owner:
                        index = stage_index(place.call)
                        stage = self.loss_stage if index is None else index
                        by_worker[worker].setdefault(stage, set()).add(each.name)
        return {
            worker: {stage: frozenset(names) for stage, names in stages.items()} for worker, stages in by_worker.items()
        }

    def first_locations(self, names: Iterable[str], owned: bool = False) -> dict[int, dict[str, TensorLocation]]:
        """Where to read these parameters and buffers, one copy of each, by worker. With ``owned``, it is that on the worker
        which adds up the gradients."""
        found: dict[int, dict[str, TensorLocation]] = {}
        for name in names:
            for worker, location in (self.owned if owned else self.locations)(name)[:1]:
                found.setdefault(worker, {})[name] = location
        return found

    def for_all_copies(self, values: Mapping[str, Any], owned: bool = False) -> dict[int, dict[TensorLocation, Any]]:
        """Give the value of each name to each copy of this parameter or buffer, by worker and location. With ``owned``, only to
        copies on the worker that adds up the gradients."""
        found: dict[int, dict[TensorLocation, Any]] = {worker: {} for worker in self.workers}
        for name, value in values.items():
            for worker, location in (self.owned if owned else self.locations)(name):
                found[worker][location] = value
        return found

    def ranks_of(self, program: Program) -> tuple[int, ...]:
        """The worker of the cluster for each worker of a program."""
        placement, replicas = program.placement, self.replicas[: program.replicas]  # a trial has the first one only
        return tuple(ranks[placement.stages_of(worker)[0]] for ranks in replicas for worker in range(placement.workers))

    def programs(
        self, number: int, lowered: Lowered, single_loss: bool, out_of_order: bool | int = False
    ) -> dict[int, AddProgram]:
        """Each worker's part of a program. ``out_of_order`` is what the driver was given."""
        placement, shares = lowered.program.placement, lowered.program.shares
        ranks = self.ranks_of(lowered.program)
        values = [*(edge.value for edge in lowered.program.flow), NOTES]
        return {
            rank: AddProgram(
                program=number,
                order=order,
                work=(work := dict(_own_work(lowered, order))),
                calls={each.call: self.call_of(each.call) for calls in work.values() for each in calls},
                value_numbers={name: number for number, name in enumerate(values, 2 * len(self.buckets))},
                ranks=ranks,
                worker=worker,
                returns=tuple(name for name, maker in lowered.outputs.items() if maker == worker % placement.workers),
                single_loss=single_loss,
                share=shares[worker // placement.workers],
                out_of_order=None if out_of_order is False else _limits(placement, worker, out_of_order),
                slices=lowered.program.slices if self.keeps_keys else 0,
                graph=self.graph,
            )
            for worker, (rank, order) in enumerate(zip(ranks, lowered.program.orders))
        }

    @cached_property
    def keeps_keys(self) -> bool:
        """Whether its stages keep keys and values, from one slice of a sequence or one token to the next."""
        return any(
            stage.graph.find_nodes(op="call_function", target=extended_cache) for _, stage in self.compiled.stages()
        )

    def call_of(self, call: str) -> CallForm:
        """How the graph calls a stage. What is not in the graph takes its inputs as they are."""
        args = self.nodes[call].args if call in self.nodes else ()
        seen = self.compiled.seen_inputs.get(call, ())
        if all(isinstance(arg, fx.Node) for arg in args):
            return CallForm(call, seen=seen)
        numbers = count()
        return CallForm(call, map_nodes(lambda node: InputIndex(next(numbers)), args), seen)

    def flags(self) -> dict[int, dict[str, StageFlags]]:
        """The flags of all modules and parameters, by worker and stage."""
        return {worker: {call: self._flags(call) for call in self.calls_on(worker)} for worker in self.workers}

    def _flags(self, call: str) -> StageFlags:
        return StageFlags(
            tuple([each.training for each in self._modules[call]]),
            tuple([each.requires_grad for each in self._parameters[call]]),
            self.settings.get(call),
        )

    def set(self, settings: Mapping[str, Mapping[tuple[int, str], Any]]) -> None:
        """Have `flags` tell the workers these values of attributes, by stage, number of the module, and name."""
        self.settings = {}
        for call, values in settings.items():
            data, tensors = pickle_by_value(values)
            self.settings[call] = StageSettings(Pickled(data, [each.clone() for each in tensors]))

    @cached_property
    def model_parameters(self) -> dict[TensorLocation, torch.Tensor]:
        """The parameters of all stages by their locations. In place of a copy it has the parameter of the model."""
        return {
            TensorLocation(call, name): own
            for call in self.nodes
            for (name, _), own in zip(self.compiled.stage(call).named_parameters(), self._parameters[call], strict=True)
        }

    @cached_property
    def _modules(self) -> dict[str, list[nn.Module]]:
        """All modules of each stage, as they were when the stages were sent."""
        return {call: list(self.compiled.stage(call).modules()) for call in self.nodes}

    @cached_property
    def _parameters(self) -> dict[str, list[torch.Tensor]]:
        """The parameters of each stage; the model's own in place of copies, which take its values only when the Pipe runs."""
        owners = {id(copy): owner for owner, *copies in self.compiled.copies() for copy in copies}
        return {
            call: [owners.get(id(each), each) for each in self.compiled.stage(call).parameters()] for call in self.nodes
        }


def _limits(placement: Placement, worker: int, out_of_order: bool | int) -> OutOfOrderLimits:
    to_pass = placement.worker_of[placement.stages_of(worker % placement.workers)[0] :]
    return OutOfOrderLimits(None if out_of_order is True else out_of_order, depth=len(set(to_pass)))


def _own_work(lowered: Lowered, order: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    stages = {each.stage for each in computations_of(order)}
    for key, work in lowered.work.items():
        if key.stage in stages:
            yield key, work


# The hooks on the gradients of a driver's parameters: which worker calls them, and what it is told.


class PlacedHooks:
    """What the workers of a driver are told of the hooks that its parameters have now.

    A hook runs where a gradient is complete: on the worker of its parameter, or on the worker that adds up the gradients of
    copies. It is sent by value. A parameter or buffer that it holds is the worker's own; one of another worker has no numbers.

    >>> from torch import nn
    >>> from pippy.ir.pipe import compiled_of
    >>> pipe = Pipe.from_sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    >>> hooks = PlacedHooks(pipe, PlacedPipe(compiled_of(pipe), [0, 1]))
    >>> handle = pipe.get_parameter("1.bias").register_hook(lambda gradient: gradient * 2)
    >>> [list(each.places) for each in hooks.now().values()]
    [[], [TensorLocation(call='submod_1', name='1.bias')]]
    """

    def __init__(self, pipe: Pipe, placed: PlacedPipe) -> None:
        self.pipe, self.placed = pipe, placed
        self._adds_up = {
            place: bucket.owner for bucket in placed.buckets for each in bucket.parameters for _, place in each.copies
        }
        self._now: Mapping[int, WorkerHooks] = {}

    def now(self) -> Mapping[int, WorkerHooks]:
        """What each worker is told; the same object as before if no hook has changed. Raises if a hook cannot be sent.

        The objects that a hook holds may have changed, so it is pickled each time.
        """
        hooks_by_place = {place: NamedHooks(self._name(place), hooks) for place, hooks in self._hooked().items()}
        if hooks_by_place or self._now:
            told = {worker: self._of_worker(worker, hooks_by_place) for worker in self.placed.workers}
            if told.keys() != self._now.keys() or not all(each.is_like(self._now[at]) for at, each in told.items()):
                self._now = told
        return self._now

    def of_copies(self, hooks: Mapping[int, WorkerHooks]) -> bool:
        """Whether a parameter with copies has a hook."""
        return any(place in self._adds_up for each in hooks.values() for place in each.places)

    def _hooked(self) -> dict[TensorLocation, GradientHooks]:
        found = {place: GradientHooks.of(tensor) for place, tensor in self.placed.model_parameters.items()}
        return {place: hooks for place, hooks in found.items() if hooks}

    def _name(self, place: TensorLocation) -> str:
        return self.placed.compiled.remap_qualname(f"{place.call}.{place.name}")

    def _of_worker(self, worker: int, own: Mapping[TensorLocation, NamedHooks]) -> WorkerHooks:
        here = {place: each for place, each in own.items() if worker in self.placed.workers_of(place.call)}
        called = {place: each for place, each in here.items() if self._adds_up.get(place, worker) == worker}
        places = {place: bool(each.hooks.after_accumulation) for place, each in here.items()}
        return WorkerHooks(places, self._pickled(called, worker) if called else None)

    def _pickled(self, hooks: Mapping[TensorLocation, NamedHooks], worker: int) -> Pickled:
        held = {id(tensor): self._stands_for(name, worker) for name, tensor in named_state(self.pipe)}
        own = {*held, *(id(each.value) for each in reached_by(hooks, "hooks"))}
        try:
            data, tensors = pickle_by_value(hooks, held, refused=(torch.optim.Optimizer,), own=own)
        except PackingError as error:
            raise DriverError(
                f"{', '.join(repr(each.name) for each in hooks.values())}: a gradient hook runs on the worker that "
                f"holds the parameter, but one of these hooks cannot be sent there: {error}. A hook is sent with "
                "all objects that it refers to; let it refer to numbers and tensors only. To update parameters, "
                "use driver.instantiate_optimizer"
            ) from error
        return Pickled(data, [each.clone() for each in tensors])  # the script may change its own

    def _stands_for(self, name: str, worker: int) -> TensorLocation | str:
        return next((place for at, place in self.placed.locations(name) if at == worker), name)
