"""Are workers idle for as long as the simulation says?

Question: with more stages than cores, how far is a measured step, and each worker's idle time, from `simulate`?
Command:  python -m exps.bubbles                     (from the root of the repository; --workers, --chunks, --schedules)
Method:   the stages of this experiment SLEEP: each for a fixed time in its forward, in the half of its backward that
          computes the gradients of its inputs, and in the half that computes those of its weights. They compute almost
          nothing, so that sixteen of them can run on two cores; the experiment measures the runtime, not arithmetic.
          The first stage's inputs need no gradient, so its whole backward is W, also in the simulation. The workers'
          records time the step; the figure is the median of several steps. The last column compares the step with a
          simulation that has the median time of each pass as it was measured: the sleep, the time by which a sleep lasts
          longer than asked, the layer's products, and the wait for one of the two cores.
Finding:  two cores; 2 steps of 2, 4 and 8 workers, 1 step of 16. A step is 1.8 to 2.7 % longer than simulated with 2, 4 and 8
          workers, 2.3 to 3.0 with 16, under every schedule; a worker's idle time is off by 0.4 to 1.8 % of the step. A
          step is 0.3 to 1.3 % longer than a simulation with the measured times of the passes. So most of the difference
          is inside the passes, about 1 ms in each: a sleep that lasts longer than asked, the layer's products, the wait
          for one of two cores. With passes of 20 ms this millisecond is 5 to 13 % of a step.
          v_half, v_min and eager_1f1b, 2 steps of 4 and 8 workers, while other processes kept both cores busy: 6.3 and 7.9 %
          longer than simulated, 6.4 and 8.8, 5.0 and 6.7. zb_v, just before: 6.4 and 9.7. So they keep to the simulation
          as well as the others do.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from torch import nn

from pippy import Pipe, PipelineDriver, cluster
from pippy.drivers.plan import simulate
from pippy.drivers.plan.cost.simulate import Timeline

WIDTH, ROWS = 128, 128  # just so many products that a weight's gradient is worth putting off to W
TIMES = (0.048, 0.050, 0.046)  # of a stage: F, I, W
TWO_STAGES = ("interleaved_1f1b", "looped_bfs", "zb_v", "v_half", "v_min", "dualpipe_v")
SCHEDULES = ("fill_drain", "1f1b", "eager_1f1b", "zb_h1", "zb_h2", *TWO_STAGES)


class SleepingGradient(torch.autograd.Function):
    """The identity; its backward sleeps."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Sleeper(nn.Module):
    """A stage that sleeps for given times. It has one layer, just large enough that W computes its weight's gradient."""

    def __init__(self, forward: float, inputs: float, weights: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seconds = forward, inputs, weights
        self.accumulates: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        forward, inputs, weights = self.seconds
        if self.accumulates is None and torch.is_grad_enabled():
            # The gradient of the weight arrives in W, and its arrival takes that long.
            self.accumulates = torch.autograd.graph.get_gradient_edge(self.linear.weight).node
            self.accumulates.register_prehook(lambda _: time.sleep(weights))
        time.sleep(forward)
        return SleepingGradient.apply(self.linear(x), inputs)


def idle(timeline: Timeline) -> list[float]:
    """How long each worker computes nothing, up to the end of the step."""
    return [float(timeline.makespan) - sum(float(span.duration) for span in spans) for spans in timeline.spans]


def measure(opened: Any, schedule: str, workers: int, chunks: int, steps: int) -> tuple[float, float, float, float]:
    """The measured makespan, the one simulated from the sleeps, the largest difference of a worker's idle time from it, and
    the makespan simulated from how long the passes really took; in seconds."""
    share = 2 if schedule in TWO_STAGES else 1
    forward, inputs, weights = TIMES
    pipe = Pipe.from_sequential(
        nn.Sequential(*(Sleeper(forward, inputs, weights) for _ in range(workers * share))), nn.MSELoss()
    )
    driver = PipelineDriver(pipe, opened, schedule=schedule, world_size=workers)
    x = target = torch.zeros(chunks * ROWS, WIDTH)
    driver.run(chunks, x, target)
    with driver.record() as recording:
        for _ in range(steps):
            driver.run(chunks, x, target)
    stages = pipe.num_stages
    expected = simulate(
        driver.program(chunks),
        forward=[forward] * stages,
        backward_input=[0.0] + [inputs] * (stages - 1),
        backward_weight=[inputs + weights] + [weights] * (stages - 1),
        backward=[inputs + weights] * stages,
    )
    spans = [float(step.timeline.makespan) for step in recording.steps]
    median = min(recording.steps, key=lambda step: abs(float(step.timeline.makespan) - statistics.median(spans)))
    apart = max(abs(mine - float(theirs)) for mine, theirs in zip(idle(median.timeline), expected.idle))
    driver.close()
    return statistics.median(spans), float(expected.makespan), apart, float(median.predicted.makespan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--chunks", type=int, default=0, help="micro-batches; left out, two for each worker")
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES))
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    print(f"stages that sleep: F, I, W {', '.join(f'{each * 1e3:g} ms' for each in TIMES)}")
    print(
        f"{'schedule':18}{'workers':>8}{'chunks':>8}{'simulated':>12}{'measured':>12}{'off':>8}"
        f"{'idle off':>10}{'of passes as long':>19}"
    )
    for workers in options.workers:
        with cluster(workers, threads=1) as opened:
            for schedule in options.schedules:
                chunks = options.chunks or 2 * workers
                measured, expected, apart, passes = measure(opened, schedule, workers, chunks, options.steps)
                print(
                    f"{schedule:18}{workers:8}{chunks:8}{expected * 1e3:9.1f} ms{measured * 1e3:9.1f} ms"
                    f"{measured / expected - 1:8.1%}{apart / expected:10.1%}{measured / passes - 1:19.1%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
