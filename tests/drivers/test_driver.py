"""The models of the zoo on workers give the reference's numbers, bit for bit, under every schedule and as graphs."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn

import pippy
from pippy import MultiUseParameterConfig, Pipe, PipelineDriver, pipeline
from pippy.drivers.base.errors import StepError
from pippy.drivers.batch.specs import MicroBatches
from pippy.drivers.lowering.flow import loss_stage
from pippy.ir.base.names import stage_index
from pippy.ir.base.trees import leaves, map_tensors
from pippy.ir.call.signature import bind
from pippy.ir.pipe import compiled_of
from pippy.ir.record.compiled import flat_inputs, is_getitem
from pippy.ir.reference import run_microbatches
from tests.comparisons import assert_bits
from tests.zoo import WAYS, exhibits

pytestmark = [
    pytest.mark.usefixtures("in_float64", "seeded"),
    pytest.mark.filterwarnings("ignore:a mark after the model's last operation"),
]


def build(name, config):
    torch.manual_seed(0)
    model = exhibits[name]()
    spec = model.output_loss_value_spec
    return model, pipeline(model, model.loss_fn, multi_use_param_spec=config, output_loss_value_spec=spec)


def with_reference(model, reference, chunks):
    """What to give a driver for so many micro-batches of a model of the zoo, and what runs the reference for them."""
    target = [model.target()] if model.loss_fn is not None else []
    microbatches = [map_tensors(torch.Tensor.detach, model.inputs()) for _ in range(chunks)]
    bound = [bind(reference, (*each, *target), {}) for each in microbatches]
    given = [*(list(same) for same in zip(*microbatches)), *([each] * chunks for each in target)]
    return list(map(MicroBatches, given)), lambda: run_microbatches(reference, bound)


def gradients_of(pipe):
    return {name: pipe.get_grad(name) for name, _ in pipe.named_parameters()}


def on_processes(number, stages):
    schedule, workers = [("fill_drain", 4), ("1f1b", 4), ("interleaved_1f1b", 2)][number % 3]  # several stages on one
    return {"schedule": schedule, "world_size": min(workers, stages)}


def in_a_v(number, stages):
    """Two stages on each worker, in a V, where a model has an even number of them; some forwards computed again."""
    schedule, size = (["v_half", "v_min"][number % 2], stages // 2) if stages % 2 == 0 else ("eager_1f1b", stages)
    return {"schedule": schedule, "world_size": min(size, 4), "checkpoint": MODES[number % 3]}


def computed_again(number, stages):
    schedule = SCHEDULES[number % 5]
    workers = min(2 if schedule in ("interleaved_1f1b", "looped_bfs") else 4, stages)
    return {
        "schedule": schedule,
        "world_size": workers,
        "checkpoint": ["always", "except_last", {0: "always"}][number % 3],
    }


def as_graphs(number, stages):
    checkpoint = "always" if number % 3 == 0 else "never"
    schedule = ["1f1b", "zb_h1", "fill_drain", "zb_h2"][number % 4]
    return {"schedule": schedule, "world_size": min(4, stages), "checkpoint": checkpoint, "compile": "graphs"}


MODES = ["never", "always", "except_last"]
SCHEDULES = ["fill_drain", "1f1b", "zb_h1", "interleaved_1f1b", "looped_bfs"]
# Exhibits with a stage that runs eagerly, and why.
EAGER = {
    "ConvBatchNorm": {"submod_1": "eager: it asks for the values of tensors (aten._local_scalar_dense.default)"},
}
ROWS = [(name, config, on_processes) for name, config in WAYS if not exhibits[name].draws]
for number, name in enumerate(exhibits):
    config = list(MultiUseParameterConfig)[number % 2]
    ROWS += [(name, config, each) for each in (in_a_v, computed_again, as_graphs) if not exhibits[name].draws]


def same_outputs(outputs, wanted, model):
    """What a step gives is what the micro-batches give, added up or one behind the other."""
    if model.loss_fn is not None:
        assert torch.equal(outputs, sum(wanted))
        return
    for one, *each in zip(leaves(outputs), *map(leaves, wanted), strict=True):
        assert torch.equal(one, torch.cat(each) if one.dim() else sum(each))


@pytest.mark.parametrize(("name", "config", "options_of"), ROWS)
def test_the_zoo_trains_as_the_reference_does(request, name, config, options_of):
    """Losses are added up, so that micro-batches may have any shapes. Each way to run is tried with each model."""
    cluster = request.getfixturevalue("cluster" if options_of is on_processes else "threads")
    model, pipe = build(name, config)
    number = list(exhibits).index(name) + (config is MultiUseParameterConfig.REPLICATE)
    options = options_of(number, pipe.num_stages)
    driver = PipelineDriver(pipe, cluster, loss_reduction="sum", check=False, **options)
    reference = add_as_workers_do(copy.deepcopy(pipe), driver.program(6).placement.worker_of)
    given, run = with_reference(model, reference, 6)
    step = driver.run_async(6, *given)
    same_outputs(step.result(), run(), model)
    assert [step.peak_live[rank] for rank in driver.ranks] == list(driver.program(6).peak_live)
    assert_bits(driver.gradients(), gradients_of(reference))
    assert_bits(driver.state_dict(), reference.state_dict())
    with torch.no_grad():
        same_outputs(driver.run(6, *given), run(), model)
    eager = {stage: said for stage, said in driver.compiled.items() if not said.startswith("graphs")}
    assert eager == (EAGER.get(name, {}) if options_of is as_graphs else {}), eager
    driver.close()


# With ``compile="graphs"`` the stages run as flat graphs, and everything is to the bit as without.


class Dropping(nn.Module):
    """Layers that draw, and a batch norm; in two stages."""

    def __init__(self):
        super().__init__()
        layers = [nn.Linear(8, 16), nn.Dropout(0.2), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.4), nn.Linear(16, 8)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x)


def losses(cluster, model, batches, **options):
    """The losses of some steps of Adam, and the model's state afterwards."""
    pipe = pipeline(copy.deepcopy(model), nn.MSELoss(), split=["layers.3"])
    driver = PipelineDriver(pipe, cluster, keyed_random=7, check=False, **options)
    optimizer = driver.instantiate_optimizer(torch.optim.Adam, lr=0.1)
    made = []
    for batch in batches:
        optimizer.zero_grad()
        made.append(driver.run(4, *batch))
        optimizer.step()
    with torch.no_grad():
        made.append(driver.run(4, *batches[0]))
    compiled, state = driver.compiled, driver.state_dict()
    driver.close()
    return made, state, compiled


