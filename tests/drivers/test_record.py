"""A recorded step: what was computed when, by all workers, on one clock."""

import torch
from torch import nn

from pippy import PipelineDriver1F1B, pipeline
from pippy.drivers.schedules import render_svg
from pippy.drivers.schedules.instructions import Compute
from tests.drivers.models import Chain


def test_a_recorded_step_has_all_computations_in_the_order_of_the_program(cluster):
    driver = PipelineDriver1F1B(pipeline(Chain(3), nn.MSELoss()), cluster)
    x, target = torch.randn(8, 8), torch.randn(8, 8)
    driver.run(4, x, target)
    with driver.record(limit=2) as recording:
        for _ in range(3):
            driver.run(4, x, target)
    driver.run(4, x, target)
    assert len(recording.steps) == 2
    assert recording.dropped == 1
    step = recording.steps[-1]
    assert [[span.compute for span in spans] for spans in step.timeline.spans] == [
        list(computes) for computes in driver.program(4).computations
    ]
    assert {name: len(times) for name, times in step.durations().items()} == {
        f"{op}{stage}": 4 for op in "FB" for stage in range(3)
    }
    assert "<svg" in render_svg(step.timeline)
    driver.close()


def test_the_clocks_of_the_workers_agree(cluster):
    """What a stage needs was made before it began, by whichever worker."""
    driver = PipelineDriver1F1B(pipeline(Chain(3), nn.MSELoss()), cluster)
    with driver.record() as recording:
        driver.run(4, torch.randn(8, 8), torch.randn(8, 8))
    times = {str(span.compute): span for spans in recording.steps[0].timeline.spans for span in spans}
    assert 0 < min(span.start for span in times.values()) < recording.steps[0].makespan
    for microbatch in range(4):
        for stage in range(2):
            assert times[f"F{stage}.{microbatch}"].end <= times[f"F{stage + 1}.{microbatch}"].start
            assert times[f"B{stage + 1}.{microbatch}"].end <= times[f"B{stage}.{microbatch}"].start
    assert all(isinstance(span.compute, Compute) for span in times.values())
    driver.close()
