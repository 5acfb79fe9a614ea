"""A small language model: marked, split, drawn, and trained on a cluster of workers beside the same model in plain PyTorch.

Question: do four workers, driven by this script, compute what the plain model computes?
Command:  make demo, or python exps/demo.py --workers 2 --steps 10
Finding:  losses, norms of gradients and, in the end, all parameters are equal to rounding; the drawings, a trace and the
          report of the last steps are in out/.
"""

import argparse
import copy
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from pippy import Pipe, PipelineDriver1F1B, cluster, pipe_split, pipeline
from pippy.drivers.plan import render_svg, render_text, simulate
from pippy.drivers.report.record import Recording

RECORDED = 10  # of the last steps
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


def main(workers: int = STAGES, steps: int = 40) -> None:
    """Show the Pipe and the schedule, train, and write the report."""
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
    parser.add_argument("--workers", type=int, default=STAGES, choices=range(1, STAGES + 1))
    parser.add_argument("--steps", type=int, default=40)
    main(**vars(parser.parse_args()))
