"""schedule="auto": what it measures, what it chooses, and that the numbers never show it."""

import copy
import re
import time
from contextlib import closing

import pytest
import torch
from torch import nn

from exps.bubbles import ROWS, WIDTH, Sleeper
from pippy import Pipe, PipelineDriver, pipeline
from pippy.drivers.base.errors import DriverError, StepError
from pippy.drivers.plan import Costs, make_schedule, simulate_with
from pippy.drivers.plan.cost.held_bytes import peak_bytes
from pippy.drivers.plan.language.errors import ScheduleError
from pippy.drivers.plan.orders.registry import REGISTRY
from pippy.drivers.worker.compiled.stage_graphs import StageGraphs
from tests.drivers.models import Chain, TiedLanguage, cross_entropy, tokens

MEASURED = 6


def stepped(driver, steps, chunks, *arguments):
    """Steps with their gradients: the losses, the gradients, and the peaks of the workers."""
    found = []
    for _ in range(steps):
        driver.zero_grad()
        step = driver.run_async(chunks, *arguments)
        loss = step.result()
        found.append((loss, driver.gradients(), step.peak_live))
    return found


def best_by_hand(costs, placement, chunks):
    """The shortest step of any schedule on a placement."""
    found = {}
    for name, entry in REGISTRY.items():
        options = {"costs": costs} if name == "list" else {}
        try:
            if entry.training:
                made = make_schedule(name, workers=placement.workers, chunks=chunks, placement=placement, **options)
                found[name] = simulate_with(made, costs).makespan
        except ScheduleError:
            continue
    return min(found.values())


# F, I and W of each stage, in milliseconds
UNEVEN = [(2, 2, 2), (2, 2, 2), (8, 7, 6), (2, 2, 2)]
LONG_WEIGHTS = [(2, 2, 8)] * 4
NO_WEIGHTS = [(4, 4, 0)] * 4


@pytest.mark.parametrize("times", [UNEVEN, LONG_WEIGHTS, NO_WEIGHTS], ids=["uneven", "long W", "no W"])
@pytest.mark.parametrize("workers", [4, 2])
def test_the_choice_is_about_the_best_for_the_times_that_the_stages_really_take(threads, times, workers):
    """The stages sleep, so what they take is known without measuring."""
    chunks, stages = 6, [Sleeper(*(each / 1e3 for each in stage)) for stage in times]
    driver = PipelineDriver(
        Pipe.from_sequential(nn.Sequential(*stages), nn.MSELoss()), threads, schedule="auto", world_size=workers
    )
    x = target = torch.randn(chunks * ROWS, WIDTH)
    for _ in range(MEASURED):
        driver.run(chunks, x, target)
    forward, inputs, weights = ([each / 1e3 for each in column] for column in zip(*times))
    whole = [i + w for i, w in zip(inputs, weights)]
    # nothing asks for the gradient of the first stage's inputs, so all of its backward is W
    true = Costs(forward, [0.0, *inputs[1:]], [whole[0], *weights[1:]], whole)
    choice = driver.choice
    assert simulate_with(choice.program, true).makespan <= 1.12 * best_by_hand(true, driver.placement, chunks)
    with driver.record() as recording:
        driver.run(chunks, x, target)
    step = recording.steps[0]
    assert step.program.computations == choice.program.computations == driver.program(chunks).computations


@pytest.mark.parametrize("workers", [4, 2])
def test_losses_and_gradients_are_the_plain_model_s_all_along(threads, workers, in_float64, seeded):
    model = TiedLanguage()
    plain = copy.deepcopy(model)
    driver = PipelineDriver(pipeline(model, cross_entropy), threads, schedule="auto", world_size=workers)
    x, target = tokens(10)
    expected = cross_entropy(plain(x), target)
    expected.backward()
    schedules = set()
    first = None
    for _ in range(MEASURED + 2):
        schedules.add(driver.program(4).computations)
        ((loss, gradients, _),) = stepped(driver, 1, 4, x, target)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, plain.get_parameter(name).grad, rtol=1e-10, atol=1e-12)
        first = first or (loss, gradients)
        assert torch.equal(loss, first[0])
        assert all(torch.equal(gradients[name], first[1][name]) for name in gradients)
    assert driver.choice is not None and len(schedules) >= 2


