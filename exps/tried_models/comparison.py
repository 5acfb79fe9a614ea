"""One step of a Pipe beside one step of the plain model: the loss, every gradient and every buffer."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from exps.tried_models.candidate import Candidate, rows_of
from pippy import Pipe, pipeline


def cut(candidate: Candidate, model: nn.Module, num_stages: int, arguments: dict[str, Any], **options: Any) -> Pipe:
    """A Pipe of the model. The cuts do not depend on measured times."""
    only = True if candidate.returns_only_a_loss else None
    return pipeline(
        model,
        candidate.loss_fn,
        num_stages=num_stages,
        split="parameters",
        output_loss_value_spec=only,
        example_kwargs=arguments,
        **options,
    )


def loss_in(candidate: Candidate, result: Any) -> Tensor:
    """The loss in what a Pipe or a model returned."""
    if candidate.loss_fn is not None or candidate.returns_only_a_loss:
        return result
    return result["loss"] if isinstance(result, dict) else result.loss


def plain_step(candidate: Candidate, model: nn.Module, arguments: dict[str, Any]) -> Tensor:
    """Forward, loss and backward without a pipeline; returns the loss."""
    if candidate.loss_fn is None:
        loss = loss_in(candidate, model(**arguments))
    else:
        given = {name: value for name, value in arguments.items() if name != "target"}
        loss = candidate.loss_fn(model(**given), arguments["target"])
    loss.backward()
    return loss.detach()


def compare_step(
    candidate: Candidate, pipe: Pipe, model: nn.Module, plain: nn.Module, arguments: dict[str, Any]
) -> None:
    """Raise an AssertionError that names what differs after one step of both. The gradients are added to what is there."""
    torch.manual_seed(1)
    loss = loss_in(candidate, pipe(**arguments)).detach()
    torch.manual_seed(1)
    assert_close(loss, plain_step(candidate, plain, arguments), "the loss", rtol=1e-12)
    assert_same_gradients(dict(model.named_parameters()), dict(plain.named_parameters()))
    for (name, buffer), other in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert_close(buffer, other, name, rtol=1e-12)


def compare_modes(candidate: Candidate, num_stages: int, *, rows: Sequence[int] = ()) -> None:
    """Cut a model into so many stages, and compare a step in training and one in evaluation: of all rows, or of the first."""
    model, plain, arguments = candidate.model(), candidate.model(), candidate.arguments()
    pipe = cut(candidate, model, num_stages, arguments)
    assert pipe.num_stages == num_stages
    batches = [rows_of(arguments, 0, each) for each in rows] or [arguments]
    for training in (True, False):
        pipe.train(training), plain.train(training)
        for batch in batches:
            compare_step(candidate, pipe, model, plain, batch)


def assert_same_gradients(found: dict[str, nn.Parameter], expected: dict[str, nn.Parameter]) -> None:
    """Raise an AssertionError that names the first parameter whose gradient differs."""
    for name, parameter in expected.items():
        gradient = found[name].grad
        assert (gradient is None) == (parameter.grad is None), f"one gradient of {name} is None"
        if gradient is not None:
            assert_close(gradient, parameter.grad, f"the gradient of {name}", rtol=1e-10)


def assert_close(found: Any, expected: Any, what: str, rtol: float) -> None:
    """Raise an AssertionError that says what differs."""

    def message(text: str) -> str:
        return f"{what}: {text}"

    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-13, msg=message)
