"""The headline: for every model of the zoo, a Pipe gives the numbers of the plain model, in float64."""

import pickle

import pytest
import torch

from pippy import MultiUseParameterConfig, Pipe, pipeline, verify
from pippy.ir.base.trees import tensors
from tests.comparisons import (
    assert_same,
    assert_same_gradient,
    assert_same_gradients,
    assert_same_state,
    fresh_inputs,
    run_plain,
    twin,
)
from tests.zoo import SHARING, WAYS, Exhibit, exhibits

pytestmark = [
    pytest.mark.usefixtures("in_float64"),
    pytest.mark.filterwarnings("ignore:a mark after the model's last operation"),
]


def build(name: str) -> Exhibit:
    torch.manual_seed(0)
    return exhibits[name]()


def as_pipe(model: Exhibit, config: MultiUseParameterConfig, loss_fn=None) -> Pipe:
    return pipeline(
        model,
        loss_fn or model.loss_fn,
        multi_use_param_spec=config,
        output_loss_value_spec=model.output_loss_value_spec,
    )


def run_pipe(pipe: Pipe, model: Exhibit, inputs, target, seed=1):
    torch.manual_seed(seed)
    return pipe(*inputs, *([target] if model.loss_fn is not None else []))


@pytest.mark.parametrize(("name", "config"), WAYS)
def test_training_is_that_of_the_plain_model(name, config):
    model = build(name)
    plain, inputs, target = twin(model), model.inputs(), model.target()
    pipe = as_pipe(model, config)
    assert pipe.num_stages > 1
    for step in range(2):  # the second run accumulates gradients, and sees what the first left behind
        theirs, mine = fresh_inputs(inputs), fresh_inputs(inputs)
        expected = run_plain(plain, model.loss_fn, model.output_loss_value_spec, theirs, target, seed=step)
        after_plain = torch.rand(1)
        assert_same(run_pipe(pipe, model, mine, target, seed=step), expected, "loss")
        assert torch.equal(torch.rand(1), after_plain), "random numbers were drawn otherwise"
        for one, other in zip(mine, theirs):
            if isinstance(one, torch.Tensor):
                assert_same_gradient(one.grad, other.grad, "gradient of an input")
        assert_same_gradients(pipe, plain)
        assert_same_state(pipe, plain)
    verify(pipe)


@pytest.mark.parametrize("name", exhibits)
def test_evaluation_is_that_of_the_plain_model(name):
    model = build(name)
    plain, inputs = twin(model), model.inputs()
    pipe = pipeline(model, output_loss_value_spec=False)
    for module in (plain, pipe):
        module.eval()
    with torch.no_grad():
        torch.manual_seed(1)
        expected = plain(*fresh_inputs(inputs))
        torch.manual_seed(1)
        assert_same(pipe(*fresh_inputs(inputs)), expected, "outputs")
    assert_same_state(pipe, plain)
    assert all(parameter.grad is None for parameter in pipe.parameters())


@pytest.mark.parametrize("name", exhibits)
def test_without_gradients_a_training_pipe_only_computes_the_loss(name):
    model = build(name)
    plain, inputs, target = twin(model), model.inputs(), model.target()
    pipe = as_pipe(model, MultiUseParameterConfig.TRANSMIT)
    with torch.no_grad():
        mine = run_pipe(pipe, model, inputs, target)
        torch.manual_seed(1)
        output = plain(*inputs)
        expected = output if model.loss_fn is None else model.loss_fn(output, target)
    assert_same(mine, expected, "loss")
    assert all(parameter.grad is None for parameter in pipe.parameters())
    with_copies = as_pipe(model, MultiUseParameterConfig.REPLICATE)
    assert (described(pipe) != described(with_copies)) == (name in SHARING)


def described(pipe: Pipe) -> tuple[object, ...]:
    """All that the ways to share parameters could change."""
    stages = [str(stage) for _, stage in pipe.stages()]
    return (
        str(pipe),
        stages,
        pipe.replicated_params,
        pipe.qualnames.places,
        list(dict(pipe.split_gm.named_parameters())),
    )


@pytest.mark.parametrize("name", exhibits)
def test_a_pipe_pickles_and_comes_back_equal(name):
    model = build(name)
    loss_fn = None if model.loss_fn is None else SumOfFloats()  # a function inside a class does not pickle by its name
    inputs, target = model.inputs(), model.target()
    pipe = as_pipe(model, MultiUseParameterConfig.REPLICATE, loss_fn)
    again = pickle.loads(pickle.dumps(pipe))
    verify(again)
    assert str(again) == str(pipe)
    for (_, stage), (_, twin_stage) in zip(pipe.stages(), again.stages()):
        assert str(pickle.loads(pickle.dumps(stage))) == str(stage) == str(twin_stage)
    assert_same(again.state_dict(), pipe.state_dict(), "state")
    mine, theirs = (run_pipe(each, model, fresh_inputs(inputs), target) for each in (again, pipe))
    assert_same(mine, theirs, "loss")
    assert_same([p.grad for p in again.parameters()], [p.grad for p in pipe.parameters()], "gradients")


class SumOfFloats(torch.nn.Module):
    def forward(self, output, target):
        return sum(tensor.sum() for tensor in tensors(output) if tensor.is_floating_point())


@pytest.mark.parametrize("name", exhibits)
def test_what_draws_is_known(name):
    model = build(name)
    inputs, target = model.inputs(), model.target()
    before = torch.get_rng_state()
    output = model(*inputs)
    if model.loss_fn is not None:
        model.loss_fn(output, target)
    assert model.draws == (not torch.equal(torch.get_rng_state(), before))


def test_the_zoo_is_large():
    assert len(exhibits) >= 25
