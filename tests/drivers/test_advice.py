"""What a message of a driver says to do works when it is done. Messages whose advice other tests try are not here."""

# mypy: disable-error-code="arg-type, call-overload"

import pickle
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pippy import (
    ChunkSpec,
    Mean,
    MicroBatches,
    Pipe,
    PipelineDriver,
    PipelineDriver1F1B,
    PipelineDriverFillDrain,
    PippyError,
    Replicate,
    TensorChunkSpec,
    pipe_split,
    pipeline,
)
from pippy.drivers.plan import make_schedule
from pippy.errors import DriverError, OptimizerError, StepError
from tests.comparisons import Beside, assert_same
from tests.drivers.models import Chain

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")
X, TARGET = torch.randn(6, 8, dtype=torch.float64), torch.randn(6, 8, dtype=torch.float64)
mse = F.mse_loss


def same(cluster, *inputs, model=None, loss=mse, chunks=2, kind=PipelineDriver, plain=None, stages=2, **options):
    """Run a step, and compare it with the plain model's; ``plain`` are the plain model's arguments, if they are others."""
    both = Beside(cluster, Chain(stages) if model is None else model, loss, kind=kind, **options)
    both.step(chunks, *(inputs or (X, TARGET)), plain=plain)


def step(cluster, *inputs, model=None, loss=mse, chunks=2, kind=PipelineDriver, stages=2, **options):
    """Run a step."""
    model = Chain(stages) if model is None else model
    return kind(pipeline(model, loss), cluster, **options).run(chunks, *(inputs or (X, TARGET)))


class Gives(nn.Module):
    """Two stages that give what ``make`` makes of the second's output."""

    def __init__(self, make):
        super().__init__()
        self.a, self.b, self.make = nn.Linear(8, 8), nn.Linear(8, 8), make

    def forward(self, x):
        x = self.a(x)
        pipe_split()
        return self.make(self.b(x))


class Scales(Gives):
    """Takes a factor."""

    def forward(self, x, by):
        return super().forward(x) * by


def outputs(cluster, make, spec):
    """Whether the outputs are the plain model's, with this spec."""
    model = Gives(make)
    driver = PipelineDriver(pipeline(model), cluster, output_spec=spec)
    with torch.no_grad():
        assert_same(driver.run(2, X[:5]), model(X[:5]), "outputs")
    driver.close()


def sums(output, target):
    return output + target.sum()


V_SHAPED = {"stages": 4, "schedule": "v_min"}
FILL_DRAIN = {"kind": PipelineDriverFillDrain, "single_loss": True}
AUTO = {"schedule": "auto"}
TWO_EACH = {"schedule": "auto", "stages": 4, "world_size": 2}  # two stages on each of two workers


def schedule(workers, chunks=2):
    return make_schedule("1f1b", workers=workers, chunks=chunks)


