"""Which operations must be in one stage, and why. This is the only list of these rules.

The balancer cuts where no constraint forbids it. The splitter raises the refusal of a constraint that a mark cuts apart.

    these operations must be in one stage                    because
    ─────────────────────────────────────────────────────    ───────────────────────────────────────────────────────────
    the uses of a buffer that a module changes when called   each stage would change a copy of its own
    the uses of a tensor up to its change in place, and      a stage sees no change that a later stage makes, and no
      all modules that hold it                                 module takes the changed tensor as a value
    the uses of tensors that share memory, and its change    stages have memory of their own
    the uses of an input, and its change in place            every stage gets the input as it was given
    what makes a value, and what changes it in place         between stages a value is a copy
    the uses of a parameter, up to the last module that      a module cannot take a parameter as a value, so it cannot be
      holds it, if the user forbids copies                     transmitted
    what torch.utils.checkpoint runs                         a backward runs it again, in one stage
    what torch.autograd.grad differentiates, and all that    a stage has an autograd graph of its own, which ends at
      lies between that and what it is differentiated by       what the stage was given

A stage may change a value that an earlier stage made, if nobody else relies on the change: then the stage takes a copy first.
The constraint says so by a refusal that is None for such marks; the balancer avoids the copy all the same.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import fx, nn

from pippy.ir.base.errors import PippyError, SharedParameterError, SplitError
from pippy.ir.base.marks import pipe_split
from pippy.ir.base.names import stage_name
from pippy.ir.base.source import excerpt_of
from pippy.ir.cut.effects import Mutation, find_mutations
from pippy.ir.cut.params import MultiUseParameterConfig, MultiUseParamSpec, TensorUses, config_by_tensor
from pippy.ir.cut.uses import is_constant, operations, running_statistics, uses_of_tensors
from pippy.ir.cut.ways import inner_gradients
from pippy.ir.record.compiled import Traced
from pippy.ir.run.checkpointed_parts import Part, parts_of
from pippy.ir.run.in_place import memory_of

OUT_OF_FORWARD = (
    "; or take the change out of forward, and make it between steps, in this process: driver.copy_to(model), the change, "
    "driver.load_state_dict(model.state_dict())"
)
Stages = Sequence[int]  # the stage of each operation


def _never(_: Stages) -> None:
    """The refusal of a constraint that only the balancer knows of."""


@dataclass(frozen=True)
class Constraint:
    """The operations from number ``first`` to number ``last`` must be in one stage, and why.

    ``refusal`` takes the stage of each operation, and gives the error for stages that cut them apart; None if these stages
    are possible.
    """

    first: int
    last: int
    why: str
    refusal: Callable[[Stages], PippyError | None] = _never

    def is_cut(self, stages: Stages) -> bool:
        """Whether the operations are in more than one stage."""
        return stages[self.first] != stages[self.last]


def constraints(traced: Traced, spec: MultiUseParamSpec = None, changed: Collection[int] = ()) -> list[Constraint]:
    """The constraints on where a traced graph is cut.

    ``changed`` has ids of tensors that some module was seen to change when it ran, which no graph shows.
    """
    search = _Constraints(traced, spec, changed)
    every = [
        *search.of_buffers_that_modules_change(),
        *search.of_tensors_changed_in_place(),
        *search.of_tensors_that_share_memory(),
        *search.of_tensors_that_only_travel(),
        *search.of_values_changed_in_place(),
        *search.of_checkpointed_parts(),
        *search.of_gradients(),
    ]
    return [each for each in every if each.first < each.last]


def check_constraints(traced: Traced, stages: Stages, spec: MultiUseParamSpec = None) -> None:
    """Raise the refusal of the first constraint that these stages cut apart."""
    for constraint in constraints(traced, spec):
        refusal = constraint.refusal(stages) if constraint.is_cut(stages) else None
        if refusal is not None:
            raise refusal


class _Constraints:
    """The rules, one method each."""

    def __init__(self, traced: Traced, spec: MultiUseParamSpec, changed: Collection[int]) -> None:
        self.traced, self.spec = traced, spec
        self.nodes = operations(traced)
        self.number = {node: index for index, node in enumerate(self.nodes)}
        self.uses = uses_of_tensors(traced)
        self.config = config_by_tensor(traced.model, spec)
        self.changed_by_modules = {*changed, *running_statistics(_modules(traced))}
        self.mutations, self.roots = find_mutations(traced.graph, traced.attributes)
        self.changed_by_nodes = {
            id(traced.attributes[str(each.root.target)]) for each in self.mutations if each.root.op == "get_attr"
        }

    def of_buffers_that_modules_change(self) -> Iterator[Constraint]:
        for key, uses in self.uses.items():
            if uses.by_leaf and key in self.changed_by_modules:
                why = f"a module changes {uses.name} at each call"
                yield Constraint(uses.all[0], uses.all[-1], why, self._refused_statistics(uses))

    def of_tensors_changed_in_place(self) -> Iterator[Constraint]:
        for mutation in self.mutations:
            if mutation.root.op == "get_attr":
                at, uses = self.number[mutation.node], self.uses[id(self.traced.attributes[str(mutation.root.target)])]
                first, last = min([at, *uses.all]), max([at, *uses.by_leaf])
                yield Constraint(first, last, _changes(mutation), self._refused_writer(uses, mutation))

    def of_tensors_that_share_memory(self) -> Iterator[Constraint]:
        family: dict[int | None, list[TensorUses]] = {}
        for uses in self.uses.values() if self.changed_by_nodes else ():
            family.setdefault(memory_of(uses.tensor), []).append(uses)
        for mutation in self.mutations:
            if mutation.root.op == "get_attr":
                memory = memory_of(self.traced.attributes[str(mutation.root.target)])
                sharing = family[memory] if memory is not None else []
                if len(sharing) > 1:
                    users = [self.number[mutation.node], *(user for uses in sharing for user in uses.all)]
                    yield Constraint(min(users), max(users), _changes(mutation), _refused_views(sharing, mutation))

    def of_tensors_that_only_travel(self) -> Iterator[Constraint]:
        for key, uses in self.uses.items():
            if not uses.by_leaf or key in self.changed_by_nodes:
                continue
            chosen, first, last = self.config.get(key), uses.all[0], uses.by_leaf[-1]
            if chosen is not None and chosen[1] is MultiUseParameterConfig.TRANSMIT:
                why = f"{uses.name} is to be transmitted, out of a leaf module"
                yield Constraint(first, last, why, _refused_transmission(uses, chosen[0]))

    def of_values_changed_in_place(self) -> Iterator[Constraint]:
        for mutation in self.mutations:
            root, at = mutation.root, self.number[mutation.node]
            if is_constant(root):  # each call of the model begins with the same numbers, so the change does not last
                users = [at, *self.uses[id(self.traced.attributes[str(root.target)])].all]
            elif root.op == "get_attr":
                continue
            elif root.op == "placeholder":
                users = [at, *(self.number[user] for user in root.users if user in self.number)]
            else:
                users = [at, self.number[root]]
            yield Constraint(min(users), max(users), _changes(mutation), self._refused_change(mutation))

    def of_checkpointed_parts(self) -> Iterator[Constraint]:
        for part in parts_of(list(self.traced.graph.nodes)):
            why = "torch.utils.checkpoint runs them again in the backward"
            yield Constraint(self.number[part.begin], self.number[part.end], why, _refused_mark(part))

    def of_gradients(self) -> Iterator[Constraint]:
        for call, way in inner_gradients(self.traced):
            why = f"{call.name} differentiates what they compute"
            yield Constraint(way[0], way[-1], why, self._refused_way(call, self.nodes[way[0]]))

    def _refused_statistics(self, uses: TensorUses) -> Callable[[Stages], PippyError]:
        def refusal(stages: Stages) -> PippyError:
            callers: dict[str, set[int]] = {}
            for index in uses.by_leaf:
                callers.setdefault(str(self.nodes[index].target), set()).add(stages[index])
            path = next((path for path, calling in callers.items() if len(calling) > 1), None)
            if path is None:
                return SharedParameterError(
                    f"{uses.name!r} is changed by a module at each call, and {_users(uses, stages)} use it: their copies "
                    "would drift apart. Move the split so that one stage makes every use, or give each use a buffer of "
                    "its own"
                )
            users = ", ".join(map(stage_name, sorted(callers[path])))
            return SharedParameterError(
                f"{path!r} ({type(self.traced.attributes[path]).__name__}) updates its running statistics at each call, and "
                f"{users} all call it: their copies would drift apart. Move the split so that one stage makes every call, or "
                "give each call a module of its own"
            )

        return refusal

    def _refused_writer(self, uses: TensorUses, mutation: Mutation) -> Callable[[Stages], PippyError | None]:
        """A tensor that changes in place can be followed only from the first stage that uses it to later ones."""

        def refusal(stages: Stages) -> PippyError | None:
            if is_constant(mutation.root) and len({stages[index] for index in uses.all}) < 2:
                return None
            return SharedParameterError(
                f"{uses.name!r} is changed in place in {stage_name(stages[self.number[mutation.node]])} and used in "
                f"{_users(uses, stages)}: each stage works on another micro-batch, so they cannot see each other's change.\n"
                f"{excerpt_of(mutation.node)}\n"
                "What to do: move the split so that one stage holds every use, or use it only at and after the stage that "
                "changes it, outside of leaf modules" + OUT_OF_FORWARD * isinstance(uses.tensor, nn.Parameter)
            )

        return refusal

    def _refused_change(self, mutation: Mutation) -> Callable[[Stages], PippyError | None]:
        """A stage may change what it was given only where nobody else relies on seeing, or not seeing, the change."""
        family = [node for node, roots in self.roots.items() if mutation.root in roots]

        def refusal(stages: Stages) -> PippyError | None:
            def stage_of(node: fx.Node) -> int | None:
                return stages[self.number[node]] if node in self.number else None

            here = stages[self.number[mutation.node]]
            if stage_of(mutation.root) == here:
                return None
            foreign = [value for value in family if stage_of(value) != here]
            received = [value for value in foreign if value.op != "get_attr" and here in map(stage_of, value.users)]
            later = [
                user
                for value in foreign
                for user in value.users
                if user.op == "output" or (user in self.number and stages[self.number[user]] > here)
            ]
            if len(received) < 2 and all(user is mutation.node for user in later):
                return None
            return SplitError(
                f"{stage_name(here)} changes {mutation.target.name!r} in place, which another stage made and more than this "
                "stage uses; stages hold copies of their own, so the others would not see the change.\n"
                f"changed here:\n{excerpt_of(mutation.node)}\nused here:\n{excerpt_of(next(iter(later), mutation.node))}\n"
                "What to do: use the operation that makes a new tensor (x = x + y, inplace=False), or move the split"
            )

        return refusal

    def _refused_way(self, call: fx.Node, first: fx.Node) -> Callable[[Stages], PippyError]:
        order = list(self.traced.graph.nodes)
        marks = [node for node in order[order.index(first) : order.index(call)] if node.target is pipe_split]
        return lambda stages: SplitError(
            "forward computes a gradient by torch.autograd.grad of what several stages compute. A stage has an autograd graph "
            "of its own, which ends at what the stage is given, so a part of the gradient would be missing.\n"
            f"the gradient, in {stage_name(stages[self.number[call]])}:\n{excerpt_of(call)}\n"
            f"the first operation that it goes through, in {stage_name(stages[self.number[first]])}:\n{excerpt_of(first)}\n"
            + "".join(f"marked between these two:\n{excerpt_of(mark)}\n" for mark in marks)
            + "What to do: move the mark before that operation, or behind the gradient; or take the marks away and give "
            "num_stages"
        )


def _changes(mutation: Mutation) -> str:
    return f"{mutation.node.name} changes {mutation.target.name} in place"


def _users(uses: TensorUses, stages: Stages) -> str:
    return ", ".join(map(stage_name, sorted({stages[index] for index in uses.all})))


def _refused_views(sharing: Sequence[TensorUses], mutation: Mutation) -> Callable[[Stages], PippyError]:
    return lambda stages: SharedParameterError(
        f"{', '.join(sorted(uses.name for uses in sharing))} share memory that is changed in place, and stages have memory "
        f"of their own:\n{excerpt_of(mutation.node)}\n"
        "What to do: move the split so that one stage holds every use, or keep one tensor and take the others as views of it "
        "in forward"
    )


def _refused_transmission(uses: TensorUses, name: str) -> Callable[[Stages], PippyError]:
    return lambda stages: SharedParameterError(
        f"multi_use_param_spec asks to TRANSMIT {name!r}, but {_users(uses, stages)} use it inside a leaf module, which "
        "cannot take a parameter as a value; say REPLICATE, or trace through that module with a tracer of your own"
    )


def _refused_mark(part: Part) -> Callable[[Stages], PippyError]:
    mark = next((node for node in part.nodes if node.target is pipe_split), part.begin)
    return lambda stages: SplitError(
        "a mark lies inside of what torch.utils.checkpoint runs, and a stage runs that again as a whole in its backward.\n"
        f"the mark:\n{excerpt_of(mark)}\nthe part:\n{excerpt_of(part.begin)}\n"
        "What to do: move the mark before or after the call of torch.utils.checkpoint, or make that two calls"
    )


def _modules(traced: Traced) -> Iterator[nn.Module]:
    for value in traced.attributes.values():
        yield from (module for module in (value.modules() if isinstance(value, nn.Module) else ()) if module.training)
