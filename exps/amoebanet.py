"""AmoebaNet-D of the GPipe and torchgpipe papers: its parameters, and its speed-ups, beside the papers' tables.

Question: do the published counts of parameters come out; and which speed-ups does the simulation give, from layers measured
          here, for 2, 4 and 8 workers and 1, 4 and 32 micro-batches?
Command:  python -m exps.amoebanet                 (from the root of the repository; parts: parameters speed steps)
Method:   as exps/unet.py does it: fill-drain is simulated with the times of the layers of a model of --width on --rows
          pictures, each timed alone. With one micro-batch everything is computed again, else all but the last one, as in the
          paper. steps: a small model really runs on two workers.
Finding:  all five counts of parameters are the published ones. Speed-ups, from layers measured here, for 1, 4 and 32
          micro-batches (the paper's): 2 workers 1, 1.53, 1.63 (1, 1.54, 1.77); 4 workers 1.09, 2.25, 2.89 (1.00, 1.67, 2.71);
          8 workers 1.17, 3.04, 5.12 (0.93, 2.62, 4.95). docs/memory.md says what differs, and why.
          steps --width 32 --side 96 --rows 4 --rounds 5, on two virtual cores: with one micro-batch, all computed again, two
          workers grow by 326 and 237 MB; with 8, all but the last, by 144 and 163; by 325 and 254 if nothing is. Steps take
          0.87 s (quartiles 0.86 to 0.87), 1.07 (1.02 to 1.10), 0.70 (0.70 to 0.70): speed-ups of 1, 0.81, 1.24,
          where 1, 1.56, 2.10 are simulated, from layers that are timed alone. Simulated with passes as long as they were in
          the step, it takes 0.991, 0.983 and 0.962 of the measured step. So passes take longer beside a neighbour than alone:
          the cores share the way to memory, for which most of these layers wait.
"""

from functools import cache

import torch
from torch import nn

from exps.seeds.amoebanet_model import AmoebaNet
from exps.seeds.command import Sizes, run_parts
from exps.seeds.layer_costs import LayerCosts, measured
from exps.seeds.layers import parameters, pictures, printed
from exps.seeds.settings import Setting, speed_table
from exps.seeds.steps import Steps, steps_table

LOSS = nn.CrossEntropyLoss()
CELLS, CLASSES = 18, 1000
PARAMETERS = {(18, 208): "81.5M", (18, 416): "319.0M", (18, 544): "542.7M", (36, 544): "1.06B", (72, 512): "1.84B"}
BALANCES = {  # of Table 2: (workers, micro-batches)
    (2, 1): [7, 17],
    (2, 4): [9, 15],
    (2, 32): [9, 15],
    (4, 1): [3, 4, 5, 12],
    (4, 4): [3, 6, 7, 8],
    (4, 32): [3, 6, 7, 8],
    (8, 1): [2, 2, 2, 2, 2, 3, 4, 7],
    (8, 4): [2, 2, 2, 3, 3, 4, 4, 4],
    (8, 32): [2, 2, 2, 3, 3, 4, 4, 4],
}
SPEEDS = dict(zip(BALANCES, (1, 1.54, 1.77, 1.00, 1.67, 2.71, 0.93, 2.62, 4.95)))


def setting(workers: int, chunks: int) -> Setting:
    return Setting(BALANCES[workers, chunks], chunks, "always" if chunks == 1 else "except_last")


def named(workers: int, chunks: int) -> str:
    return f"n={workers} m={chunks}"


def parameters_part(sizes: Sizes) -> None:
    print(f"{'(L, D)':12}{'published':>10}{'ours':>10}")
    for size, published in PARAMETERS.items():
        print(f"{size!s:12}{published:>10}{printed(parameters(AmoebaNet(*size, device='meta'))):>10}")


@cache
def costs_of(width: int, rows: int, side: int, repeat: int) -> LayerCosts:
    return measured(AmoebaNet(CELLS, width), pictures(rows, side), repeat)


def costs(sizes: Sizes) -> LayerCosts:
    return costs_of(*(sizes[name] for name in ("width", "rows", "side", "repeat")))


def speed_part(sizes: Sizes) -> None:
    settings = {named(*each): setting(*each) for each in BALANCES}
    published = {named(*each): float(speed) for each, speed in SPEEDS.items()}
    print("\n".join(speed_table(settings, published, costs(sizes))))


def steps_part(sizes: Sizes) -> None:
    """AmoebaNet-D of fewer channels really runs, on two workers."""
    torch.manual_seed(0)
    layers, chunks = costs(sizes), sizes["chunks"]
    rows = sizes["rows"] * chunks
    settings = {
        "n=2 m=1": setting(2, 1).balanced(layers),
        f"n=2 m={chunks}": Setting(BALANCES[2, 4], chunks, "except_last").balanced(layers),
        "never": Setting(BALANCES[2, 4], chunks).balanced(layers),
    }
    batch = pictures(rows, sizes["side"]), torch.randint(CLASSES, (rows,))
    steps = Steps(lambda: AmoebaNet(CELLS, sizes["width"]), LOSS, batch)
    print("\n".join(steps_table(steps, settings, layers, sizes["rounds"])))


PARTS = {"parameters": parameters_part, "speed": speed_part, "steps": steps_part}
USUAL = {"width": 128, "side": 224, "rows": 2, "repeat": 3, "chunks": 8, "rounds": 5}
TINY = {"width": 16, "side": 64, "rows": 2, "repeat": 2, "chunks": 2, "rounds": 1}


def main(arguments: list[str] | None = None) -> None:
    run_parts(__doc__, PARTS, USUAL, TINY, arguments)


if __name__ == "__main__":
    main()
