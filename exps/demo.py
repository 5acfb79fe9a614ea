"""A small language model: marked, split, drawn, and trained on a cluster of workers beside the same model in plain PyTorch.

Question: do workers, driven by this script, compute what the plain model computes, and how long do they take?
Command:  make demo, or python exps/demo.py --workers 2 --steps 10
Finding:  losses, norms of gradients and, in the end, all parameters are equal to rounding. The model is small, so that the
          demo is short: a worker computes for less time than its messages take, and the plain model is faster. The drawings,
          a trace and the report of the last steps are in out/.
"""

import argparse
import copy
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from pippy import Pipe, PipelineDriver1F1B, cluster, pipe_split, pipeline
from pippy.drivers.plan import render_svg, render_text, simulate
from pippy.drivers.report.record import Recording

RECORDED = 10  # of the last steps
PAIRS = 30  # of a step on the workers and one of the plain model, timed at the end
BUSY = 0.3  # cores that others use; with fewer, the times are those of a machine which has nothing else to do
OUT = Path("out")
VOCABULARY, WIDTH, LENGTH, BATCH, CHUNKS, STAGES = 32, 32, 16, 32, 4, 4


class Block(nn.Module):
    """A transformer block: causal attention, then two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.size()
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 2, -1).permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """The embedding and the head share a weight, and a skip connection goes from the embedding to the last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(STAGES))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.1)
        nn.init.normal_(self.position.weight, std=0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded = self.embed(tokens) + self.position(torch.arange(tokens.size(1), device=tokens.device))
        x = embedded
        for block in self.blocks[:-1]:
            x = block(x)
            pipe_split()
        return self.head(self.blocks[-1](x) + embedded)


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy over all positions."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch_of_counting() -> tuple[torch.Tensor, torch.Tensor]:
    """Each sequence counts upwards in steps of its own size; the target is the next token."""
    start, step = torch.randint(0, VOCABULARY, (BATCH, 1)), torch.randint(1, 4, (BATCH, 1))
    tokens = (start + step * torch.arange(LENGTH + 1)) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


def show(pipe: Pipe) -> None:
    """Print the Pipe, and write its drawings."""
    tokens, targets = batch_of_counting()
    drawing = pipe.draw(tokens, targets)
    graph = "".join(str(pipe).partition("def forward")[1:])
    print(f"The Pipe, its stages called and its backward written out:\n\n{graph.strip()}\n")
    print(f"The values that stages send to each other:\n\n{drawing}\n")
    print(f"Its stages:\n\n{drawing.table()}\n")
    _draw("demo.svg", drawing.svg())


def show_schedule(driver: PipelineDriver1F1B) -> None:
    """Print the schedule of the workers."""
    program = driver.program(CHUNKS)
    result = simulate(program)
    print(
        f"\nThe schedule: a line for each worker, F forward and B backward of a micro-batch\n\n{render_text(program)}\n"
    )
    _draw("demo_schedule.svg", render_svg(result.timeline))
    order = " ".join(str(each) for each in program.orders[0][:16])
    print(f"\nWorker 0 gets this list once, and then one message in each step:\n\n{order} ...\n")


def _draw(name: str, svg: str) -> None:
    OUT.mkdir(exist_ok=True)
    path = OUT / name
    path.write_text(svg)
    print(f"Drawn in {path}")


def train(driver: PipelineDriver1F1B, plain: nn.Module, steps: int) -> None:
    """Train both with the same steps, and print both losses. A difference beyond rounding ends the demo with an error."""
    ours = driver.instantiate_optimizer(torch.optim.AdamW, lr=3e-3)
    theirs = torch.optim.AdamW(plain.parameters(), lr=3e-3)
    print("step   workers    plain")
    with ExitStack() as stack:
        for step in range(steps + 1):
            if step == max(0, steps + 1 - RECORDED):
                recording = stack.enter_context(driver.record())
            tokens, targets = batch_of_counting()
            loss, norm = driver.run(CHUNKS, tokens, targets), driver.clip_grad_norm_(1.0)
            expected = loss_fn(plain(tokens), targets)
            expected.backward()
            expected_norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            torch.testing.assert_close((loss, norm), (expected.detach(), expected_norm), rtol=1e-8, atol=0)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
            progress(step, steps, f"{loss:.3f}")
            if step % 10 == 0:
                print(f"{step:4}   {loss:.6f}   {expected:.6f}   {'█' * round(loss.item() * 12)}")
    torch.testing.assert_close(driver.state_dict(), plain.state_dict(), rtol=1e-6, atol=1e-8)
    print("\nThe parameters on the workers are those of the plain model.")
    report(recording)
    compare_times(driver, plain)


def compare_times(driver: PipelineDriver1F1B, plain: nn.Module) -> None:
    """Print the time of a step, forward and backward, beside the plain model's: they take turns, so both have the same load."""
    batches = [batch_of_counting() for _ in range(PAIRS)]
    others, ours, theirs = cores_in_use(), [], []
    for tokens, targets in batches:
        ours.append(seconds(lambda: driver.run(CHUNKS, tokens, targets)))  # noqa: B023 - it is called here
        theirs.append(seconds(lambda: loss_fn(plain(tokens), targets).backward()))  # noqa: B023
    low, ratio, high = statistics.quantiles((mine / plains for mine, plains in zip(ours, theirs)), n=4)
    workers = len(driver.program(CHUNKS).orders)
    print(
        f"\nThe time of a step, the median of {PAIRS}: {statistics.median(ours) * 1e3:.1f} ms on {workers} workers, "
        f"{statistics.median(theirs) * 1e3:.1f} ms in plain PyTorch on one core. The ratio of the two, taken in turns: "
        f"{ratio:.2f}, and between {low:.2f} and {high:.2f} in half of the turns."
    )
    if others > BUSY:
        print(
            f"Other programs used {others:.1f} of the {os.cpu_count()} cores just before. Workers that wait for a core make "
            "each other wait, so on a machine that has nothing else to do the ratio is smaller."
        )
    if ratio > 1:
        print("So small a model is faster in one process. The README has models that are large enough for a pipeline.")


def cores_in_use(during: float = 0.5) -> float:
    """How many cores of the machine compute while this process and its workers wait: for other programs."""
    began, before = time.perf_counter(), _processor_seconds()
    time.sleep(during)
    return (_processor_seconds() - before) / (time.perf_counter() - began)


def _processor_seconds() -> float:
    """What all processors have computed since the machine started, as Linux tells it."""
    user, nice, system, _idle, _wait, irq, softirq, stolen, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
    return (user + nice + system + irq + softirq + stolen) / os.sysconf("SC_CLK_TCK")


def seconds(step: Callable[[], object]) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def progress(step: int, steps: int, loss: str) -> None:
    """A progress bar, if stderr is a terminal; the next line of the table replaces it."""
    if sys.stderr.isatty():
        bar = "━" * (30 * step // max(steps, 1))
        end = "\r\x1b[K" if step % 10 == 9 or step == steps else ""
        print(f"\r\x1b[K{bar:╌<30} step {step} of {steps}, loss {loss}", end=end, file=sys.stderr, flush=True)


def report(recording: Recording) -> None:
    """Write a report, a trace and a picture of the last steps, and print where the time of the typical one went."""
    step = recording.typical
    step.save_svg(OUT / "demo_timeline.svg")
    recording.save_trace(OUT / "demo_trace.json")
    recording.report(OUT / "demo_report.html", title="The demo's last steps")
    number, rates = recording.steps.index(step), step.batch.per_second(step.makespan)
    print(f"\nWhere the time went, in step {number} of the last {len(recording.steps)}, of median length ({rates}):\n")
    for sentence in step.findings():
        print(f"- {sentence}")
    print(
        f"\nThe report, for a browser: {OUT / 'demo_report.html'}. The same as a picture: {OUT / 'demo_timeline.svg'}; "
        f"for ui.perfetto.dev: {OUT / 'demo_trace.json'}"
    )


def workers_here() -> int:
    """As many workers as this process may use cores, but at least two, and no more than there are stages."""
    return min(STAGES, max(2, len(os.sched_getaffinity(0))))


def main(workers: int, steps: int) -> None:
    """Show the Pipe and the schedule, train, write the report, and time a step."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the workers need the cores
    torch.set_default_dtype(torch.float64)  # in float64 a wrong gradient cannot be mistaken for rounding
    model = Model()
    plain = copy.deepcopy(model)
    pipe = pipeline(model, loss_fn)
    show(pipe)
    began = time.perf_counter()
    with cluster(workers, threads=1) as opened:
        print(f"\n{opened}, started in {time.perf_counter() - began:.1f} s")
        driver = PipelineDriver1F1B(pipe, opened)
        show_schedule(driver)
        train(driver, plain, steps)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=workers_here(), choices=range(1, STAGES + 1))
    parser.add_argument("--steps", type=int, default=40)
    main(**vars(parser.parse_args()))
