"""`pippy show`: shows a model as a Pipe: its graph, its stages, and who sends what to whom."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pippy.cli.problems import (
    call,
    check_can_be_written,
    find,
    find_loss,
    plain_warnings,
    value_from_text,
    with_options,
    write,
)
from pippy.ir.base.readable import bytes_text, text_table

if TYPE_CHECKING:
    from torch import nn

    from pippy.drivers.plan.cost.held_bytes import PipeBytes
    from pippy.ir.pipe import Pipe


# The options of commands that make a Pipe of a model: its arguments, its cuts, its loss.


_OPTIONS = (
    click.option("--arg", "arguments", multiple=True, metavar="NAME=VALUE", help="An argument of the class or function."),
    click.option(
        "--split", multiple=True, metavar="MODULE", help="Begin a stage at this module; or MODULE:end, behind it."
    ),
    click.option("--num-stages", type=click.IntRange(1), help="Cut into so many stages, of parameters alike."),
    click.option("--sequential", is_flag=True, help="Make each child of an nn.Sequential a stage."),
    click.option(
        "--loss", metavar="NAME", help="The loss of (output, target): CrossEntropyLoss of torch, or model.py:loss."
    ),
    click.option(
        "--shared", type=click.Choice(["transmit", "replicate"]), help="Parameters that several stages use."
    ),
)  # fmt: skip


def pipe_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that make a Pipe of a model."""
    return with_options(command, *_OPTIONS)


FORMATS = ("all", "graph", "text", "table", "mermaid", "svg")
_SUFFIXES = {".svg": "svg", ".mmd": "mermaid"}
_INPUT = re.compile(r"(?:(?P<name>\w+)=)?(?P<dtype>[a-z]\w*)?\[(?P<sizes>[\d,\s]*)\]")


@click.command(no_args_is_help=True, short_help="Show how a model is cut into stages.")
@click.argument("target")
@pipe_options
@click.option(
    "--input", "inputs", multiple=True, metavar="[NAME=]DTYPE[SIZES]", help="An input of forward, for shapes."
)
@click.option("--format", "kind", type=click.Choice(FORMATS), help="What to show.  [all, or by the name of the file]")
@click.option("--memory", is_flag=True, help="Show what each stage holds, in bytes, for a micro-batch of --input.")
@click.option(
    "--compile", "compiled", is_flag=True, help="Show which stages become graphs, for a micro-batch of --input."
)
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Write it to this file.")
def show(
    target: str, inputs: tuple[str, ...], kind: str | None, memory: bool, compiled: bool, output: str | None, **how: Any
) -> None:
    """Show how a model is cut into stages: the graph, the drawing of what passes, and the table of stages.

    TARGET is module:Name or path/to/file.py:Name, and names a model, a Pipe, or a class or function that makes one.
    Nothing is computed: with --input, the shapes come from fake tensors. The inputs, with the size of one micro-batch, are
    the example for a model whose Python asks for sizes, too.

    \b
    graph    the code of the Pipe, its backward included
    text     who sends what to whom
    table    the stages: parameters, bytes, what they hold
    mermaid, svg   drawings
    all      the first three

    \b
    Examples:
      pippy show model.py:Net
      pippy show models.gpt:GPT --arg layers=4 --split blocks.2 --loss MSELoss
      pippy show model.py:Net --input 'float32[32,16]' --format table
      pippy show model.py:Net --input 'float32[32,16]' --compile
      pippy show model.py:Net -o net.svg
      pippy show gpt2.py:model --num-stages 4 --input 'input_ids=int64[2,16]' --input 'labels=int64[2,16]'
    """
    given = Target(target, inputs, **how)
    if output:
        check_can_be_written(output)
    kind = kind or (_SUFFIXES.get(Path(output).suffix, "all") if output else "all")
    args, kwargs = given.example
    with plain_warnings():
        pipe = given.pipe()
        if memory:
            text = stages_memory(pipe, args, kwargs)
        else:
            text = stages_compiled(pipe, args, kwargs) if compiled else _drawn(pipe, kind, args, kwargs)
    if output:
        write(output, text)
    else:
        click.echo(text)


