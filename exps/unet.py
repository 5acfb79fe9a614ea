"""The U-Net of the torchgpipe paper: its parameters, the bytes between its stages, and its speed, beside the paper's tables.

Question: do the published counts of parameters come out; how many bytes do skips save that go straight to their stage (portals,
          in the paper); which speed-ups does the simulation give from layers measured here; what would a step hold; and what
          do two workers really do?
Command:  python -m exps.unet                      (from the root of the repository; --help names parts and sizes)
Method:   parameters, wires, memory: a model without data (the meta device), cut with the paper's balances, and counted.
          speed: each layer of a model of --channels on --rows pictures is timed alone, and fill-drain is simulated with the
          sums of stages; all micro-batches have the same rows, and values travel in no time. links: the same costs, as shares
          of the paper's (one GPU does 28.5 pictures in a second), and links of --bandwidth GB/s. steps: a model of --channels
          really runs on two workers, by turns in random order; the memory is that of new processes. Backwards begin with
          the last micro-batch, as in torchgpipe.
Finding:  all five counts of parameters are the published ones. Straight skips send 1.97 times fewer bytes between all stages,
          and 2.29 times fewer of skips: what the paper's portals save. A step would hold 19.8, 18.3, 42.7, 66.3 and 133.7
          GiB (the paper's: 20.3, 20.5, 43.4, 79.1, 154.1). Speed-ups for 1, 2, 4 and 8 workers, from layers measured
          here (the paper's): 0.86 (0.858), 1.34 (1.246), 2.18 (2.352), 3.33 (3.105) with the paper's balances, and
          0.86, 1.46, 2.58, 5.04 with those that are best for these layers; links of 12 GB/s make straight skips 1.042 times
          as fast (1.060). docs/memory.md says what differs, and why. steps --channels 16 --side 96 --rows 2 --rounds 5, on two
          virtual cores: workers grow by 699 MB as Naive-1, 564 as Pipeline-1, 282 and 344 as Pipeline-2, 462 and 429 if nothing
          is computed again; 35 MB go from worker to worker in a step. Steps take 0.95 s (quartiles 0.95 to 0.97), 1.23 (1.23 to
          1.24), 1.10 (1.06 to 1.11), 0.87 (0.86 to 0.87): speed-ups of 1, 0.77, 0.86, 1.10, where 1, 0.87, 1.39, 1.66 are
          simulated, from layers that are timed alone. Simulated with passes as long as they were in the step, it takes 0.999,
          0.999, 0.991 and 0.986 of the measured step: so nothing else takes time. Passes on two workers take longer than alone,
          as most of these layers wait for memory, which the cores share: 1.80 for additions in memory, and 1.01 for
          products (docs/decisions.md).
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import torch
from torch import nn

from exps.seeds.command import Sizes, run_parts
from exps.seeds.layer_costs import LayerCosts, measured
from exps.seeds.layers import cut_into, parameters, pictures, printed
from exps.seeds.memory import held
from exps.seeds.settings import Setting, speed_table
from exps.seeds.steps import Steps, steps_table
from exps.seeds.unet_model import UNet
from exps.seeds.wires import edge_bytes, sent_bytes, value_bytes
from pippy.drivers.lowering.lower import lower
from pippy.drivers.plan import Program
from pippy.drivers.plan.cost.simulate import simulate_with

LOSS = nn.BCEWithLogitsLoss()
GIB = 1 << 30
SIDE = 192  # of a picture, in pixels
BLOCKS, CHANNELS = 5, 64  # of Tables 1 and 4
PARAMETERS = {
    (6, 72): "362.2M",
    (11, 128): "2.21B",
    (24, 128): "4.99B",
    (24, 160): "7.80B",
    (48, 160): "15.82B",
}  # Table 3
BATCH = 32  # there: in micro-batches of one picture, where it is a pipeline
MEMORY = {
    "Naive-1": (20.3, (6, 72), Setting([285], 1)),
    "Pipeline-1": (20.5, (11, 128), Setting([505], BATCH, "except_last")),
    "Pipeline-2": (43.4, (24, 128), Setting([526, 551], BATCH, "except_last")),
    "Pipeline-4": (79.1, (24, 160), Setting([472, 54, 36, 515], BATCH, "except_last")),
    "Pipeline-8": (154.1, (48, 160), Setting([800, 140, 62, 36, 36, 36, 36, 987], BATCH, "except_last")),
}
PORTALS = Setting([34, 76, 70, 61], 8, "except_last")  # Table 1
ROWS = 16  # of a micro-batch there
PER_SECOND = 28.5  # pictures, of Naive-1
SPEEDS = {"Naive-1": 1.0, "Pipeline-1": 0.858, "Pipeline-2": 1.246, "Pipeline-4": 2.352, "Pipeline-8": 3.105}  # Table 4
SETTINGS = {
    "Naive-1": Setting([241], 1),
    "Pipeline-1": Setting([241], 2, "except_last"),
    "Pipeline-2": Setting([104, 137], 32, "except_last"),
    "Pipeline-4": Setting([30, 66, 84, 61], 16, "except_last"),
    "Pipeline-8": Setting([16, 27, 31, 44, 22, 57, 27, 17], 40, "except_last"),
}


def parameters_part(sizes: Sizes) -> None:
    print(f"{'(B, C)':12}{'published':>10}{'ours':>10}")
    for size, published in PARAMETERS.items():
        print(f"{size!s:12}{published:>10}{printed(parameters(UNet(*size, device='meta'))):>10}")


@cache
def portals(threaded: bool) -> tuple[Program, dict[str, int]]:
    """The program of Table 1, and the bytes of each value of one picture."""
    pipe = cut_into(UNet(BLOCKS, CHANNELS, threaded=threaded, device="meta"), PORTALS.balance, LOSS)
    return lower(pipe, PORTALS.program()).program, value_bytes(pipe, pictures(1, SIDE, "meta"))


def of_skips(program: Program, sizes: Mapping[str, int]) -> int:
    """The bytes of what skips send; all but the value that each stage hands to the next, and its gradient."""
    ends = [f"layers_{sum(PORTALS.balance[: stage + 1]) - 1}" for stage in range(3)]
    return sum(sent_bytes(program, sizes).values()) - 2 * sum(sizes[end] for end in ends)


def wires_part(sizes: Sizes) -> None:
    print(f"{'MB of a picture':16}{'all':>8}{'skips':>8}   by wire")
    found = []
    for name, threaded in (("straight", False), ("threaded", True)):
        program, values = portals(threaded)
        sent = sent_bytes(program, values)
        found.append((sum(sent.values()), of_skips(program, values)))
        wires = " ".join(f"{source}→{to} {count / 2**20:.2f}" for (source, to), count in sorted(sent.items()))
        print(f"{name:16}{found[-1][0] / 2**20:8.2f}{found[-1][1] / 2**20:8.2f}   {wires}")
    (straight, skips), (all_threaded, skips_threaded) = found
    print(f"times less: {all_threaded / straight:.2f} (paper 1.97), of skips {skips_threaded / skips:.2f} (paper 2.29)")


@cache
def costs_of(channels: int, rows: int, side: int, repeat: int) -> LayerCosts:
    return measured(UNet(BLOCKS, channels), pictures(rows, side), repeat)


def costs(sizes: Sizes) -> LayerCosts:
    return costs_of(*(sizes[name] for name in ("channels", "rows", "side", "repeat")))


def speed_part(sizes: Sizes) -> None:
    print("\n".join(speed_table(SETTINGS, SPEEDS, costs(sizes))))


def links_part(sizes: Sizes) -> None:
    """Table 1 by simulation: the layers' times as shares of the paper's, and its pictures over links."""
    layers, bandwidth = costs(sizes), sizes["bandwidth"]
    unit = ROWS / PER_SECOND / layers.whole
    passes = layers.of_stages(PORTALS.balance, unit)
    seconds = []
    for threaded in (True, False):
        program, values = portals(threaded)
        edges = {value: ROWS * size for value, size in edge_bytes(program, values).items()}
        seconds.append(simulate_with(program, replace(passes, size=edges, bandwidth=bandwidth * 1e9)).makespan)
    print(
        f"Table 1, {bandwidth:g} GB/s: straight skips make a step {seconds[0] / seconds[1]:.3f} times as fast (paper 1.060)"
    )


def memory_part(sizes: Sizes) -> None:
    print(f"{'GiB':12}{'published':>10}{'counted':>9}   of each worker: all (parameters and gradients, for backwards)")
    batch = pictures(BATCH, SIDE), torch.rand(BATCH, 1, SIDE, SIDE)
    for name, (published, size, setting) in MEMORY.items():
        peaks = [each.peak for each in held(UNet(*size, device="meta"), setting, LOSS, *batch)]
        total = sum(peak.total for peak in peaks) / GIB
        each = [
            f"{peak.total / GIB:.1f} ({(peak.parameters + peak.gradients) / GIB:.1f}, {peak.kept / GIB:.1f})"
            for peak in peaks
        ]
        print(f"{name:12}{published:10.1f}{total:9.1f}   {' '.join(each)}", flush=True)


def steps_part(sizes: Sizes) -> None:
    """The U-Net with fewer channels really runs, on two workers."""
    torch.manual_seed(0)
    layers, side, chunks = costs(sizes), sizes["side"], sizes["chunks"]
    rows = sizes["rows"] * chunks
    settings = {
        "Naive-1": SETTINGS["Naive-1"],
        "Pipeline-1": SETTINGS["Pipeline-1"],
        "Pipeline-2": Setting(SETTINGS["Pipeline-2"].balance, chunks, "except_last").balanced(layers),
        "2, never": Setting(SETTINGS["Pipeline-2"].balance, chunks).balanced(layers),
    }
    steps = Steps(
        lambda: UNet(BLOCKS, sizes["channels"]), LOSS, (pictures(rows, side), torch.rand(rows, 1, side, side))
    )
    print("\n".join(steps_table(steps, settings, layers, sizes["rounds"])))


PARTS = {
    "parameters": parameters_part,
    "wires": wires_part,
    "speed": speed_part,
    "links": links_part,
    "memory": memory_part,
    "steps": steps_part,
}
USUAL = {"channels": 32, "side": SIDE, "rows": 4, "repeat": 3, "bandwidth": 12.0, "chunks": 8, "rounds": 5}
TINY = {"channels": 2, "side": 64, "rows": 1, "repeat": 2, "chunks": 2, "rounds": 1}


def main(arguments: list[str] | None = None) -> None:
    run_parts(__doc__, PARTS, USUAL, TINY, arguments)


if __name__ == "__main__":
    main()
