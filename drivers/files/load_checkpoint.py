"""Checkpoints for plain PyTorch, in a process without workers."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from pippy.drivers.base.errors import CheckpointError
from pippy.drivers.files.contents import MODEL, Contents, contents_of
from pippy.ir.base.compiled_modules import original_of
from pippy.ir.base.public_calls import placing_words


@placing_words()
def load_checkpoint(path: str | os.PathLike[str], /, **objects: Any) -> dict[str, Any]:
    """Read a checkpoint in plain PyTorch, without workers. Returns what was saved, by the names given to `driver.save`.

    Give objects by name, and their state is loaded: ``model=`` a module; optimizers of torch, schedulers and other objects by
    the names that they had in `driver.save`. An optimizer's state finds its parameters by their names in the model. Everything
    else is returned: values as they were, and state dicts. In the state dict of an optimizer, parameters are numbered in the
    order of its groups, and ``param_names`` of each group has their names.

    The path is that of a checkpoint, or of a run, for its newest checkpoint, or of a folder of safetensors files, which has the
    model alone.

    >>> import tempfile, torch
    >>> from pippy import Pipe, PipelineDriver1F1B, load_checkpoint, local_cluster
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with local_cluster(2, threads=1) as cluster:
    ...         driver = PipelineDriver1F1B(Pipe.from_sequential(model, torch.nn.MSELoss()), cluster)
    ...         path = driver.save(folder, step=10)
    ...     saved = load_checkpoint(folder)
    ...     print(load_checkpoint(folder, model=model))
    {'step': 10}
    >>> saved["step"], torch.equal(saved["model"]["1.weight"], model[1].weight)
    (10, True)
    """
    contents = contents_of(path)
    saved = _state_dicts(contents)
    optimizers = {name: each for name, each in objects.items() if isinstance(each, Optimizer)}
    for name, each in objects.items():
        if name not in saved or not hasattr(each, "load_state_dict"):
            raise CheckpointError(
                f"{contents.path} has no state for {name}={type(each).__name__}; it has {', '.join(map(repr, saved))}"
            )
    states = {name: _ordered(name, each, saved, objects.get(MODEL)) for name, each in optimizers.items()}
    for name, each in objects.items():
        each.load_state_dict(states.get(name, saved.pop(name)))
    return saved


def _state_dicts(contents: Contents) -> dict[str, Any]:
    model = {name: stored.read() for name, stored in contents.model.items()}
    model.update({name: model[stored] for name, stored in contents.tied.items()})
    values = contents.values
    model.update(values.get("extra", {}))
    state_dicts = {MODEL: model, **values.get("states", {}), **values.get("values", {})}
    for name, saved in values.get("optimizers", {}).items():
        tensors, others = contents.optimizers.get(name, {}), saved["others"]
        states = {
            parameter: {
                **{key: stored.read() for key, stored in tensors.get(parameter, {}).items()},
                **others.get(parameter, {}),
            }
            for parameter in tensors.keys() | others.keys()
        }
        state_dicts[name] = _numbered(states, saved["groups"], [group["params"] for group in saved["groups"]])
    return state_dicts


def _numbered(
    states: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """The state dict of an optimizer, as torch has it: parameters are numbered by group, in the order of ``names``."""
    numbers = {name: number for number, name in enumerate(name for group_names in names for name in group_names)}
    return {
        "state": {number: states[name] for name, number in numbers.items() if name in states},
        "param_groups": [
            {**group, "params": [numbers[name] for name in group_names], "param_names": list(group_names)}
            for group, group_names in zip(groups, names)
        ],
    }


def _ordered(name: str, optimizer: Optimizer, saved: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """A saved state dict of an optimizer, with parameters in the order that ``optimizer`` has."""
    if not isinstance(model, nn.Module):
        raise CheckpointError(
            f"the state of {name}={type(optimizer).__name__} has parameters by their names in a model; give model= too"
        )
    names = {id(parameter): path for path, parameter in original_of(model).named_parameters()}
    mine = [[names.get(id(each), "?") for each in group["params"]] for group in optimizer.param_groups]
    groups = saved[name]["param_groups"]
    if [sorted(group) for group in mine] != [sorted(group["param_names"]) for group in groups]:
        raise CheckpointError(
            f"{name}= has groups of {[len(group) for group in mine]} parameters, which do not match the saved groups of "
            f"{[len(group['params']) for group in groups]}; make it with the groups that the driver's optimizer had"
        )
    states = {
        path: saved[name]["state"].get(number)
        for group in groups
        for path, number in zip(group["param_names"], group["params"])
    }
    return _numbered({path: state for path, state in states.items() if state is not None}, groups, mine)
