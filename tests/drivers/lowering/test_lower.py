"""Lowering: what it says is enough to train, and says each thing once."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from pippy import MultiUseParameterConfig, Pipe, pipe_split, pipeline
from pippy.drivers.base.errors import LoweringError
from pippy.drivers.lowering.flow import RemoteInterpreter
from pippy.drivers.lowering.lower import Lowered, lower
from pippy.drivers.plan import make_schedule, parse_program
from pippy.drivers.plan.language.edges import Pass
from pippy.drivers.plan.language.instructions import Receive, Send
from pippy.ir.base.errors import VerificationError
from pippy.ir.call.signature import bind
from pippy.ir.pipe import compiled_of
from tests.comparisons import assert_same, assert_same_gradient, fresh_inputs
from tests.drivers.run_in_one_process import LocalRun
from tests.zoo import WAYS, Exhibit, exhibits

pytestmark = [
    pytest.mark.usefixtures("in_float64"),
    pytest.mark.filterwarnings("ignore:a mark after the model's last operation"),
]


def build(name: str, config: MultiUseParameterConfig = MultiUseParameterConfig.TRANSMIT) -> tuple[Exhibit, Pipe]:
    torch.manual_seed(0)
    model = exhibits[name]()
    spec = model.output_loss_value_spec
    return model, pipeline(model, model.loss_fn, multi_use_param_spec=config, output_loss_value_spec=spec)


def schedule_for(pipe: Pipe, name: str, chunks: int, workers: int | None = None):
    """A schedule whose stages are the Pipe's, on as many workers, or looped over fewer."""
    workers = min(workers or pipe.num_stages, pipe.num_stages)
    each = [pipe.num_stages // workers + (worker < pipe.num_stages % workers) for worker in range(workers)]
    return make_schedule(
        name, workers=workers, chunks=chunks, stages_per_worker=each if workers < pipe.num_stages else 1
    )


def run(pipe: Pipe, lowered: Lowered, microbatches: list[Any], target: Any = ()) -> tuple[LocalRun, list[Any]]:
    """The lowered program over these micro-batches, and what the reference gives. Their gradients are the same."""
    reference, trains = copy.deepcopy(pipe), bool(lowered.program.backward)
    inputs = [bind(compiled_of(pipe), (*fresh_inputs(each), *target), {}) for each in microbatches]
    done = LocalRun(pipe, lowered, inputs)
    with torch.set_grad_enabled(trains):
        torch.manual_seed(1)
        done.run()
        torch.manual_seed(1)
        expected = [reference(*fresh_inputs(each), *target) for each in microbatches]
    assert done.left() == set() or not trains
    for name, _ in reference.named_parameters():
        assert_same_gradient(pipe.get_grad(name), reference.get_grad(name), f"gradient of {name}")
    assert_same(
        dict(compiled_of(pipe).split_gm.named_buffers()),
        dict(compiled_of(reference).split_gm.named_buffers()),
        "buffers",
    )
    return done, expected


def run_both(model: Exhibit, pipe: Pipe, lowered: Lowered, chunks: int) -> tuple[LocalRun, list[Any]]:
    """The same over micro-batches of an exhibit."""
    target = [model.target()] if model.loss_fn is not None else []
    return run(pipe, lowered, [model.inputs() for _ in range(chunks)], target)


# Models whose stages draw random numbers or count micro-batches depend on the order of the computations.
ORDERED = {"MixtureWithDropout", "FreshTensors", "Attention", "ConvBatchNorm", "CountingBuffer"}


@pytest.mark.parametrize(("name", "config"), [way for way in WAYS if way[0] not in ORDERED])
def test_a_lowered_program_trains_as_the_reference_does(name, config):
    """Those with whole backwards train on workers in test_driver.py."""
    model, pipe = build(name, config)
    lowered = lower(pipe, schedule_for(pipe, "zb_h1", chunks=3), buffer=None)
    done, expected = run_both(model, pipe, lowered, chunks=3)
    if model.loss_fn is not None:
        for microbatch, loss in enumerate(expected):
            assert_same(done.output("_loss", microbatch).detach(), loss, "loss")


@pytest.mark.parametrize("name", ["ConvBatchNorm", "CountingBuffer"])
def test_stages_that_change_their_buffers_see_the_micro_batches_in_order(name):
    model, pipe = build(name)
    run_both(model, pipe, lower(pipe, schedule_for(pipe, "1f1b", chunks=4)), chunks=4)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "looped_bfs", "zb_v", "v_half", "v_min"])
