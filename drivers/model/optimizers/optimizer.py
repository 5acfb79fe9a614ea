"""An optimizer whose parameters, and whose state, live on the workers.

For torch it is an optimizer of the parameters in this process: learning rate schedulers change its groups. Before each step
the changed options are sent to the workers.
"""

import fnmatch
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch.optim import Optimizer

from pippy.drivers.base.errors import OptimizerError
from pippy.drivers.base.interrupts import first_waits
from pippy.drivers.count.optimizer_bytes import CountedOptimizer
from pippy.drivers.model.optimizers.checks import check_gradient_layouts, check_separable
from pippy.drivers.model.optimizers.stale_models import StaleModels
from pippy.drivers.placement.placed_pipe import PlacedPipe, passing_on
from pippy.drivers.protocol.state import (
    GiveState,
    MakeOptimizer,
    OptimizerStep,
    RestoreState,
    TensorLocation,
    WorkerState,
)
from pippy.drivers.session.driver_commands import DriverCommands
from pippy.drivers.wire.pickling import pickle_by_value
from pippy.drivers.worker.gradients.worker_optimizer import MASTER, made_optimizer
from pippy.ir.base import source
from pippy.ir.base.public_calls import check_flag, check_words, place_words, words_of
from pippy.ir.base.readable import brief, count_with_noun, shortened
from pippy.ir.record.code_reads import have_same_values

_OWN_WORDS = ("param_groups", "master_dtype", "divide_state")
place_words("driver.instantiate_optimizer(torch.optim.AdamW)", {*_OWN_WORDS, *words_of(torch.optim.AdamW)} - {"params"})