def pair(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not sign or not name.isidentifier():
        raise click.BadParameter(f"{text!r} is no NAME=VALUE; write --arg layers=4", param_hint="--arg")
    return name, value_from_text(value)


@dataclass(frozen=True)
class Target:
    """A model as the command line names it: how it is made and cut, its loss, and the inputs of its example."""

    name: str
    inputs: Sequence[str] = ()
    arguments: Sequence[str] = ()
    split: Sequence[str] = ()
    num_stages: int | None = None
    sequential: bool = False
    loss: str | None = None
    shared: str | None = None

    @cached_property
    def example(self) -> tuple[list[Any], dict[str, Any]]:
        """The inputs as arguments of a call, by position and by name."""
        return made_inputs([parsed(each) for each in self.inputs])

    def pipe(self) -> "Pipe":
        """The Pipe of the model, or the Pipe that is named."""
        from torch import nn

        from pippy.balance.balancer import Balancer
        from pippy.ir.base.trees import map_tensors
        from pippy.ir.cut.params import MultiUseParameterConfig
        from pippy.ir.pipe import Pipe

        model = _model(self.name, dict(pair(each) for each in self.arguments))
        if isinstance(model, Pipe):
            self._check_no_options()
            return model
        loss_fn = _loss(self.loss) if self.loss else None
        if self.sequential:
            if self.split or self.shared or self.num_stages:
                raise click.UsageError(
                    "--sequential makes each child a stage; leave out --split, --num-stages and --shared"
                )
            if not isinstance(model, nn.Sequential):
                raise click.ClickException(
                    f"{self.name} is a {type(model).__name__}, no nn.Sequential; leave out --sequential"
                )
            return Pipe.from_sequential(model, loss_fn)
        _mark(model, self.split)
        args, kwargs = self.example
        if any(parameter.is_meta for parameter in model.parameters()):
            args, kwargs = map_tensors(lambda tensor: tensor.to("meta"), (args, kwargs))
        return Pipe.from_tracing(
            model,
            MultiUseParameterConfig(self.shared) if self.shared else None,
            loss_fn=loss_fn,
            example_args=args or None,
            example_kwargs=kwargs or None,
            cut=Balancer("parameters", self.num_stages, loss_fn=loss_fn) if self.num_stages else None,
        )

    def _check_no_options(self) -> None:
        for name in ("split", "num_stages", "sequential", "loss", "shared"):
            if getattr(self, name):
                option = f"--{name.replace('_', '-')}"
                raise click.UsageError(
                    f"{self.name} is a Pipe already, which {option} cannot change; leave {option} out"
                )


def _model(target: str, model_arguments: dict[str, Any]) -> Any:
    from torch import nn

    value = find(target)
    what = target
    if not isinstance(value, nn.Module) and callable(value):
        value = call(target, value, model_arguments)
        what = f"what {target} gives"
    elif model_arguments:
        raise click.UsageError(f"{target} is a {type(value).__name__} and takes no --arg")
    if not isinstance(value, nn.Module):
        raise click.ClickException(
            f"{what} is a {type(value).__name__}; name an nn.Module, a Pipe, or a class or function that makes one"
        )
    return value


def _loss(target: str) -> Any:
    value = find_loss(target)
    if not callable(value):
        raise click.ClickException(
            f"{target} is a {type(value).__name__}; a loss is a function or module of (output, target)"
        )
    return value


def _mark(model: "nn.Module", split: Sequence[str]) -> None:
    from pippy.ir.base.marks import SplitPoint, annotate_split_points

    for each in ",".join(split).split(",") if split else ():
        name, _, side = each.strip().partition(":")
        if side not in ("", "begin", "beginning", "end"):
            raise click.BadParameter(f"{each!r}: a module is cut at its beginning or its end", param_hint="--split")
        annotate_split_points(model, {name: SplitPoint.END if side == "end" else SplitPoint.BEGINNING})


def parsed(text: str) -> tuple[str | None, str, list[int]]:
    """
    >>> parsed("x=float32[4, 8]"), parsed("[]")
    (('x', 'float32', [4, 8]), (None, 'float32', []))
    """
    match = _INPUT.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is no tensor; write 'float32[4,8]' or 'x=int64[4]'", param_hint="--input")
    return match["name"], match["dtype"] or "float32", [int(size) for size in re.findall(r"\d+", match["sizes"])]


def made_inputs(examples: list[tuple[str | None, str, list[int]]]) -> tuple[list[Any], dict[str, Any]]:
    """Tensors of zeros: drawing takes nothing of them but shapes."""
    if not examples:
        return [], {}
    import torch

    named_tensors = []
    for name, dtype, sizes in examples:
        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype):
            raise click.BadParameter(f"torch has no dtype {dtype!r}; write float32, int64, …", param_hint="--input")
        named_tensors.append((name, torch.zeros(sizes, dtype=kind)))
    args = [tensor for name, tensor in named_tensors if name is None]
    return args, {name: tensor for name, tensor in named_tensors if name}