# Words of the message, what is refused, and all that it advises: functions of a cluster, or options of `step` and of `same`.
DRIVERS = [
    ("make one: pipeline(model, loss_fn)", lambda c: PipelineDriver(Chain(2), c), {}),
    (
        "give it 2 workers (world_size=2, or as many all_ranks=)",
        V_SHAPED,
        {**V_SHAPED, "world_size": 2},
        {**V_SHAPED, "all_ranks": [3, 1]},
    ),
    (
        "cut the model into 6 stages, for 3 workers (world_size=3",
        {"stages": 3, "schedule": "zb_v"},
        {"stages": 6, "schedule": "zb_v", "world_size": 3},
    ),
    (
        "or take interleaved_1f1b, which works on any",
        {"stages": 3, "schedule": "dualpipe_v", "world_size": 2},
        {"stages": 3, "schedule": "interleaved_1f1b", "world_size": 2},
    ),
    ("numbers of workers as world_size=", lambda c: step(2), {"world_size": 2}),
    ("ask for 1 to 4", {"world_size": 5}, {"stages": 4, "world_size": 1}, {"stages": 4, "world_size": 4}),
    ("name workers of the cluster, 0 to 3", {"all_ranks": [0, 4]}, {"all_ranks": [3, 0]}),
    ("give one of them", {"all_ranks": [3, 0], "world_size": 3}, {"all_ranks": [3, 0]}),
    ("give the number of micro-batches first", {"chunks": X}, {"chunks": 4}),
    ("name 2 workers", {"world_size": 3}, {"world_size": 2}),
    ("or cut the model into more stages", {"world_size": 3}, {"stages": 3, "world_size": 3}),
    ("or None for no limit", {"step_timeout": -1}, {"step_timeout": 30}, {"step_timeout": None}),
    ("give True to hold no more", {"out_of_order": -1}, {"out_of_order": True}, {"out_of_order": 3}),
    (
        "give at least 2, or True",
        {"chunks": 3, "out_of_order": 1},
        {"chunks": 3, "out_of_order": True},
        {"chunks": 3, "out_of_order": 2},
    ),
    (
        "leave single_loss out, so that each micro-batch has a loss",
        lambda c: step(c, model=Gives(torch.sum), loss=sums, **FILL_DRAIN),
        lambda c: same(c, model=Gives(torch.sum), loss=sums, kind=PipelineDriverFillDrain, loss_reduction="sum"),
    ),
    (
        "give one value for each micro-batch",
        lambda c: step(c, MicroBatches(X.split(2)), TARGET),
        lambda c: same(c, MicroBatches(X.chunk(3)), TARGET, chunks=3, plain=(X, TARGET)),
    ),
    (
        "detach it, or make it a parameter",
        lambda c: step(c, X.clone().requires_grad_(), TARGET),
        lambda c: same(c, X.clone().requires_grad_().detach(), TARGET),
    ),
    ("give each of them a worker", {"placement": {0: 0, 1: 1, 2: 0}}, {"placement": {0: 0, 1: 1}}),
    (
        "start a larger cluster",
        {"stages": 4, "schedule": schedule(4), "world_size": 2},
        {"stages": 4, "schedule": schedule(4)},
    ),
    (
        "or make another program",
        {"schedule": schedule(2), "chunks": 3},
        {"schedule": schedule(2)},
        {"schedule": schedule(2, chunks=3), "chunks": 3},
    ),
    (
        "leave one of them out (schedule='list' takes memory=)",
        {"schedule": "1f1b", "max_live": 2},
        {**AUTO, "max_live": 2},
        {"schedule": "list", "memory": 2},
    ),
    (
        "one number or one for each worker",
        {**AUTO, "max_live": 0},
        {**AUTO, "max_live": 2},
        {**AUTO, "max_live": [2, 1]},
    ),
    ("give one, or one each", {**TWO_EACH, "max_live": [2]}, {**TWO_EACH, "max_live": [2, 2]}),
    ("give it at least 2", {**TWO_EACH, "max_live": 1}, {**TWO_EACH, "max_live": 2}),
    (
        "schedule='auto' takes memory, max_live, memory_limit and placement",
        {**AUTO, "costs": 4},
        *({**AUTO, "max_live": 4, "placement": {0: 0, 1: 1}, name: 10**9} for name in ("memory_limit", "memory")),
    ),
    ("leave one of them out", {**FILL_DRAIN, "_debug_mask_minibatches": True}, FILL_DRAIN),
    (
        "a loss function, which the Pipe does not have; give one",
        lambda c: step(c, X, loss=None, **FILL_DRAIN),
        FILL_DRAIN,
    ),
]


def run(how, cluster, given):
    return given(cluster) if callable(given) else how(cluster, **given)


class EveryOther(ChunkSpec):
    def split(self, value, chunks):
        return [value[index::chunks] for index in range(chunks)]


class AddsUp(ChunkSpec):
    def merge(self, values):
        return sum(values)


OWN = [EveryOther()] * 2
BY = torch.full((1, 8), 3.0, dtype=torch.float64)


def scaled(by=BY, plain_by=BY, kind_of_model=Scales, **options):
    """Compares a step of a model that takes a factor, too: ``plain_by`` for the plain model."""
    options["plain"] = X, plain_by, TARGET
    return lambda cluster: same(cluster, X, by, TARGET, model=kind_of_model(lambda x: x), **options)


