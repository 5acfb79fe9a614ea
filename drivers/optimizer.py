"""An optimizer whose parameters, and whose state, live on the workers.

To torch it is an optimizer of the model's own parameters: learning rate schedulers change its groups as ever. Before each
step the options that changed go to the workers.
"""

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from pippy.drivers.control.messages import (
    LoadOptimizerState,
    MakeOptimizer,
    OptimizerState,
    OptimizerStep,
    TensorLocation,
)
from pippy.drivers.errors import OptimizerError
from pippy.drivers.transport.packing import pack

if TYPE_CHECKING:
    from pippy.drivers.driver import PipelineDriverBase


class PipelineOptimizer(Optimizer):
    """What `driver.instantiate_optimizer` gives.

    ``param_groups`` hold the model's parameters as they are in this process: the names of what lives on the workers.
    """

    def __init__(
        self,
        driver: "PipelineDriverBase",
        number: int,
        optimizer_class: type,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
            raise OptimizerError(
                f"{optimizer_class!r} is no optimizer class; give one, as in instantiate_optimizer(torch.optim.AdamW, lr=1e-3)"
            )
        if optimizer_class.__name__ == "LBFGS":
            raise OptimizerError(
                "LBFGS calls the model again within a step, which the workers cannot do; use another class"
            )
        options = dict(kwargs)
        self.driver, self.number = driver, number
        self.names = {id(parameter): name for name, parameter in driver.pipe.named_parameters()}
        groups = self._groups(options.pop("param_groups", None))
        # The same class here, over the same parameters: it checks the arguments and fills in its defaults.
        here = optimizer_class(groups, *args, **options)
        super().__init__(here.param_groups, here.defaults)
        self._sent = self._options()
        self._make(pack(partial(_make, optimizer_class, tuple(args), options)))

    def _groups(self, given: Iterable[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
        parameters = dict(self.driver.pipe.named_parameters())
        if not parameters:
            raise OptimizerError("the model has no parameters, so there is nothing to optimize")
        groups = [{**group, "params": self._named(group)} for group in given or ()]
        taken: dict[str, int] = {}
        for number, group in enumerate(groups):
            for name in group["params"]:
                if name in taken:
                    raise OptimizerError(
                        f"{name!r} is in parameter groups {taken[name]} and {number}; name it in one of them"
                    )
                taken[name] = number
        rest = [name for name in parameters if name not in taken]
        groups = ([{"params": rest}] if rest else []) + groups
        return [{**group, "params": [parameters[name] for name in group["params"]]} for group in groups]

    def _named(self, group: Mapping[str, Any]) -> list[str]:
        """The names of the parameters that a group means."""
        if not isinstance(group, Mapping) or "params" not in group:
            raise OptimizerError(f'parameter group {group!r}: give a dict with "params", the names of its parameters')
        params = group["params"]
        found: list[str] = []
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
            found += [name for name in matches if name not in found]
        return found

    def _make(self, factory: Any) -> None:
        shipment = self.driver._shipment
        groups: dict[int, list[Any]] = {worker: [] for worker in shipment.workers}
        for group, options in zip(self.param_groups, self._sent):
            places: dict[int, list[TensorLocation]] = {worker: [] for worker in shipment.workers}
            for parameter in group["params"]:
                for worker, place in shipment.places(self.names[id(parameter)]):
                    places[worker].append(place)
            for worker in shipment.workers:
                groups[worker].append((tuple(places[worker]), options))
        self.driver._call({w: MakeOptimizer(self.number, factory, tuple(own)) for w, own in groups.items()})

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

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update the parameters on all workers with their gradients."""
        if closure is not None:
            raise OptimizerError("a closure would run here, not on the workers; call driver.run before step()")
        options = self._options()
        changed = None if _same(options, self._sent) else options
        self._sent = ()  # if it fails, nobody knows which workers have them
        workers = self.driver._shipment.workers
        self.driver._call_reducing(lambda reduce: dict.fromkeys(workers, OptimizerStep(self.number, changed, reduce)))
        self._sent = options
        self.driver._updated()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients on all workers, of the whole model."""
        self.driver.zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while the optimizer is made: groups are given to `instantiate_optimizer`."""
        if hasattr(self, "_sent"):
            raise OptimizerError("parameter groups cannot be added later; give them all to instantiate_optimizer")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The state by the names of the parameters, and the groups with names for parameters."""
        owners = self._first_places()
        bodies = {w: OptimizerState(self.number, tuple(places.values())) for w, places in owners.items()}
        found: dict[str, Any] = {}
        for worker, states in self.driver._call(bodies).items():
            found.update(zip(owners[worker], states))
        names = [[self.names[id(parameter)] for parameter in group["params"]] for group in self.param_groups]
        groups = [{**options, "params": own} for options, own in zip(self._options(), names)]
        return {
            "state": {name: found[name] for own in names for name in own if found.get(name)},
            "param_groups": groups,
        }

    def _first_places(self) -> dict[int, dict[str, TensorLocation]]:
        owners: dict[int, dict[str, TensorLocation]] = {}
        for name in self.names.values():
            for worker, place in self.driver._shipment.places(name)[:1]:
                owners.setdefault(worker, {})[name] = place
        return owners

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave, or a plain optimizer's state, whose parameters are numbered group by group."""
        groups, state = state_dict["param_groups"], state_dict["state"]
        ordered = [[self.names[id(parameter)] for parameter in group["params"]] for group in self.param_groups]
        sizes, theirs = [len(own) for own in ordered], [len(group["params"]) for group in groups]
        if sizes != theirs:
            raise OptimizerError(f"the state has groups of {theirs} parameters, and this optimizer of {sizes}")
        renamed = {key: name for own, group in zip(ordered, groups) for name, key in zip(own, group["params"])}
        if any(isinstance(key, str) for key in renamed):
            if set(renamed) != set(renamed.values()):
                odd = sorted(set(map(str, renamed)) ^ set(renamed.values()))
                raise OptimizerError(f"the state is of other parameters: {', '.join(odd)} are on one side only")
            renamed = {name: name for name in renamed}
        stores: dict[int, dict[TensorLocation, Any]] = {worker: {} for worker in self.driver._shipment.workers}
        for key, its in state.items():
            for worker, place in self.driver._shipment.places(renamed[key]):
                stores[worker][place] = its
        for mine, group in zip(self.param_groups, groups):
            mine.update({key: value for key, value in group.items() if key != "params"})
        self.driver._call({worker: LoadOptimizerState(self.number, own) for worker, own in stores.items()})
        self._sent = ()  # the next step sends the options

    def __reduce__(self) -> Any:
        raise TypeError("this optimizer's state lives on workers; pickle optimizer.state_dict()")


def _make(optimizer_class: type, args: tuple[Any, ...], options: dict[str, Any], groups: Any) -> Optimizer:
    return optimizer_class(groups, *args, **options)


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