def test_no_step_holds_more_than_max_live(threads):
    driver = PipelineDriver(pipeline(Chain(4), nn.MSELoss()), threads, schedule="auto", max_live=[2, 3, 1, 2])
    x = torch.randn(8, 8)
    for _, _, peaks in stepped(driver, MEASURED + 2, 8, x, x):
        assert [peaks[rank] <= most for rank, most in zip(driver.ranks, [2, 3, 1, 2])] == [True] * 4
    assert driver.choice.schedule == "list"


def most_held(driver, steps, chunks, x):
    """The most bytes that each worker is measured to hold in steps."""
    with driver.record(memory=True) as recording:
        for _ in range(steps):
            driver.zero_grad()
            driver.run(chunks, x, x)
    return [max(max(step.noted[worker].held[0]) for step in recording.steps) for worker in range(len(driver.ranks))]


def test_no_step_holds_more_activations_than_memory_limit(threads, in_float64):
    """Also the first one. Beside activations, workers hold parameters and their gradients."""
    pipe, x, state = pipeline(Chain(4), nn.MSELoss()), torch.randn(64, 8), 2 * (8 * 8 + 8) * 8
    with closing(PipelineDriver(pipe, threads, schedule="1f1b")) as driver:
        plain = driver.memory(8, x, x)
        limits = [most - 600 * (worker == 0) for worker, most in enumerate(plain.peaks)]
        assert most_held(driver, 1, 8, x)[0] > limits[0]
    limits = [limit - state for limit in limits]
    with closing(PipelineDriver(pipe, threads, schedule="auto", memory_limit=limits)) as driver:
        held = most_held(driver, MEASURED + 1, 8, x)
        assert all(most <= limit + state for most, limit in zip(held, limits))
        assert all(
            map(int.__le__, driver.choice.chosen.peak_bytes, limits)
        )  # by what steps take, another program is chosen


def test_graphs_are_measured_as_they_run_later(threads, monkeypatch):
    """And not while they are recorded, as they are again for the shapes of the second and the fourth step."""
    recorded = StageGraphs._recorded

    def slowly(*given):
        time.sleep(0.2)
        return recorded(*given)

    monkeypatch.setattr(StageGraphs, "_recorded", slowly)
    model = nn.Sequential(*(layer for _ in range(2) for layer in (nn.LayerNorm(256), nn.Linear(256, 256))))
    driver = PipelineDriver(
        pipeline(model, nn.MSELoss(), split=["2"]), threads, schedule="auto", compile="graphs", check=False
    )
    x = torch.randn(64, 256)
    for rows in (64, 32, 64, 48, *[64] * 4):
        assert driver.choice is None
        driver.run(2, x[:rows], x[:rows])
    costs = driver.choice.chosen.micro_batch.costs
    assert max(*costs.forward, *costs.backward_input, *costs.backward_weight, *costs.backward) < 0.1
    assert min(costs.backward_weight) > 1e-5, (
        "the gradients of weights, which autograd computes in I where layers are small"
    )


def test_a_limit_that_zb_v_breaks_leaves_v_half_and_v_min(threads, in_float64):
    pipe, x = pipeline(Chain(8), nn.MSELoss()), torch.randn(64, 8)
    with closing(PipelineDriver(pipe, threads, schedule="v_half", world_size=4)) as driver:
        plain = driver.memory(8, x, x)
    limits = peak_bytes(plain.program, plain.sizes.activations)
    driver = PipelineDriver(pipe, threads, schedule="auto", world_size=4, memory_limit=limits, checkpoint="never")
    for _ in range(MEASURED + 1):
        driver.run(8, x, x)
    assert {"v_half", "v_min"} <= {each.name for each in driver.choice.candidates}
    assert "bytes on worker" in dict(driver.choice.left_out)["zb_v"]
    assert driver.choice.schedule in ("v_half", "v_min", "list")
    assert all(map(int.__le__, driver.choice.chosen.peak_bytes, limits))