OPTIONS = {
    "1f1b": {},
    "halves": {"schedule": "zb_h1"},
    "computed again": {"checkpoint": "always"},
    "one loss": {"schedule": "fill_drain", "single_loss": True},
    "out of order": {"out_of_order": True},
    "replicas": {"replicas": 2},
    "under autocast": {},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_steps_that_draw_are_to_the_bit(cluster, name):  # processes: threads would share torch's generator
    casts = name == "under autocast"
    model, dtype = Dropping(), torch.float32 if casts else torch.float64
    if name == "replicas":
        pippy.convert_deferred_batch_norm(model)
    batches = [torch.randn(2, 16, 8, dtype=dtype) for _ in range(3)]
    batches[1] = batches[1][:, :14]  # its micro-batches have two sizes
    with torch.autocast("cpu", torch.bfloat16, enabled=casts):
        plain, state, none = losses(cluster, model.to(dtype), batches, **OPTIONS[name])
        made, other, compiled = losses(cluster, model, batches, compile="graphs", **OPTIONS[name])
    assert not none and all(map(torch.equal, plain, made))
    assert_bits(other, state)
    wanted = dict.fromkeys(["submod_0", "submod_1"], "graphs for 3 forms of inputs")  # the third one in evaluation
    assert {stage: compiled[stage] for stage in wanted} == wanted


class CountsLarge(nn.Module):
    """Its forward writes a buffer for micro-batches of more than two rows only."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.register_buffer("large", torch.zeros(()))

    def forward(self, x):
        if len(x) > 2:
            self.large += 1
        return self.layers[1](torch.tanh(self.layers[0](x))) * (self.large + 1)


def test_a_forward_that_writes_more_than_the_first_one_did_keeps_its_graph(threads):
    """It is not computed again, and the loss is: from what the forward gave."""
    model = nn.Sequential(nn.Linear(8, 8), CountsLarge())
    made = []
    for compile in (False, "graphs"):
        pipe = pipeline(copy.deepcopy(model), nn.MSELoss(), split=["1"])
        driver = PipelineDriver(pipe, threads, checkpoint="always", compile=compile, check=False)
        for rows in (4, 8):
            torch.manual_seed(rows)
            loss = driver.run(2, torch.randn(rows, 8), torch.randn(rows, 8))
        made.append((loss, driver.gradients(), driver.state_dict()))
        driver.close()
    assert torch.equal(made[0][0], made[1][0])
    assert_bits(made[1][1], made[0][1])
    assert_bits(made[1][2], made[0][2])


class Strict(nn.Module):
    """An index that is too large fails."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Embedding(5, 8), nn.Linear(8, 8)])

    def forward(self, tokens):
        return self.layers[1](self.layers[0](tokens))


def test_a_step_that_fails_names_the_line_and_the_next_one_is_right(threads):
    model = Strict()
    errors, made = [], []
    for compile in (False, "graphs"):
        pipe = pipeline(copy.deepcopy(model), nn.MSELoss(), split=["layers.1"])
        driver = PipelineDriver(pipe, threads, compile=compile, check=False)
        tokens, target = torch.tensor([0, 1, 2, 3]), torch.ones(4, 8)
        driver.run(2, tokens, target)
        with pytest.raises(StepError) as raised:
            driver.run(2, torch.tensor([0, 1, 2, 7]), target)
        errors.append(str(raised.value).split("\n")[1])
        driver.zero_grad()
        made.append((driver.run(2, tokens, target), driver.gradients()))
        assert not compile or driver.compiled["submod_0"].startswith("graphs")
        driver.close()
    assert errors[0] == errors[1] and "IndexError" in errors[0]
    assert torch.equal(made[0][0], made[1][0])
    assert_bits(made[1][1], made[0][1])


# The reference with the gradients of a value added in the order in which workers do: first those of each worker.


def add_as_workers_do(pipe: Pipe, worker_of: Sequence[int]) -> Pipe:
    """Change the graph of a Pipe: what the stages of one worker give for a value is added first, the last stage's first.

    What the loss gives for an output of its own stage is added before all others.
    """
    compiled, graph = compiled_of(pipe), pipe.split_gm.graph
    own = loss_stage(compiled)

    def stage_of(call: fx.Node) -> int:
        index = stage_index(str(call.target))
        return own if index is None else index

    def summands(node: Any) -> list[Any]:
        return [each for arg in node.args for each in summands(arg)] if node.target is torch.add else [node]

    for root in graph.find_nodes(op="call_function", target=torch.add):
        if any(user.target is torch.add for user in root.users):
            continue
        groups: dict[object, list[Any]] = {}
        for each in summands(root):
            call = each.args[0].kwargs["stage_output"]
            value = flat_inputs(call)[each.args[1]]
            inside = stage_of(value.args[0] if is_getitem(value) else value) == stage_of(call)
            groups.setdefault("own" if inside else worker_of[stage_of(call)], []).append(each)
        with graph.inserting_before(root):
            total: Any = None
            for group in groups.values():
                found = group[0]
                for each in group[1:]:
                    found = graph.call_function(torch.add, (found, each))
                total = found if total is None else graph.call_function(torch.add, (total, found))
        root.replace_all_uses_with(total)
    for node in reversed(graph.find_nodes(op="call_function", target=torch.add)):
        if not node.users:
            graph.erase_node(node)
    return pipe