class Two(Scales):
    """Takes two factors."""

    def forward(self, x, pair):
        return super().forward(x, pair[0]) * pair[1].sum()


def two_factors(pair):
    """Compares a step of a model that takes two factors, the same for all micro-batches."""
    return scaled(pair, PAIRS[0], Two)


def smoothed(chunks, reduction="mean"):
    """Compares a step with class weights of 0 for all targets of the first half, and smoothed targets."""
    weight = torch.tensor([0.0] + [1.0] * 7, dtype=torch.float64)
    loss = nn.CrossEntropyLoss(weight, label_smoothing=0.1, reduction=reduction)
    return lambda cluster: same(cluster, X, torch.tensor([0, 0, 0, 1, 2, 3]), loss=loss, chunks=chunks)


PARTS = [BY.expand(3, 8), 2 * BY.expand(3, 8)]
WHOLE, PAIRS = torch.cat(PARTS), [(BY, torch.ones(2, 8, dtype=torch.float64))] * 2
COUNTED = {"loss_reduction": len}
MASKED = {"kind": PipelineDriverFillDrain, "_debug_mask_minibatches": True}
ROWS_ALONG_1 = [TensorChunkSpec(1)] * 2
SUMMED = {"loss": nn.MSELoss(reduction="sum"), "loss_reduction": "sum"}
INPUTS = [
    (
        "give one for each, in order, or a dict by name",
        scaled(chunk_spec=[0, Replicate(), 0, 0]),
        scaled(chunk_spec=[0, Replicate(), 0]),
        scaled(chunk_spec={"by": Replicate()}),
    ),
    (
        "give only one of them",
        {"chunk_spec": {"x": 0}, "batch_dims": {"x": 1}},
        {"chunk_spec": {"x": 0}},
        {"batch_dims": {"x": 0}},
    ),
    (
        "a Replicate(), or MicroBatches(values, dim=None)",
        scaled(MicroBatches([BY, BY])),
        scaled(MicroBatches([BY, BY], dim=None)),
        scaled(chunk_spec=[None, Replicate()]),
    ),
    (
        "give the dimension with MicroBatches(values, dim=...)",
        scaled(MicroBatches(PARTS), WHOLE, chunk_spec=[None, TensorChunkSpec(1)]),
        scaled(MicroBatches(PARTS), WHOLE),
        scaled(MicroBatches(PARTS, dim=0), WHOLE),
    ),
    (
        "if this dimension does not hold rows, write MicroBatches(values, dim=None)",
        two_factors(MicroBatches(PAIRS)),
        two_factors(MicroBatches(PAIRS, dim=None)),
    ),
    ("and there are 2 micro-batches", scaled(MicroBatches([WHOLE]), WHOLE), scaled(MicroBatches(PARTS), WHOLE)),
    (
        "every micro-batch is the whole mini-batch; give the whole value",
        scaled(MicroBatches(PARTS), WHOLE, **MASKED),
        scaled(WHOLE, WHOLE, **MASKED),
    ),
    (
        "it has no split(value, chunks); write that method",
        {"chunk_spec": [AddsUp()]},
        {"chunk_spec": OWN, **COUNTED},
    ),
    (
        "give loss_reduction='sum', or a function that returns the weight of a micro-batch",
        {"chunk_spec": OWN},
        {"chunk_spec": OWN, **COUNTED},
        {"chunk_spec": OWN, **SUMMED},
    ),
    (
        "take the target alone; rename its parameters",
        {"loss_reduction": lambda one, other: 1},
        {"loss_reduction": lambda x, target: len(x)},
        {"loss_reduction": lambda any_name: len(any_name)},
    ),
    ("a number of 0 or more", {"loss_reduction": lambda target: -1}, COUNTED),
    ("use fewer chunks, or reduction='sum'", smoothed(2), smoothed(1), smoothed(2, "sum")),
    (
        "the dimension is an int, as in TensorChunkSpec(0)",
        lambda c: step(c, chunk_spec=[TensorChunkSpec("0")]),
        {"chunk_spec": [TensorChunkSpec(0)]},
    ),
    (
        "needs no spec, or TensorChunkSpec(dim)",
        lambda c: scaled(MicroBatches(X), X)(c),
        scaled(X, X),
        scaled(X, X, chunk_spec=[None, TensorChunkSpec(0)]),
    ),
    ("or a ChunkSpec of your own", {"chunk_spec": ["rows"]}, {"chunk_spec": OWN, **COUNTED}),
    (
        "or TensorChunkSpec(dim) if the rows are along another dimension",
        lambda c: same(c, X[None], TARGET[None]),
        lambda c: same(c, X[None], TARGET[None], chunk_spec=ROWS_ALONG_1),
    ),
]
UNCHECKED = pytest.mark.filterwarnings("ignore:the first step was not checked")
ROWS = [pytest.param(row, id=row[0]) for row in DRIVERS]
ROWS += [pytest.param(row, id=row[0], marks=UNCHECKED) for row in INPUTS]


