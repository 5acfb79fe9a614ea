"""The front door: from a model to a Pipe."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from pippy.balance.balancer import Balancer
from pippy.balance.policies import Split
from pippy.ir.base.errors import BalanceError
from pippy.ir.base.public_calls import placing_words
from pippy.ir.cut.params import MultiUseParamSpec
from pippy.ir.loss.returned_loss import LossSpec
from pippy.ir.pipe import Pipe, pipe_of
from pippy.ir.request import Request
from pippy.ir.trace.trace import TracerLike

if TYPE_CHECKING:
    from torch.export import ExportedProgram


@placing_words("pipeline(model, loss_fn)")
def pipeline(
    model: "nn.Module | ExportedProgram",
    loss_fn: Callable[..., Any] | None = None,
    *,
    multi_use_param_spec: MultiUseParamSpec = None,
    output_loss_value_spec: LossSpec = None,
    tracer: TracerLike | None = None,
    concrete_args: Mapping[str, Any] | None = None,
    deep_copy_module: bool = False,
    split: Split = None,
    num_stages: int | str | None = None,
    example_args: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    memory_limit: int | str | None = None,
    param_scale: float | None = None,
    in_flight: int | None = None,
    progress: bool | None = None,
) -> Pipe:
    """Trace ``model``, cut it into stages, and write its backward pass into the same graph.

    It is cut at its marks; or, with ``split`` or ``num_stages``, where that makes the stages alike. ``pipe.balance`` then
    says how alike they are.

    Args:
        model: any module that torch.fx can trace, marked with `pipe_split()` or `annotate_split_points`; or without a
            mark, with ``split`` or ``num_stages``. A program of `torch.export.export` is taken, too.
        loss_fn: a module or function of (output, target). The Pipe takes ``target`` as a further argument, returns the
            loss and computes gradients. Without it the Pipe computes what the model returns.
        multi_use_param_spec: what to do with parameters that several stages use: `MultiUseParameterConfig.TRANSMIT`
            (the default: it lives in the first, and travels) or `REPLICATE` (a copy each, gradients summed), or a dict
            from parameter names to one of them.
        output_loss_value_spec: for a model that returns its loss, which of its outputs that is: True, an index, a key,
            or True and False in the shape of the output, as in ``{"loss": True, "logits": False}``. A dict or a dataclass
            with "loss" is understood by itself; False says that there is no loss.
        tracer: a `torch.fx.Tracer`, or a class of one, instead of `PipeTracer`: to choose other leaf modules, say.
        concrete_args: arguments of forward that the graph is specialized to, by name.
        deep_copy_module: work on a copy. By default the Pipe and the model share their parameters.
        split: what the stages are to be alike in: "time" (forward and backward, measured), "size" (bytes of parameters
            and activations), "parameters", "uniform" (numbers of layers) or "type:regex" (numbers of modules whose class
            name matches); "auto" is "time" with example arguments and "parameters" without. Or by hand: a list of names
            of modules before which to cut, or a list with the number of layers of each stage.
        num_stages: into how many stages to cut; alone it means ``split="auto"``. "auto" is as many as the current cluster
            has workers.
        example_args: the arguments of one call of the Pipe, with the size of one micro-batch, the loss's target last.
            The model is run on them and left as it was.
        example_kwargs: those by name.
        memory_limit: bytes that a stage may hold, as in "12GiB" or 12 * 2**30: its parameters ``param_scale`` times, and what
            ``in_flight`` micro-batches take, counted as `driver.memory` does.
        param_scale: how often a parameter to be trained counts: 4 by default, which is Adam's (with gradient and state).
        in_flight: how many micro-batches a stage holds at a time. By default as many as under 1F1B, which is 1 in the last
            stage and one more in each before it.
        progress: whether to show on stderr how far the measurement is; by default where that is a terminal.

    >>> import torch
    >>> from pippy import pipe_split
    >>> class Net(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
    ...     def forward(self, x):
    ...         x = torch.relu(self.first(x))
    ...         pipe_split()
    ...         return self.second(x)
    >>> pipe = pipeline(Net(), torch.nn.MSELoss())
    >>> print(pipe)
    GraphModule(
      (submod_0): GraphModule(
        (first): Linear(in_features=4, out_features=8, bias=True)
      )
      (submod_1): GraphModule(
        (second): Linear(in_features=8, out_features=1, bias=True)
      )
      (_loss): MSELoss()
    )
    <BLANKLINE>
    def forward(self, x, target):
        submod_0 = self.submod_0(x)
        submod_1 = self.submod_1(submod_0)
        _loss = self._loss(submod_1, target)
        stage_backward = stage_backward(stage_output = _loss, output_grads = None, input_values = [submod_1, target]);  target = None
        getitem = stage_backward[0]
        getitem_1 = stage_backward[1];  stage_backward = getitem_1 = None
        stage_backward_1 = stage_backward(stage_output = submod_1, output_grads = getitem, input_values = [submod_0]);  submod_1 = getitem = None
        getitem_2 = stage_backward_1[0];  stage_backward_1 = None
        stage_backward_2 = stage_backward(stage_output = submod_0, output_grads = getitem_2, input_values = [x]);  submod_0 = getitem_2 = x = stage_backward_2 = None
        return _loss
    <BLANKLINE>
    """  # noqa: E501
    request = Request(
        loss_fn=loss_fn,
        output_loss_value_spec=output_loss_value_spec,
        multi_use_param_spec=multi_use_param_spec,
        tracer=tracer,
        concrete_args=concrete_args,
        example_args=example_args,
        example_kwargs=example_kwargs,
        deep_copy_module=deep_copy_module,
    )
    how = {"memory_limit": memory_limit, "param_scale": param_scale, "in_flight": in_flight}
    if split is not None or num_stages is not None:
        cut = Balancer(split, num_stages, request=request, progress=progress, **how)  # type: ignore[arg-type]
        request = replace(request, cut=cut)
    elif given := [name for name, value in how.items() if value is not None]:
        raise BalanceError(
            f"{', '.join(given)}: the model is only cut evenly if num_stages is given; give num_stages too"
        )
    return pipe_of(model, request)