@pytest.mark.parametrize("name", ["Mlp", "UsedThrice", "EncoderDecoder"])
def test_several_stages_to_a_worker(name, schedule):
    model, pipe = build(name, MultiUseParameterConfig.REPLICATE)
    assert pipe.num_stages == 4
    lowered = lower(pipe, make_schedule(schedule, workers=2, chunks=4, stages_per_worker=2))
    done, _ = run_both(model, pipe, lowered, chunks=4)
    assert tuple(done.peak) == lowered.program.peak_live


class SkipsAndSharing(nn.Module):
    """A value for one later stage, one for two, one for a stage on the same worker; a parameter that travels."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x, factor):
        first = self.layers[0](x) * self.scale
        pipe_split()
        y = self.layers[1](first)
        pipe_split()
        z = self.layers[2](y) + first * self.scale
        pipe_split()
        return self.layers[3](z) * y + first * factor


def programs(workers: int, chunks: int = 2, **options) -> tuple[Pipe, Lowered]:
    torch.manual_seed(0)
    pipe = pipeline(SkipsAndSharing(), nn.MSELoss())
    schedule = make_schedule(
        options.pop("name", "1f1b"), workers=workers, chunks=chunks, stages_per_worker=4 // workers
    )
    return pipe, lower(pipe, schedule, **options)


def test_the_edges_are_those_of_the_graph():
    _, lowered = programs(workers=4)
    assert sorted(map(str, lowered.program.edges)) == [
        "add F2 -> F3",
        "add_grad_from_submod_3 B3 -> B2",
        "layers_1 F1 -> F2 F3",
        "layers_1_grad_from_submod_2 B2 -> B1",
        "layers_1_grad_from_submod_3 B3 -> B1",
        "mul F0 -> F1 F2 F3",
        "mul_grad_from_submod_1 B1 -> B0",
        "mul_grad_from_submod_2 B2 -> B0",
        "mul_grad_from_submod_3 B3 -> B0",
        "scale F0 -> F2",
        "scale_grad_from_submod_2 B2 -> B0",
    ]
    assert lowered.inputs == {"x": (0,), "factor": (3,), "target": (3,)}
    assert lowered.outputs == {"_loss": 3}


@pytest.mark.parametrize(("workers", "sent"), [(4, 15), (2, 6), (1, 0)])
def test_each_value_is_sent_once_to_each_worker_that_uses_it(workers, sent):
    _, lowered = programs(workers, name="interleaved_1f1b" if workers < 4 else "1f1b")
    orders = lowered.program.orders
    sends = Counter(
        (each.value, each.microbatch, each.to) for order in orders for each in order if isinstance(each, Send)
    )
    assert set(sends.values()) <= {1}
    worker_of = lowered.program.placement.worker_of
    wanted = {
        (edge.value, microbatch, worker_of[target.stage])
        for edge in lowered.program.flow
        if edge.value not in lowered.program.sum_of
        for microbatch in range(2)
        for target in edge.targets
        if worker_of[target.stage] != worker_of[edge.source.stage]
    }
    assert set(sends) == wanted
    received = Counter((each.value, each.microbatch) for order in orders for each in order if isinstance(each, Receive))
    assert sum(received.values()) == len(sends)


def test_gradients_that_meet_are_added_in_the_order_of_the_graph():
    _, lowered = programs(workers=4)
    (work,) = lowered.work[Pass("B", 0)]
    assert work.takes == (
        ("mul_grad_from_submod_3", "mul_grad_from_submod_2", "mul_grad_from_submod_1"),
        ("scale_grad_from_submod_2",),
    )


def test_the_loss_is_part_of_the_last_stage():
    _, lowered = programs(workers=4)
    assert [work.call for work in lowered.work[Pass("F", 3)]] == ["submod_3", "_loss"]
    assert [work.call for work in lowered.work[Pass("B", 3)]] == ["_loss", "submod_3"]
    assert lowered.work[Pass("B", 3)][0].takes == (1.0,)


def test_replicated_parameters_are_reduced_after_the_last_backward_that_touches_them():
    pipe = pipeline(exhibits["LeafInThreeStages"](), nn.MSELoss())
    lowered = lower(pipe, make_schedule("1f1b", workers=3, chunks=4))
    for worker, order in enumerate(lowered.program.orders):
        last = max(index for index, each in enumerate(order) if str(each).startswith("B"))
        assert str(order[last]) == f"B{worker}.3"
        found = [str(each) for each in order[last:] if each.kind.adds_up]
        if worker:
            names = ("lin.weight", "lin.bias")
            expected = [f"send gradients of {name} to 0" for name in names]
            assert found == [*expected, *(f"receive sum of {name} from 0" for name in names)]
        else:
            assert [each for each in found if each.startswith("reduce")] == ["reduce lin.weight", "reduce lin.bias"]
    # The last worker's backward is done first: its gradients are under way while the others drain.
    assert [str(copies) for copies in lowered.program.replicated] == ["lin.weight 0 1 2", "lin.bias 0 1 2"]


def test_what_the_loss_does_not_need_has_no_backward():
    model, pipe = build("EarlyLoss")
    lowered = lower(pipe, make_schedule("1f1b", workers=3, chunks=2))
    assert lowered.program.backward == (0, 1)
    assert not [each for each in lowered.program.orders[2] if str(each).startswith("B")]
    run_both(model, pipe, lowered, chunks=2)


@pytest.mark.parametrize("with_loss", [True, False])
def test_a_schedule_for_inference_lowers_forwards_only(with_loss):
    model = SkipsAndSharing()
    pipe = pipeline(model, nn.MSELoss() if with_loss else None)
    lowered = lower(pipe, make_schedule("forward_only", workers=4, chunks=3))
    assert all(each.phase == "F" for each in lowered.work)
    inputs = [(torch.randn(2, 4), torch.randn(4)) for _ in range(3)]
    done, expected = run(pipe, lowered, inputs, [torch.randn(2, 4)] if with_loss else [])
    (name,) = lowered.outputs
    for microbatch, each in enumerate(expected):
        assert_same(done.output(name, microbatch), each, "output")


def test_a_pipe_without_a_loss_is_lowered_without_backwards():
    pipe = pipeline(SkipsAndSharing())
    assert lower(pipe, make_schedule("1f1b", workers=4, chunks=2)).program.backward == ()


def test_schedules_can_be_written_with_run_until():
    """Fill-drain and 1F1B as interleavings of one interpreter per micro-batch give the orders of the named schedules."""
    pipe = pipeline(exhibits["Mlp"](), nn.MSELoss())
    interpreters = [RemoteInterpreter(pipe, microbatch) for microbatch in range(3)]
    emitted = []
    for interpreter in interpreters:
        emitted += interpreter.run_until(lambda node: str(node.name).startswith("stage_backward"))
    for interpreter in interpreters:
        emitted += interpreter.run_until(lambda node: False)
    orders: list[list[str]] = [[] for _ in range(4)]
    for work in emitted:
        if work.call != "_loss":
            orders[work.stage].append(f"{work.phase}{work.stage}.{work.microbatch}")
    named = make_schedule("fill_drain", workers=4, chunks=3)
    assert orders == [[str(each) for each in order] for order in named.computations]


def test_run_until_stops_before_the_node_and_goes_on_from_there():
    interpreter = RemoteInterpreter(pipeline(exhibits["Mlp"](), nn.MSELoss()))
    first = interpreter.run_until(lambda node: node.name == "submod_2")
    assert [work.call for work in first] == ["submod_0", "submod_1"]
    assert interpreter.run_until(lambda node: node.name == "submod_2") == []
    assert interpreter.run_until(lambda node: node.name == "_loss")[0].call == "submod_2"


def test_a_lowered_program_can_be_read_back_and_lowered_again():
    model, pipe = build("UsedTwice")
    lowered = lower(pipe, make_schedule("1f1b", workers=3, chunks=2))
    again = lower(pipe, parse_program(str(lowered.program)))
    assert again.program == lowered.program
    run_both(model, pipe, again, chunks=2)


def test_a_program_written_by_hand_runs():
    model, pipe = build("Teacher")
    text = str(lower(pipe, make_schedule("fill_drain", workers=2, chunks=2)).program)
    run_both(model, pipe, lower(pipe, parse_program(text.replace("schedule fill_drain", "schedule mine"))), chunks=2)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (
            lambda: make_schedule("1f1b", workers=4, chunks=2),
            "1f1b is for 4 stages, and the Pipe has 3; make a schedule with as many stages (workers times stages_per_worker)",
        ),
        (
            lambda: lower(build("ExampleCode")[1], make_schedule("1f1b", workers=3, chunks=2)).program,
            "the program was made for another Pipe:\n  edge ",
        ),
        (
            lambda: make_schedule("1f1b", workers=3, chunks=2).for_graph(edges=None or (), backward=[2]),
            "has no backward of stages [0, 1], which the loss depends on",
        ),
    ],
)
def test_a_program_for_another_pipe_is_refused(schedule, words):
    _, pipe = build("UsedTwice")
    with pytest.raises(LoweringError) as caught:
        lower(pipe, schedule())
    assert words in str(caught.value)


def test_a_broken_pipe_is_not_lowered():
    _, pipe = build("UsedTwice")
    pipe.split_gm.graph.output_node().args = (None,)
    with pytest.raises(VerificationError):
        lower(pipe, make_schedule("1f1b", workers=3, chunks=2))


class OddStages(nn.Module):
    """A stage that gives nothing, and a value that is both used and returned."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        first = self.layers[0](x)
        pipe_split()
        self.seen.add_(self.layers[1](first).detach().sum(0))
        pipe_split()
        y = self.layers[2](first)
        pipe_split()
        return self.layers[3](y), first