@pytest.mark.parametrize("row", ROWS)
def test_arguments_of_drivers_and_specs_of_inputs(row, threads):
    words, wrong, *advised = row
    with pytest.raises(PippyError) as caught:
        run(step, threads, wrong)
    assert words in str(caught.value)
    for each in advised:
        run(same, threads, each)


def total(tags):
    return Tag(sum(tag.rows for tag in tags))


OUTPUTS = [
    ("otherwise a function that merges the list of values", lambda x: (x, tag(x)), None, (0, total)),
    (
        "give a function that merges the list of values",
        lambda x: rows_as_list(x),
        None,
        lambda values: [r for v in values for r in v],
    ),
    ("give a function of the list of values that pads them", lambda x: x.t(), 0, lambda values: torch.cat(values, 1)),
    ("cannot be concatenated along dimension 2", lambda x: x.t(), 2, 1),
    ("has the spec Replicate(), but it differs", lambda x: x.t(), Replicate(), TensorChunkSpec(1)),
    ("give one spec for all of it, or specs in the same shape", lambda x: (x, x + 1), (0,), (0, 0)),
    ("give one spec for all of it, or specs in the same shape", lambda x: (x, x + 1), (0, 0, 0), 0),
    ("but output only has ['y', 'z']", lambda x: {"y": x, "z": -x}, {"w": 0}, {"y": 0}),
    ("it has no merge(values); write that method", lambda x: x.sum(0), EveryOther(), AddsUp()),
    ("Mean(), Max(), Min() or a function", lambda x: x.mean(0), "mean", Mean()),
]


class Tag:
    """What is neither a tensor nor a number."""

    def __init__(self, rows):
        self.rows = rows

    def __eq__(self, other):
        return isinstance(other, Tag) and self.rows == other.rows

    __hash__ = None  # type: ignore[assignment]


def tag(x):
    return Tag(len(x))


def rows_as_list(x):
    return list(x)


torch.fx.wrap("tag")
torch.fx.wrap("rows_as_list")


@pytest.mark.parametrize(("words", "make", "spec", "advised"), OUTPUTS, ids=[row[0] for row in OUTPUTS])
def test_specs_of_outputs(words, make, spec, advised, threads):
    with pytest.raises(PippyError) as caught:
        outputs(threads, make, spec)
    assert words in str(caught.value)
    outputs(threads, make, advised)


# Optimizers and what is on the workers


@pytest.fixture
def driver(threads):
    driver = PipelineDriver1F1B(pipeline(Chain(2), mse), threads)
    yield driver
    driver.close()


def trains(driver, optimizer):
    """Whether steps of this optimizer make the loss smaller."""
    first = driver.run(2, X, TARGET)
    optimizer.step()
    assert driver.run(2, X, TARGET) < first
    optimizer.zero_grad()


def made(driver, *groups, kind=torch.optim.SGD, lr=0.1, **options):
    groups = {"param_groups": list(groups)} if groups else {}
    return driver.instantiate_optimizer(kind, lr=lr, **groups, **options)


