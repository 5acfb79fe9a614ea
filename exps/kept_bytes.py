"""How many bytes do stages keep between the pieces of a step, as graphs and eagerly?

Question: what do F for the backward and I for W keep of one micro-batch, summed over four stages, if the graph of each stage is
          cut where the fewest bytes are, beside a cut behind which nothing is computed again, and beside what autograd keeps?
Command:  python -m exps.kept_bytes                               (from the root of the repository; --stages, names of models)
Method:   nothing is computed: stages run on tensors without data. The models are the tiny ones of exps/tried_models, in
          float32, with 4 rows, and an encoder of torch's own layers with dropout. Each storage counts once, parameters
          and buffers never, the inputs of a stage where they are kept. Eagerly, these are always kept, and W has those
          layers' weights only that are large enough, which none is here: it has the first stage's whole backward.
Finding:  F keeps 175,764 bytes of GPT-2 (all that is read 293,684; eagerly 317,844), 133,764 of Llama (196,164; 202,804),
          198,372 of Mixtral (280,372; 312,212), 937,984 of the encoder (as many; 1,036,288), and 13,268 of the ResNet in all
          three ways. I hands W 199,536 bytes of GPT-2 (all that is read 221,296), 161,520 of Llama (190,880), 227,008 of
          Mixtral (264,048), and as many as without a cut of the encoder and the ResNet. Most is saved where an activation is
          written in several quick operations, as in GPT-2, and in RMS norms and gates.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from exps.tried_models import hugging_face
from pippy import Pipe, pipeline
from pippy.drivers.batch.divide_call import divide_call
from pippy.drivers.batch.division import Division
from pippy.drivers.count.compiled_stages import stage_pieces
from pippy.drivers.count.pipe_bytes import count_pipe
from pippy.drivers.lowering.lower import lower
from pippy.drivers.plan import make_schedule
from pippy.drivers.plan.language.edges import Pass
from pippy.ir.base.readable import text_table
from pippy.ir.base.trees import map_tensors
from pippy.ir.pipe import compiled_of


@dataclass(frozen=True)
class Kept:
    """The bytes that stages keep between F and the backward, or between I and W."""

    cut: int
    closure: int
    eager: int


# A model, the arguments of a call of it, and its loss function.
Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any], Callable[..., Any] | None]


def _encoder() -> Made:
    blocks = [nn.TransformerEncoderLayer(32, 4, 128, 0.1, "gelu", batch_first=True) for _ in range(4)]
    return nn.Sequential(*blocks), (torch.randn(4, 16, 32), torch.randn(4, 16, 32)), {}, nn.MSELoss()


def _of_hugging_face(found: hugging_face.HuggingFace) -> Made:
    arguments = map_tensors(lambda each: each.float() if each.is_floating_point() else each, found.arguments())
    return found.make().float().train(), (), arguments, None


_MIXTRAL = hugging_face.MODELS["mixtral"]
_GROUPED_EXPERTS = replace(_MIXTRAL, options={**_MIXTRAL.options, "experts_implementation": "grouped_mm"})  # type: ignore[dict-item]
MODELS: dict[str, Callable[[], Made]] = {
    "GPT-2": lambda: _of_hugging_face(hugging_face.MODELS["gpt2"]),
    "Llama": lambda: _of_hugging_face(hugging_face.MODELS["llama, tied"]),
    "Mixtral": lambda: _of_hugging_face(_GROUPED_EXPERTS),
    "ResNet": lambda: _of_hugging_face(hugging_face.OTHERS["resnet"]),
    "encoder": _encoder,
}


def kept_bytes(pipe: Pipe, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Kept, Kept]:
    """What all stages keep between F and the backward, and between I and W."""
    pieces = stage_pieces(pipe, args, kwargs)
    eager = {each.name: each.reason for each in pieces if each.reason is not None}
    assert not eager, f"these have no graphs: {eager}"
    kept, handed = _eagerly(pipe, divide_call(compiled_of(pipe), 1, tuple(args), kwargs))
    return (
        Kept(sum(each.kept[0] for each in pieces), sum(each.kept[1] for each in pieces), kept),
        Kept(sum(each.handed[0] for each in pieces), sum(each.handed[1] for each in pieces), handed),
    )


def _eagerly(pipe: Pipe, division: Division) -> tuple[int, int]:
    """What autograd keeps, with the inputs of stages; and what layers that put off their weights' gradients keep."""
    sizes = count_pipe(pipe, division, torch.device("cpu"))
    program = lower(pipe, make_schedule("1f1b", workers=pipe.num_stages, chunks=1)).program
    values = {**sizes.values, **dict.fromkeys(sizes.owned, 0)}
    kept = handed = 0
    for number, stage in enumerate(sizes.stages):
        taken = {edge.value for edge in program.flow if Pass("F", number) in edge.targets}
        kept += stage.kept - stage.results + sum(values.get(name, 0) for name in stage.kept_outputs | taken)
        kept += sum(each.bytes for each in sizes.inputs if number in each.stages)
        handed += stage.deferred + sum(values.get(name, 0) for name in stage.deferred_inputs | stage.deferred_values)
    return kept, handed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--stages", type=int, default=4)
    chosen = parser.parse_args()
    rows = []
    for name in chosen.models:
        model, args, kwargs, loss_fn = MODELS[name]()
        how = {"split": "parameters", "num_stages": chosen.stages, "example_args": args, "example_kwargs": kwargs}
        kept, handed = kept_bytes(pipeline(model, loss_fn, **how), args, kwargs)
        rows.append([name, *(f"{each:,}" for both in (kept, handed) for each in (both.cut, both.closure, both.eager))])
    head = ["model", "F: cut", "all read", "eager", "I to W: cut", "all read", "eager"]
    print(text_table(head, rows))


if __name__ == "__main__":
    main()