@pytest.mark.parametrize("trains", [True, False])
def test_stages_without_outputs_and_values_that_are_returned_on_the_way(trains):
    torch.manual_seed(0)
    model = OddStages()
    pipe = pipeline(
        model, (lambda output, target: (output[0] * output[1] - target).square().mean()) if trains else None
    )
    schedule = make_schedule("1f1b" if trains else "forward_only", workers=4, chunks=2)
    lowered = lower(pipe, schedule)
    assert lowered.work[Pass("F", 1)][0].gives == ()
    done, expected = run(pipe, lowered, [(torch.randn(3, 4),) for _ in range(2)], [torch.randn(3, 4)] if trains else [])
    for microbatch, outputs in enumerate(expected):
        found = [done.output(name, microbatch) for name in lowered.outputs]
        wanted = [outputs] if trains else [outputs[1], outputs[0]]
        assert_same([each.detach() for each in found], [each.detach() for each in wanted], "outputs")


def test_what_is_no_pipe_or_program_is_refused():
    wrong: Any = 3
    with pytest.raises(
        LoweringError, match="lower takes a Pipe and a program of make_schedule; these are a Pipe and a int"
    ):
        lower(build("Mlp")[1], wrong)


class Masked(nn.Module):
    """Sends a mask and a size to its second stage, with a tensor that has a gradient or without."""

    def __init__(self, beside: bool):
        super().__init__()
        self.a, self.b, self.beside = nn.Linear(4, 4), nn.Linear(4, 4), beside

    def forward(self, x):
        h = self.a(x)
        mask, size = h > 0, h.shape[1]
        pipe_split()
        return self.b((h if self.beside else x) * mask) / size


@pytest.mark.parametrize(("beside", "gradients"), [(True, ["a"]), (False, ["gt", "getitem"])])
def test_gradients_that_can_only_be_none_are_not_sent_if_another_is(beside, gradients):
    """Where no other is, the empty messages hold the first stage back to the schedule's limit."""
    x = torch.randn(6, 4)
    pipe = pipeline(Masked(beside), nn.MSELoss(), example_args=(x[:2], x[:2]))
    lowered = lower(pipe, make_schedule("1f1b", workers=2, chunks=3))
    found = {each.value for each in lowered.program.orders[1] if isinstance(each, Send)}
    assert found == {f"{name}_grad_from_submod_1" for name in gradients}
    run(pipe, lowered, [(part, part) for part in x.chunk(3)])
