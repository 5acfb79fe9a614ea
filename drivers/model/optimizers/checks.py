"""What is checked of an optimizer before the workers have it.

Does it update a parameter without the others of its group, of which workers have some each? The class is tried on one
parameter: alone, beside another, and behind another. A class that draws random numbers is not tried in another place, where it
draws others.

Can it take the gradients of its parameters, which are sparse or dense by the modules that use them? Without this check, torch's
error would come in a step, on the workers with such parameters, after other workers have updated.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from pippy.drivers.base.errors import OptimizerError
from pippy.drivers.worker.gradients.worker_optimizer import made_optimizer
from pippy.ir.record.compiled import Compiled
from pippy.ir.run.in_place import get_tensor

_SCALES = (1e-3, 1.0, 1e3)  # of the gradients: some optimizers mix parameters only if their gradients are large


def check_separable(optimizer_class: type, args: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Raise if the update of a parameter depends on the other parameters of its group.

    If it cannot run on parameters that are made up, nothing is known, and nothing is raised.

    >>> check_separable(torch.optim.AdamW, (), {"lr": 0.1})
    """
    if optimizer_class.__name__ == "LBFGS":
        raise OptimizerError("LBFGS cannot be used, because it calls the model again within a step; use another class")
    with torch.random.fork_rng(devices=[]):
        try:
            tried = partial(_updated, optimizer_class, args, options)
            alone, beside, behind = tried([0]), tried([0, 1]), tried([1, 0])
            draws = not _are_close(alone, tried([0], seed=1))
        except Exception:  # made-up parameters need not suit it
            return
    if not draws and _are_close(alone, beside) and not _are_close(alone, behind):
        raise OptimizerError(
            f"{optimizer_class.__name__} cannot be used: its update of a parameter depends on the place of the parameter in "
            "its group, and a worker has a part of the group only, so that places differ there. Let the optimizer read what "
            'differs from an option of the group, as in param_groups=[{"params": "first.*", "lr": 0.01}, ...], or from an '
            "attribute of the parameter, which the parameters on the workers have, too"
        )
    if not _are_close(alone, beside):
        raise OptimizerError(
            f"{optimizer_class.__name__} cannot be used: its update of a parameter depends on the other parameters "
            "of the group (on their norm, for example), and each worker only has a part of the group. Do that part "
            "separately (driver.clip_grad_norm_ computes the norm over the whole model), or use a class that "
            "updates each parameter alone"
        )


def _are_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)


def _updated(
    optimizer_class: type, args: Sequence[Any], options: Mapping[str, Any], places: Sequence[int], seed: int = 0
) -> torch.Tensor:
    """The first of two parameters after a few steps of an optimizer that has those with these numbers, in this order."""
    numbers = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(4, 4, generator=numbers)) for _ in range(2)]
    optimizer = made_optimizer(optimizer_class, args, options, [{"params": [parameters[place] for place in places]}])
    for step, scale in enumerate(_SCALES):
        torch.manual_seed(10 * seed + step)  # what the optimizer draws itself is alike
        for number, parameter in enumerate(parameters):
            generator = torch.Generator().manual_seed(10 * step + number)
            parameter.grad = torch.randn(4, 4, generator=generator) * scale
        optimizer.step()
    return parameters[0].detach()


_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def check_gradient_layouts(
    compiled: Compiled,
    optimizer_class: type,
    args: Sequence[Any],
    options: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
) -> None:
    """Raise if an optimizer fails on the gradients that a group will have. The ``params`` of ``groups`` are names."""
    for group in groups:
        sparse = {name: has_sparse_gradient(compiled, name) for name in group["params"]}
        group_options = {key: value for key, value in group.items() if key != "params"}
        on_sparse, on_dense = (
            _failure(optimizer_class, args, options, group_options, layout) for layout in (True, False)
        )
        wrong = [name for name, known in sparse.items() if known is (on_sparse is not None)]
        if wrong and (on_sparse is None) != (on_dense is None):
            raise OptimizerError(_explained(optimizer_class.__name__, wrong, on_sparse, on_dense))


def has_sparse_gradient(compiled: Compiled, name: str) -> bool | None:
    """Whether the gradient of a parameter is sparse, by the modules that use it; None if these do not decide it.

    >>> from pippy.ir.pipe import Pipe
    >>> model = nn.Sequential(nn.Embedding(3, 2, sparse=True), nn.Linear(2, 2))
    >>> [has_sparse_gradient(Pipe.from_sequential(model), name) for name in ("0.weight", "1.weight")]
    [True, False]
    """
    layouts = set()
    for qualname in compiled.stage_qualnames(name):
        call, _, local = qualname.partition(".")
        layouts |= set(_of_uses(compiled.stage(call), local))
    if False in layouts:  # the sum of a dense and a sparse one is dense
        return False
    return None if None in layouts or not layouts else True


def _of_uses(stage: nn.Module, name: str) -> Iterator[bool | None]:
    tensor = get_tensor(stage, name)
    if not tensor.requires_grad or not isinstance(stage, fx.GraphModule):
        yield None
        return
    for node in stage.graph.nodes:
        if node.op == "call_module":
            module = stage.get_submodule(str(node.target))
            if any(each is tensor for each in module.parameters()):
                yield _of_module(module, tensor)
        elif node.op == "get_attr" and get_tensor(stage, str(node.target)) is tensor:
            yield None


def _of_module(module: nn.Module, tensor: torch.Tensor) -> bool | None:
    if type(module) in _EMBEDDINGS:
        return bool(module.sparse)
    own = any(each is tensor for each in module._parameters.values())
    return False if own and type(module).__module__.startswith("torch.nn.modules.") else None


def _failure(
    optimizer_class: type, args: Sequence[Any], options: Mapping[str, Any], group: Mapping[str, Any], sparse: bool
) -> Exception | None:
    """The exception of an optimizer for a sparse or a dense gradient; None if it takes it."""
    parameter = nn.Parameter(torch.ones(4, 4))
    parameter.grad = torch.eye(4).to_sparse(1) if sparse else torch.eye(4)
    with torch.random.fork_rng(devices=[]):
        try:
            optimizer_class([{**group, "params": [parameter]}], *args, **options).step()
        except Exception as error:
            return error
    return None


def _explained(name: str, wrong: Sequence[str], on_sparse: Exception | None, on_dense: Exception | None) -> str:
    shown = ", ".join(map(repr, wrong[:8]))
    if on_sparse is not None:
        return (
            f"{name} does not take the sparse gradients of {shown} (embeddings with sparse=True): {on_sparse}. Name the other "
            "parameters in param_groups, and give these an optimizer of their own: "
            f"driver.instantiate_optimizer(torch.optim.SparseAdam, param_groups=[{{'params': {list(wrong)}}}])"
        )
    return (
        f"{name} takes sparse gradients only, and those of {shown} are dense: {on_dense}. Name the weights of embeddings with "
        "sparse=True in its param_groups, and give the others an optimizer of their own"
    )
