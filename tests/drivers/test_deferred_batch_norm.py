"""`DeferredBatchNorm` on workers: running statistics as the plain batch norms get them from the mini-batch as one batch."""

import contextlib
import copy
import warnings

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

import pippy
from pippy import MicroBatches, pipe_split, pipeline
from pippy.drivers.base.errors import StepError
from pippy.drivers.driver.drivers import PipelineDriver, PipelineDriver1F1B, PipelineDriverFillDrain
from pippy.drivers.worker import stage_call
from pippy.errors import SharedParameterError
from pippy.ir.pipe import compiled_of
from pippy.ir.reference import run_microbatches
from tests.comparisons import Beside, assert_bits
from tests.drivers.failing_model import Raises
from tests.ir.cut.test_params import NormTwice

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


class Net(nn.Module):
    """Three norms in as many stages, of other dimensions, and with other arguments."""

    def __init__(self):
        super().__init__()
        self.conv, self.first = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, momentum=0.3)
        self.linear, self.second = nn.Linear(16, 6), nn.BatchNorm1d(6, momentum=None, affine=False)
        self.out, self.third = nn.Linear(6, 3), nn.BatchNorm1d(3, track_running_stats=False)
        self.fourth = nn.BatchNorm1d(3)

    def forward(self, x):
        x = torch.relu_(self.first(self.conv(x)))
        pipe_split()
        x = self.second(self.linear(x.flatten(1)))
        pipe_split()
        return self.fourth(torch.tanh(self.third(self.out(x)) * 9))


def norms_of(model):
    return {name: each for name, each in model.named_modules() if isinstance(each, _BatchNorm)}


def count(plain, microbatches):
    """Count a mini-batch: each norm of the plain model gets as one batch what its calls get of the micro-batches."""
    seen, pieces = {}, copy.deepcopy(plain)
    for name, norm in norms_of(pieces).items():
        norm.register_forward_pre_hook(lambda norm, given, name=name: seen[name][-1].append(given[0].detach()))
    for microbatch in microbatches:
        for name in norms_of(plain):
            seen.setdefault(name, []).append([])
        pieces(*microbatch)
    with torch.no_grad():
        for name, norm in norms_of(plain).items():
            for calls in zip(*seen[name], strict=True):
                norm(torch.cat(calls))


def assert_statistics(state, plain):
    expected = dict(plain.named_buffers())
    assert {name for name in state if name.rpartition(".")[2] not in ("weight", "bias")} == set(expected)
    for name, buffer in expected.items():
        torch.testing.assert_close(state[name], buffer, rtol=1e-12, atol=1e-13, msg=lambda text, name=name: name + text)


def beside(cluster, model, loss=nn.MSELoss(), kind=None, **options):  # noqa: B008
    """A model with deferred norms on a driver, and the plain model beside it."""
    plain = copy.deepcopy(model)
    return Beside(cluster, pippy.convert_deferred_batch_norm(model), loss, kind, plain=plain, **options)


SCHEDULES = ["fill_drain", "1f1b", "zb_h1", "interleaved_1f1b", "looped_bfs"]
MODES = ["never", "always", "except_last", {1: "always"}]