def with_groups(args: Sequence[Any], options: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments of an optimizer class, where parameters or groups of them that come first are ``param_groups``.

    >>> weight = torch.nn.Parameter(torch.zeros(1))
    >>> with_groups((iter([weight]), 0.1), {}) == ((0.1,), {"param_groups": [{"params": [weight]}]})
    True
    >>> with_groups((0.1,), {"momentum": 0.9})
    ((0.1,), {'momentum': 0.9})
    """
    if not args or not isinstance(args[0], (list, tuple, Iterator)):
        return args, options
    given = [each[1] if isinstance(each, tuple) and len(each) == 2 else each for each in args[0]]
    kind = next(
        (kind for kind in (torch.Tensor, Mapping) if given and all(isinstance(each, kind) for each in given)), None
    )
    if kind is None:
        return args, options
    if "param_groups" in options:
        raise OptimizerError("the parameters are given twice: first, and as param_groups=; leave one of them out")
    return args[1:], {**options, "param_groups": given if kind is Mapping else [{"params": given}]}


class PipelineOptimizer(Optimizer):
    """What `driver.instantiate_optimizer` gives.

    ``param_groups`` hold the model's parameters in this process. They only stand for those on the workers, which the
    optimizer updates. ``number`` is what the workers know it by. If its state is divided, ``passes_on`` says who sends which
    parameters to whom when they are updated.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        placed: PlacedPipe,
        commands: DriverCommands,
        stale: StaleModels,
        number: int,
        optimizer_class: type,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
            raise OptimizerError(
                f"{brief(optimizer_class)} is not an optimizer class; give one, as in "
                "instantiate_optimizer(torch.optim.AdamW, lr=1e-3)"
            )
        options = dict(kwargs)
        self._divide_state = _checked_divided(options.pop("divide_state", False), placed)
        self.master_dtype = _checked_master_dtype(options.pop("master_dtype", None), parameters)
        self.placed, self.commands, self.stale, self.number = placed, commands, stale, number
        self.names = {id(parameter): name for name, parameter in parameters.items()}
        groups = self._groups(parameters, options.pop("param_groups", None))
        check_words(optimizer_class.__name__, options, optimizer_class, _OWN_WORDS, filled="params")
        check_separable(optimizer_class, args, options)
        named = [{**group, "params": [self.names[id(each)] for each in group["params"]]} for group in groups]
        check_gradient_layouts(placed.compiled, optimizer_class, args, options, named)
        # The same class here, over the same parameters: it checks the arguments and fills in its defaults.
        here = made_optimizer(optimizer_class, args, options, groups)
        super().__init__(here.param_groups, here.defaults)
        self._named_parameters = self.named_parameters()
        self.stepped = False
        self.optimizer_class = optimizer_class
        self.factory = partial(made_optimizer, optimizer_class, tuple(args), options)
        self.make_again(placed.workers)

    def __repr__(self) -> str:
        groups = count_with_noun(len(self.param_groups), "group")
        rates = list(dict.fromkeys(str(group["lr"]) for group in self.param_groups if "lr" in group))
        shown = f", lr={shortened(', '.join(rates), 60)}" if rates else ""
        count = sum(len(group["params"]) for group in self.param_groups)
        return f"<PipelineOptimizer of {self.optimizer_class.__name__}: {count} parameters in {groups}{shown}>"

    def _groups(
        self, parameters: Mapping[str, torch.nn.Parameter], params: Iterable[Mapping[str, Any]] | None
    ) -> list[dict[str, Any]]:
        if not parameters:
            raise OptimizerError("the model has no parameters, so there is nothing to optimize")
        if params is None:
            return [{"params": list(parameters.values())}]
        groups = [self._named_group(group) for group in params]
        taken: dict[str, int] = {}
        for number, group in enumerate(groups):
            for name in group["params"] if group["params"] is not ... else ():
                if name in taken:
                    raise OptimizerError(
                        f"{brief(name)} is in parameter groups {taken[name]} and {number}; name it in one of them"
                    )
                taken[name] = number
        self._fill_rest(groups, [name for name in parameters if name not in taken])
        return [{**group, "params": [parameters[name] for name in group["params"]]} for group in groups]

    def _fill_rest(self, groups: Sequence[dict[str, Any]], rest: list[str]) -> None:
        """Give the group whose parameters are `...` those that no other group names."""
        open_groups = [group for group in groups if group["params"] is ...]
        if len(open_groups) > 1 or (open_groups and not rest) or not groups:
            raise OptimizerError(
                f'{len(open_groups)} of {len(groups)} parameter groups have "params": ..., which stands for the '
                f"other parameters, of which there are {len(rest)}; give at least one group, and exactly one with "
                '"params": ... if there are other parameters'
            )
        for group in open_groups:
            group["params"] = rest

    def _named_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        if not isinstance(group, Mapping) or "params" not in group:
            raise OptimizerError(
                f'parameter group {brief(group)}: give a dict with "params", the names of its parameters'
            )
        return {**group, "params": ... if group["params"] is ... else self._named(group["params"])}

    def _named(self, params: Any) -> list[str]:
        """The names of the parameters of a group, which may have patterns or parameters."""
        named: list[str] = []
        for wanted in [params] if isinstance(params, (str, torch.Tensor)) else params:
            if isinstance(wanted, torch.Tensor):
                matches = [self.names[id(wanted)]] if id(wanted) in self.names else []
            else:
                matches = [name for name in self.names.values() if name == wanted or fnmatch.fnmatchcase(name, wanted)]
            if not matches:
                what = (
                    "a tensor that is not a parameter of the model"
                    if isinstance(wanted, torch.Tensor)
                    else repr(wanted)
                )
                raise OptimizerError(f"no parameter is called {what}; the model has {', '.join(self.names.values())}")
            named += [name for name in matches if name not in named]
        return named

    @property
    def divided(self) -> bool:
        """Whether its state is divided among replicas of the pipeline: there may be one only, after a recovery."""
        return self._divide_state and len(self.placed.replicas) > 1

    def make_again(self, workers: Collection[int]) -> None:
        """Make it on some workers, without a state."""
        self.passes_on = passing_on(self.placed.buckets, self._copied()) if self.divided else None
        groups: dict[int, list[Any]] = {worker: [] for worker in self.placed.workers}
        self._sent, factory = self._options(), pickle_by_value(self.factory)
        for group, options in zip(self.param_groups, self._sent):
            in_group = dict.fromkeys(self.names[id(each)] for each in group["params"])
            by_worker = self.placed.for_all_copies(in_group, self.divided)
            for worker, locations in by_worker.items():
                groups[worker].append((tuple(locations), options))
        self._attributes = self._attributes_now()
        attributes = self.placed.for_all_copies(self._attributes, self.divided)
        bodies = {
            worker: MakeOptimizer(
                self.number,
                factory,
                tuple(groups[worker]),
                self.master_dtype,
                self._copied(),
                None if self.passes_on is None else self.passes_on.order_of(worker),
                attributes[worker],
            )
            for worker in workers
        }
        self.commands.call(bodies)

    def _copied(self) -> tuple[str, ...]:
        """The names of its parameters, if replicas have copies of them."""
        canonical = self.placed.compiled.qualnames.canonical
        names = [name for name, _ in self.named_parameters()] if len(self.placed.replicas) > 1 else []
        return tuple(canonical.get(name, name) for name in names)

    def _options(self) -> tuple[dict[str, Any], ...]:
        """The options of every group, as they are now. A tensor is copied: a scheduler changes it in place."""
        return tuple(
            {
                key: value.clone() if isinstance(value, torch.Tensor) else value
                for key, value in group.items()
                if key != "params"
            }
            for group in self.param_groups
        )

    def counted(self) -> CountedOptimizer:
        """The optimizer as `pippy.drivers.count` counts the bytes of its state."""
        groups = [
            (frozenset(self.names[id(each)] for each in group["params"]), options)
            for group, options in zip(self.param_groups, self._options())
        ]
        shares = self.placed.owned_by_stage() if self.divided else None
        return CountedOptimizer(self.factory, tuple(groups), self.master_dtype, shares)

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update the parameters on all workers with their gradients."""
        if closure is not None:
            raise OptimizerError(
                "step() does not take a closure, which would run in this process and not on the workers; call "
                "driver.run before step()"
            )
        self.commands.check_not_edited()
        self.commands.wait()
        with first_waits():  # or some workers might have updated their parameters, and others not
            self.update_parameters()
            self.commands.parameters_updated()
            self.stale.updated()

    def memento(self) -> Callable[[], None]:
        """What puts back what is known now of the optimizer on the workers."""
        sent, stepped = self._sent, self.stepped

        def put_back() -> None:
            self._sent, self.stepped = sent, stepped

        return put_back

    def update_parameters(self) -> None:
        """Have the workers update their parameters: `step`, without the rest of a step."""
        options = self._options()
        changed = None if _same(options, self._sent) else options
        attributes_now = self._attributes_now()
        attributes = self._to_send(attributes_now)
        self._sent, self.stepped = (), True  # if it fails, it is not known which workers have them
        self.commands.call_reducing(
            lambda reduce: {
                worker: OptimizerStep(self.number, changed, reduce, attributes.get(worker))
                for worker in self.placed.workers
            }
        )
        self._sent, self._attributes = options, attributes_now

    def _attributes_now(self) -> dict[str, dict[str, Any]]:
        """The attributes that the script has set on parameters, by name."""
        return {name: dict(own) for name, each in self._named_parameters if (own := vars(each))}

    def _to_send(self, now: Mapping[str, Mapping[str, Any]]) -> dict[int, dict[TensorLocation, Any]]:
        """By worker and location, the attributes of those parameters that have others than were sent."""
        before = self._attributes
        if not before and not now:
            return {}
        names = [name for name in {**before, **now} if not have_same_values(before.get(name, {}), now.get(name, {}))]
        return self.placed.for_all_copies({name: now.get(name, {}) for name in names}, self.divided)

    @property  # type: ignore[override]
    def state(self) -> "StateOnWorkers":
        """What stands for the states on the workers: they can be cleared. `state_dict` reads them."""
        return StateOnWorkers(self)

    @state.setter
    def state(self, state: Mapping[Any, Any]) -> None:
        if hasattr(self, "_sent"):  # else torch makes an empty one
            if state:
                raise OptimizerError(
                    "the states of this optimizer are on the workers; give optimizer.load_state_dict(state)"
                )
            self.state.clear()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What torch's GradScaler reads before it steps."""
        raise OptimizerError(
            "a torch.amp.GradScaler cannot scale the gradients of this optimizer, which are on the workers; use "
            "scaler = driver.instantiate_grad_scaler(), and leave scaler.scale(loss).backward() out"
        )

    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Its parameters, as they are in this process, with their names."""
        return [(self.names[id(each)], each) for group in self.param_groups for each in group["params"]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of its parameters on all workers."""
        own = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        if own == self.names.keys():
            self.commands.zero_grad()
        else:
            self.commands.zero_grad_of(self.number, [name for name, _ in self.named_parameters()])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while the optimizer is made: groups are given to `instantiate_optimizer`."""
        if hasattr(self, "_sent"):
            raise OptimizerError("parameter groups cannot be added later; give them all to instantiate_optimizer")
        super().add_param_group(param_group)

    def named_groups(self) -> list[dict[str, Any]]:
        """The options of each group, as they are now, with names for parameters."""
        names = [[self.names[id(parameter)] for parameter in group["params"]] for group in self.param_groups]
        return [{**options, "params": own} for options, own in zip(self._options(), names)]

    def take_options(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Take the options of other groups; the next step sends them."""
        for mine, group in zip(self.param_groups, groups):
            mine.update({key: value for key, value in group.items() if key != "params"})
        self._sent, self.stepped = (), True

    def state_dict(self) -> dict[str, Any]:
        """The state by the names of the parameters, and the groups with names for parameters."""
        by_worker = self.placed.first_locations(self.names.values(), self.divided)
        bodies = {
            worker: GiveState((), {self.number: tuple(locations.values())}) for worker, locations in by_worker.items()
        }
        by_name: dict[str, Any] = {}
        for worker, answer in self.commands.call(bodies).items():
            states = answer.optimizers[self.number]
            by_name.update({name: states.get(place) for name, place in by_worker[worker].items()})
        names = [name for name, _ in self.named_parameters()]
        return {
            "state": {name: by_name[name] for name in names if by_name.get(name)},
            "param_groups": self.named_groups(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave, or a plain optimizer's state, whose parameters are numbered group by group."""
        groups, state = state_dict["param_groups"], state_dict["state"]
        ordered = [[self.names[id(parameter)] for parameter in group["params"]] for group in self.param_groups]
        sizes, saved_sizes = [len(names) for names in ordered], [len(group["params"]) for group in groups]
        if sizes != saved_sizes:
            raise OptimizerError(f"the state has groups of {saved_sizes} parameters, and this optimizer of {sizes}")
        renamed = {key: name for own, group in zip(ordered, groups) for name, key in zip(own, group["params"])}
        if any(isinstance(key, str) for key in renamed):
            if set(renamed) != set(renamed.values()):
                odd = sorted(set(map(str, renamed)) ^ set(renamed.values()))
                raise OptimizerError(
                    f"the state is of other parameters: only one of the state and the optimizer has {', '.join(odd)}"
                )
            renamed = {name: name for name in renamed}
        if self.master_dtype is None and any(MASTER in parameter_state for parameter_state in state.values()):
            raise OptimizerError(
                "the state has copies of the parameters in a dtype with more bits, and this optimizer has none; "
                "make the optimizer with their dtype: instantiate_optimizer(..., master_dtype=torch.float32)"
            )
        stores = self.placed.for_all_copies(
            {renamed[key]: parameter_state for key, parameter_state in state.items()}, self.divided
        )
        self.commands.wait()
        with first_waits():
            self.take_options(groups)
            states = {worker: WorkerState({}, {self.number: own}) for worker, own in stores.items()}
            self.commands.call({worker: RestoreState(own) for worker, own in states.items()})

    def __reduce__(self) -> Any:
        raise TypeError("this optimizer's state lives on workers; pickle optimizer.state_dict()")


class StateOnWorkers(dict[Any, Any]):
    """``state`` of an optimizer whose states are on the workers. It is empty, and says so to the script's own code."""

    def __init__(self, optimizer: PipelineOptimizer) -> None:
        self._optimizer = optimizer

    def clear(self) -> None:
        """Have the optimizer begin again, on all workers."""
        self._optimizer.load_state_dict({"state": {}, "param_groups": self._optimizer.named_groups()})


def _telling(method: Callable[..., Any]) -> Any:
    @wraps(method)
    def tell(self: StateOnWorkers, *args: Any, **kwargs: Any) -> Any:
        if source.is_of_project(
            sys._getframe(1).f_code.co_filename
        ):  # frameworks move the tensors in it, if there are any
            raise OptimizerError(
                "the states of this optimizer are on the workers, and optimizer.state has none of them. Read them with "
                "optimizer.state_dict(), and change them with optimizer.load_state_dict(state); optimizer.state.clear() drops "
                "them"
            )
        return method(self, *args, **kwargs)

    return tell


for (
    _name
) in "__getitem__ __setitem__ __delitem__ __contains__ __iter__ __len__ keys values items get pop update".split():
    setattr(StateOnWorkers, _name, _telling(getattr(dict, _name)))


def _checked_master_dtype(master_dtype: Any, parameters: Mapping[str, torch.nn.Parameter]) -> torch.dtype | None:
    """The dtype of an optimizer's copies, if each parameter fits into it."""
    if master_dtype is None:
        return None
    if not isinstance(master_dtype, torch.dtype) or not master_dtype.is_floating_point:
        raise OptimizerError(
            f"master_dtype={brief(master_dtype)}: give a floating-point dtype, as in master_dtype=torch.float32"
        )
    for name, parameter in parameters.items():
        if (
            parameter.is_floating_point()
            and parameter.dtype != master_dtype
            and parameter.dtype.itemsize >= master_dtype.itemsize
        ):
            raise OptimizerError(
                f"master_dtype={master_dtype}: {name!r} is {parameter.dtype}, and a copy of it would lose digits; give a "
                "dtype with more bits than the parameters have, or leave master_dtype out"
            )
    return master_dtype


def _checked_divided(divide_state: Any, placed: PlacedPipe) -> bool:
    """Whether its state is divided among replicas of the pipeline, if there are any."""
    check_flag("divide_state", divide_state, OptimizerError, true="to divide the state among replicas")
    if divide_state and len(placed.replicas) == 1:
        raise OptimizerError(
            "divide_state=True divides the state among replicas of the pipeline, and this driver has one pipeline; make it "
            "with replicas=2, or leave divide_state out"
        )
    return divide_state


def _same(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> bool:
    if len(one) != len(other):
        return False
    return all(
        mine.keys() == theirs.keys() and all(_equal(mine[k], theirs[k]) for k in mine)
        for mine, theirs in zip(one, other)
    )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    return bool(one == other)