NAMES = ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"]
OPTIMIZERS = [
    (
        "instantiate_optimizer(torch.optim.AdamW, lr=1e-3)",
        lambda d: made(d, kind="AdamW"),
        lambda d: made(d, kind=torch.optim.AdamW, lr=1e-3),
    ),
    ("use another class", lambda d: made(d, kind=torch.optim.LBFGS), lambda d: made(d, kind=torch.optim.Adam)),
    (
        "name it in one of them",
        lambda d: made(d, {"params": NAMES}, {"params": NAMES[:1]}),
        lambda d: made(d, {"params": NAMES}),
    ),
    (
        'and exactly one with "params": ... if there are other parameters',
        lambda d: made(d, {"params": ...}, {"params": ...}),
        lambda d: made(d, {"params": NAMES[:1]}, {"params": ...}),
    ),
    ('give a dict with "params"', lambda d: made(d, NAMES), lambda d: made(d, {"params": NAMES})),
    (
        "the model has layers.0.weight, ",
        lambda d: made(d, {"params": "weight"}),
        lambda d: made(d, {"params": "layers.0.weight"}),
    ),
    ("call driver.run before step()", lambda d: made(d).step(lambda: 0), made),
    (
        "give them all to instantiate_optimizer",
        lambda d: made(d, {"params": NAMES[:1]}).add_param_group({"params": NAMES[1:]}),
        lambda d: made(d, {"params": NAMES[:1]}, {"params": NAMES[1:]}),
    ),
]
SENT = ("call driver.run before step()", "give them all to instantiate_optimizer")  # the optimizer was made


@pytest.mark.parametrize(("words", "fails", "advised"), OPTIMIZERS, ids=[row[0] for row in OPTIMIZERS])
def test_optimizers(words, fails, advised, driver):
    before = list(driver.session.counts)
    with pytest.raises(OptimizerError) as caught:
        fails(driver)
    assert words in str(caught.value)
    assert driver.session.counts == before or words in SENT, "it is refused before anything is sent"
    trains(driver, advised(driver))


def test_state_of_an_optimizer(driver):
    optimizer = made(driver, kind=torch.optim.Adam)
    with pytest.raises(TypeError, match=r"pickle optimizer.state_dict\(\)"):
        pickle.dumps(optimizer)
    trains(driver, optimizer)
    other = made(driver, kind=torch.optim.Adam)
    other.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    torch.testing.assert_close(other.state_dict()["state"], optimizer.state_dict()["state"])


def test_a_driver_is_not_pickled_and_its_state_is(driver):
    with pytest.raises(TypeError, match=r"pickle driver.state_dict\(\)"):
        pickle.dumps(driver)
    state = pickle.loads(pickle.dumps(driver.state_dict()))
    driver.load_state_dict(state)
    torch.testing.assert_close(driver.state_dict(), state)


def test_a_closed_driver(driver):
    driver.close()
    with pytest.raises(DriverError, match="this driver was closed; make another"):
        driver.run(2, X, TARGET)
    step(driver.cluster)


class Locks(nn.Module):
    """A layer with a lock, which cannot be sent."""

    def __init__(self, lock):
        super().__init__()
        self.lock, self.lin = lock, nn.Linear(8, 8)

    def forward(self, x):
        return self.lin(x)


def test_what_belongs_to_this_process(threads):
    with pytest.raises(PippyError, match="keep such objects out of the model and its arguments"):
        PipelineDriver(Pipe.from_sequential(nn.Sequential(nn.Linear(8, 8), Locks(threading.Lock())), mse), threads)
    PipelineDriver(Pipe.from_sequential(nn.Sequential(nn.Linear(8, 8), Locks(None)), mse), threads).run(2, X, TARGET)


def test_a_loss_that_is_not_a_number(threads):
    with pytest.raises(StepError, match=r"reduce it, with .mean\(\) or .sum\(\)"):
        step(threads, loss=lambda output, target: output - target, loss_reduction="sum", chunks=1)
    same(threads, loss=lambda output, target: (output - target).mean())