def test_a_limit_that_nothing_keeps_is_refused_before_anything_is_sent(threads):
    pipe, x = pipeline(Chain(4), nn.MSELoss()), torch.randn(8, 8)
    driver = PipelineDriver(pipe, threads, schedule="auto", memory_limit=100)
    before = list(threads.session.counts)
    with pytest.raises(
        DriverError, match=r"memory_limit=100 is too little: .* What would fit: memory_limit="
    ) as refused:
        driver.run(4, x, x)
    assert threads.session.counts == before
    driver.close()
    (advised,) = re.findall(r"memory_limit='(.*?)'", str(refused.value))
    with closing(PipelineDriver(pipe, threads, schedule="auto", memory_limit=advised)) as driver:
        assert torch.isfinite(driver.run(4, x, x))


def test_each_number_of_micro_batches_is_measured_once(threads):
    driver = PipelineDriver(pipeline(Chain(3), nn.MSELoss()), threads, schedule="auto")
    x = torch.randn(8, 8)
    with torch.no_grad():
        driver.run(4, x, x)  # not a step that could be measured
    for _ in range(MEASURED):
        assert driver.choice is None
        driver.run(4, x, x)
    choice = driver.choice
    assert choice.program.chunks == 4
    driver.run(8, x, x)
    assert driver.choice is None
    for _ in range(MEASURED - 1):
        driver.run(8, x, x)
    assert driver.choice.program.chunks == 8
    driver.run(4, torch.randn(12, 8), torch.randn(12, 8))  # other shapes
    assert driver.choice is choice
    before = list(threads.session.counts)
    driver.run(4, x, x)
    assert [after - was for after, was in zip(threads.session.counts, before)] == [1, 1, 1, 0]


def test_steps_that_are_sent_ahead_are_measured_too(threads):
    driver = PipelineDriver(pipeline(Chain(3), nn.MSELoss()), threads, schedule="auto")
    x = torch.randn(8, 8)
    losses = [step.result() for step in [driver.run_async(4, x, x) for _ in range(MEASURED + 4)]]
    assert driver.choice is not None
    assert all(torch.equal(loss, losses[0]) for loss in losses)


def test_the_recording_of_the_user_has_every_step(threads):
    driver = PipelineDriver(pipeline(Chain(3), nn.MSELoss()), threads, schedule="auto", memory_limit=10**6)
    x = torch.randn(8, 8)
    with driver.record() as recording:
        for _ in range(MEASURED + 1):
            driver.run(4, x, x)
    assert len(recording.steps) == MEASURED + 1
    assert recording.steps[-1].program.schedule == driver.choice.schedule
    assert max(driver.choice.chosen.peak_bytes) > 0


def test_a_step_that_fails_is_measured_again(threads):
    driver = PipelineDriver(pipeline(Chain(3), nn.MSELoss()), threads, schedule="auto")
    x = torch.randn(8, 8)
    for _ in range(MEASURED):
        with pytest.raises(StepError):
            driver.run(4, torch.randn(8, 9), x)
        assert driver.choice is None
        assert driver.run(4, x, x).shape == ()
    assert driver.choice is not None
    assert torch.isfinite(driver.run(4, x, x))


@pytest.mark.parametrize("checkpoint", ["always", "except_last", {1: "always"}])
def test_forwards_are_computed_again_in_the_measured_steps_and_in_what_is_chosen(threads, in_float64, checkpoint):
    pipe, x = pipeline(Chain(3), nn.MSELoss()), torch.randn(8, 8)
    with closing(PipelineDriver(pipe, threads, schedule="1f1b")) as driver:
        ((loss, gradients, _),) = stepped(driver, 1, 4, x, x)
    driver = PipelineDriver(pipe, threads, schedule="auto", checkpoint=checkpoint, memory_limit=4000)
    for _ in range(MEASURED + 1):
        ((again, same, _),) = stepped(driver, 1, 4, x, x)
        program = driver.program(4)
        modes = checkpoint if isinstance(checkpoint, dict) else dict.fromkeys(range(3), checkpoint)
        for stage, mode in modes.items():
            assert len([each for each in program.checkpointed if each[0] == stage]) >= (4 if mode == "always" else 0)
        assert torch.equal(loss, again) and all(torch.equal(gradients[name], same[name]) for name in gradients)
    choice = driver.choice
    assert all(each.program.checkpointed for each in choice.candidates if each.name == "fill_drain")
    assert choice.chosen.peak_bytes == peak_bytes(choice.program, driver.memory(4, x, x).sizes.activations)