def _drawn(pipe: "Pipe", kind: str, args: list[Any], kwargs: dict[str, Any]) -> str:
    drawing = pipe.draw(*args, **kwargs)
    drawings = {
        "graph": lambda: _graph(pipe),
        "text": lambda: str(drawing),
        "table": drawing.table,
        "mermaid": drawing.mermaid,
        "svg": drawing.svg,
    }
    kinds = ("graph", "text", "table") if kind == "all" else (kind,)
    return "\n\n".join(drawings[each]().rstrip() for each in kinds)


def _graph(pipe: "Pipe") -> str:
    """The code of the top-level graph; the modules are in the table."""
    return "".join(str(pipe).partition("def forward")[1:]).strip()


# What the stages of a model hold (`pippy show --memory`, `pippy compare --memory`), and what ``compile=`` makes of them.


_HEAD = ("stage", "F", "B", "I", "W", "kept by F", "without cut", "handed to W", "without cut", "")
COLUMNS = ("parameters", "gradients", "kept", "forward", "backward")


def count_for_call(pipe: "Pipe", chunks: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "PipeBytes":
    """The bytes of the stages of a Pipe, for a call in so many micro-batches."""
    import torch

    from pippy.drivers.batch.divide_call import divide_call
    from pippy.drivers.count.pipe_bytes import count_pipe
    from pippy.ir.pipe import compiled_of

    compiled = compiled_of(pipe)
    division = divide_call(compiled, chunks, args, kwargs)
    return count_pipe(pipe, division, torch.device("cpu"), compiled.loss is not None, halves=True)


def stages_memory(pipe: "Pipe", args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """A table of what each stage holds for a micro-batch: ``kept`` by each of them until its backward."""
    if not args and not kwargs:
        raise click.UsageError("--memory counts for inputs of some size; give them, as in --input 'float32[32,16]'")
    sizes = count_for_call(pipe, 1, args, kwargs)
    rows = [
        [f"submod_{number}", *(bytes_text(getattr(stage, name)) for name in COLUMNS)]
        for number, stage in enumerate(sizes.stages)
    ]
    totals = [bytes_text(sum(getattr(stage, name) for stage in sizes.stages)) for name in COLUMNS[:3]]
    return text_table(["stage", *COLUMNS], rows, total=["total", *totals, "", ""])


def stages_compiled(pipe: "Pipe", args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """A table of the operations in the pieces of each stage, and of what is kept between them."""
    if not args and not kwargs:
        raise click.UsageError(
            "--compile records graphs for inputs of some size; give them, as in --input 'float32[32,16]'"
        )
    from pippy.drivers.count.compiled_stages import stage_pieces

    rows = []
    for each in stage_pieces(pipe, args, kwargs):
        if each.reason is not None:
            rows.append([each.name, *[""] * 8, f"runs eagerly: it {each.reason}"])
        else:
            rows.append([each.name, *map(str, each.operations), *map(bytes_text, (*each.kept, *each.handed)), ""])
    return text_table(_HEAD, rows, words=(0, 9))