@given(
    st.lists(st.integers(2, 5), min_size=1, max_size=5),
    st.sampled_from(SCHEDULES),
    st.sampled_from(MODES),
    st.booleans(),
    st.sampled_from(["", "single_loss", "forward"]),
    st.sampled_from([False, "graphs"]),
)
@settings(max_examples=6, phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_statistics_are_those_of_the_mini_batch(threads, sizes, schedule, mode, out_of_order, how, compile):
    single = how == "single_loss"
    options = {"checkpoint": mode, "out_of_order": out_of_order, "single_loss": single, "compile": compile}
    options["schedule"] = schedule = "fill_drain" if single else schedule
    options["world_size"] = 1 if schedule in SCHEDULES[3:] else 3
    both, steps = beside(threads, Net(), loss_reduction="mean", **options), []
    for _ in range(2):
        microbatches = [torch.randn(size, 2, 4, 4) * 2 + 7 for size in sizes]
        given = MicroBatches(microbatches), MicroBatches([torch.randn(size, 3) for size in sizes])
        with torch.set_grad_enabled(how != "forward"):
            steps.append(both.driver.run_async(len(sizes), *given))
        count(both.plain, [(each,) for each in microbatches])
    for step in steps:
        step.result()
    assert_statistics(both.driver.state_dict(), both.plain)
    both.driver.close()


def test_the_bits_are_those_of_the_reference_under_every_schedule(threads):
    x, target, model = torch.randn(11, 2, 4, 4), torch.randn(11, 3), pippy.convert_deferred_batch_norm(Net())
    reference = pipeline(copy.deepcopy(model), nn.MSELoss())
    names = [node.name for node in reference.split_gm.graph.nodes if node.op == "placeholder"]
    microbatches = [dict(zip(names, given)) for given in zip(x.tensor_split(4), target.tensor_split(4))]
    run_microbatches(compiled_of(reference), microbatches)
    for schedule in SCHEDULES:
        pipe, mode = pipeline(copy.deepcopy(model), nn.MSELoss()), "always" if schedule == "1f1b" else "never"
        driver = PipelineDriver(pipe, threads, schedule=schedule, compile="graphs", checkpoint=mode)
        driver.run(4, x, target)
        assert_bits(driver.state_dict(), reference.state_dict())
        norms = ("submod_0", "submod_1", "submod_2")
        assert all(driver.compiled[each] == "graphs for 2 forms of inputs" for each in norms)
        driver.close()


def test_a_norm_that_counts_twice_is_seen(threads, monkeypatch):
    """A mutation: what a forward that is computed again changes is not put back."""
    monkeypatch.setattr(stage_call, "as_before", lambda changes: contextlib.nullcontext())
    both, x = beside(threads, Net(), checkpoint="always"), torch.randn(8, 2, 4, 4)
    both.driver.run(2, x, torch.randn(8, 3))
    count(both.plain, [(each,) for each in x.split(4)])
    with pytest.raises(AssertionError, match="running_mean"):
        assert_statistics(both.driver.state_dict(), both.plain)


class FailsInBackward(Net):
    """In the backward of the first stage: the others have ended the step."""

    def forward(self, x):
        return super().forward(Raises.apply(x + 0 * self.conv.weight.sum(), x.max() > 100))


def test_a_step_that_fails_counts_nowhere(threads):
    """Those before it, which are not known to have succeeded when it fails, count; those after it are given up."""
    both, x, target = beside(threads, FailsInBackward()), torch.randn(9, 2, 4, 4), torch.randn(9, 3)
    for _ in range(2):
        steps = [both.driver.run_async(3, x + shift, target) for shift in (0, 1, 1000, 2)]
        for step in steps[:2]:
            step.result()
        for step in steps[2:]:
            with pytest.raises(StepError, match="a backward that fails"):
                step.result()
        for shift in (0, 1):
            count(both.plain, [(part + shift,) for part in x.tensor_split(3)])
        assert_statistics(both.driver.state_dict(), both.plain)


class Twice(nn.Module):
    """A norm that is called twice, one in a part that torch checkpoints, and one that another shares its buffers with."""

    def __init__(self, reentrant):
        super().__init__()
        self.first, self.twice, self.inside = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.one, self.other = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.other.running_mean, self.other.running_var = self.one.running_mean, self.one.running_var
        self.reentrant = reentrant

    def forward(self, x):
        x = self.twice(torch.tanh(self.first(x)))
        x = self.twice(x.exp())
        pipe_split()
        x = checkpoint(lambda x: self.inside(x.sin() * 3), x, use_reentrant=self.reentrant)
        return self.one(self.other(x * 4).cos())


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("options", [{"schedule": "zb_h1", "compile": "graphs"}, {"checkpoint": "always"}], ids=str)
def test_norms_that_are_called_more_than_once(threads, reentrant, options):
    """A part that torch checkpoints is counted in both of its forwards, as in plain PyTorch."""
    both, x, target = beside(threads, Twice(reentrant), **options), torch.randn(3, 4), torch.randn(3, 4)
    # the same rows in all micro-batches: so they are normalized as the whole is
    both.run(3, x.repeat(3, 1), target.repeat(3, 1), rtol=1e-10, atol=0)
    state = both.driver.state_dict()
    for name, buffer in both.plain.named_buffers(remove_duplicate=False):
        torch.testing.assert_close(state[name], buffer, msg=lambda text, name=name: name + text)
    assert state["inside.num_batches_tracked"] == state["twice.num_batches_tracked"] == 2


def test_forward_in_evaluation_and_without_a_pipeline_is_the_plain_model(threads):
    model, x, target = Net(), torch.randn(8, 2, 4, 4), torch.randn(8, 3)
    plain = copy.deepcopy(model)
    pipe = pipeline(pippy.convert_deferred_batch_norm(model), nn.MSELoss())
    assert torch.equal(pipe(x, target), nn.functional.mse_loss(plain(x), target))
    assert torch.equal(model(x), plain(x))
    assert_statistics(model.state_dict(), plain)
    pipe.eval()
    plain.eval()
    driver = PipelineDriver1F1B(pipe, threads)
    with torch.no_grad():
        torch.testing.assert_close(driver.run(1, x, target), nn.functional.mse_loss(plain(x), target))
    driver.copy_to(model)
    assert_statistics(model.state_dict(), plain)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert not any(
        name in vars(norm) and vars(norm)[name] for norm in norms_of(model).values() for name in ("note", "noted")
    )


def test_outputs_that_are_looked_at_once_more_are_not_counted(threads):
    both, x = beside(threads, Net(), None, PipelineDriverFillDrain), torch.randn(6, 2, 4, 4)
    both.driver.run(3, x)
    count(both.plain, [(each,) for each in x.split(2)])
    assert_statistics(both.driver.state_dict(), both.plain)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11), (torch.float32, 1e-5)]
)
def test_low_precision_and_autocast(threads, dtype, tolerance):
    """Rounded to the dtype once, at the end. In float16, the mean of a micro-batch would be off by more than the variance."""
    model, x = nn.Sequential(nn.Identity(), nn.BatchNorm1d(4, momentum=1.0), nn.Identity()), torch.randn(64, 4) / 8 + 16
    model, x = model.to(dtype), x.to(dtype)
    mean, variance = x.double().mean(0), x.double().var(0)
    pipe = pippy.Pipe.from_sequential(pippy.convert_deferred_batch_norm(model))
    driver = PipelineDriver1F1B(pipe, threads, world_size=3)
    # float16 is no dtype that autocast to bfloat16 takes
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype is not torch.float16):
        driver.run(16, x)
    state = driver.state_dict()
    assert state["1.running_var"].dtype == dtype
    torch.testing.assert_close(state["1.running_mean"].double(), mean, rtol=tolerance, atol=0)
    torch.testing.assert_close(state["1.running_var"].double(), variance, rtol=tolerance, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_compiled_stages(threads, dtype):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(dtype)
    x, target = torch.randn(8, 4).to(dtype), torch.randn(8, 4).to(dtype)
    pipe = pippy.Pipe.from_sequential(pippy.convert_deferred_batch_norm(model), nn.MSELoss())
    states = []
    for compile in (False, {"backend": "aot_eager", "fullgraph": True}):
        driver = PipelineDriver1F1B(pipe, threads, compile=compile, checkpoint={1: "always"}, world_size=1)
        for _ in range(2):
            driver.run(2, x, target)
        with torch.no_grad():
            driver.run(2, x * 2, target)
        states.append(driver.state_dict())
        driver.close()
    torch.testing.assert_close(states[1], states[0])


def test_a_norm_that_two_stages_call_is_refused(threads):
    with pytest.raises(SharedParameterError, match=r"'norm' \(DeferredBatchNorm\) updates its running statistics"):
        pipeline(pippy.convert_deferred_batch_norm(NormTwice()))
    pipe = pipeline(pippy.convert_deferred_batch_norm(NormTwice()).eval())
    driver = PipelineDriver1F1B(pipe, threads, compile="graphs")
    driver.run(2, torch.randn(6, 4))
    before = driver.state_dict()
    pipe.train()
    with pytest.raises(StepError, match=r"changed 'norm\.\w+'.* in place, which other stages hold too"):
        driver.run(2, torch.randn(6, 4))
    assert all(torch.equal(each, before[name]) for name, each in driver.state_dict().items())


NORMS = {
    "a batch norm": (nn.BatchNorm1d(4), True),
    "deferred": (pippy.convert_deferred_batch_norm(nn.BatchNorm1d(4)), False),  # the advice
    "in evaluation": (nn.BatchNorm1d(4).eval(), False),  # too
    "without statistics": (nn.BatchNorm1d(4, track_running_stats=False), False),
}


@pytest.mark.parametrize("norm, warns", NORMS.values(), ids=NORMS)
def test_statistics_by_micro_batches_are_warned_of_once(threads, norm, warns):
    """Evaluation differs by them from that of plain training."""
    x = torch.randn(8, 4, dtype=torch.get_default_dtype())
    model = nn.Sequential(nn.Linear(4, 4), copy.deepcopy(norm).to(x.dtype), nn.Linear(4, 4))
    driver = pippy.PipelineDriver1F1B(pippy.Pipe.from_sequential(model, nn.MSELoss()), threads)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        driver.run(1, x, x)  # the whole mini-batch
        for _ in range(2):
            driver.run(2, x, x)
        with torch.no_grad():
            driver.run(2, x, x)
    said = [str(each.message) for each in caught if "running statistics" in str(each.message)]
    assert len(said) == warns
    assert all("'1' changes" in each and "each of 2 micro-batches" in each for each in said)
    assert all("pippy.convert_deferred_batch_norm(model)" in each for each in said)
