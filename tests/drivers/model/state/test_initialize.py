"""Models on the meta device: the controller has no numbers, and the workers make their own."""

import copy

import pytest
import torch
from torch import nn

import pippy
from pippy import MultiUseParameterConfig, Pipe, PipelineDriver1F1B, pipeline
from pippy.drivers.base.errors import DriverError, PackingError, StepError
from pippy.drivers.driver.drivers import PipelineDriverInterleaved1F1B
from pippy.ir.base.errors import InitializationError, InputError
from tests.comparisons import assert_same_training

IDS, TARGET = torch.arange(8) % 16, (torch.arange(8) * 5) % 16
REPLICATE = MultiUseParameterConfig.REPLICATE


class Model(nn.Module):
    """A tied parameter, one of no module of torch, a frozen one, and a batch norm with its buffers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.scale = nn.BatchNorm1d(8), Scale()
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.second.requires_grad_(False)

    def forward(self, ids):
        x = torch.tanh(self.first(self.embedding(ids)))
        return self.head(self.scale(self.third(self.norm(self.second(x)))))


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.ones(8))

    def reset_parameters(self):
        nn.init.normal_(self.by)

    def forward(self, x):
        return x * self.by


def on_meta(make=Model, dtype=torch.float64):
    with torch.device("meta"):
        return make().to(dtype)


def pipe_of(model, stages, spec=None):
    device = model.first.weight.device
    example = IDS.to(device), TARGET.to(device)
    options = {"split": "parameters", "num_stages": stages, "example_args": example}
    return pipeline(model, nn.CrossEntropyLoss(), multi_use_param_spec=spec, **options)


def driver_of(model, stages, cluster, spec=None, kind=PipelineDriver1F1B, **options):
    return kind(pipe_of(model, stages, spec), cluster, **options)


def test_values_depend_on_no_split(threads):
    splits = [(1, None, {}), (2, None, {}), (4, None, {}), (2, REPLICATE, {}), (4, REPLICATE, {})]
    states = []
    for stages, spec, options in splits:
        driver = driver_of(on_meta(), stages, threads, spec, **options)
        driver.initialize(seed=3)
        states.append(driver.state_dict())
    interleaved = driver_of(on_meta(), 4, threads, REPLICATE, PipelineDriverInterleaved1F1B, world_size=2)
    interleaved.initialize(seed=3)
    states.append(interleaved.state_dict())
    assert list(states[0]) == list(Model().state_dict())
    for state in states[1:]:
        assert [name for name in state if not torch.equal(state[name], states[0][name])] == []
    assert torch.equal(states[0]["head.weight"], states[0]["embedding.weight"])


@pytest.mark.parametrize("spec", [None, REPLICATE])
def test_it_trains_as_the_plain_model(threads, spec):
    driver = driver_of(on_meta(), 4, threads, spec, checkpoint="except_last")
    optimizer = driver.instantiate_optimizer(torch.optim.AdamW, lr=0.1)
    driver.initialize()
    plain = Model().double()
    driver.copy_to(plain)
    ours = torch.optim.AdamW([each for each in plain.parameters() if each.requires_grad], lr=0.1)
    plain.norm.eval()
    driver.pipe.get_submodule("norm").eval()
    assert_same_training(driver, optimizer, plain, ours, 4, IDS, TARGET)


def test_the_seed_is_that_of_torch(threads):
    weights = []
    for seed, keyed in ((1, True), (1, 7), (2, 7)):  # another seed for dropout makes no other parameters
        driver = driver_of(on_meta(), 2, threads, keyed_random=keyed)
        torch.manual_seed(seed)
        driver.initialize()
        weights.append(driver.state_dict()["first.weight"])
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_nothing_runs_before(threads):
    driver = driver_of(on_meta(), 2, threads)
    for call in (
        lambda: driver.run(2, IDS, TARGET),
        driver.state_dict,
        lambda: driver.copy_to(Model().double()),
    ):
        with pytest.raises(DriverError, match=r"13 parameters and buffers .* driver\.initialize\(\) has each worker"):
            call()
    driver.load_state_dict(Model().double().state_dict())
    assert driver.run(2, IDS, TARGET).isfinite()
    with pytest.raises(InitializationError, match="all parameters and buffers of this driver have numbers"):
        driver.initialize()


def test_what_is_loaded_is_not_made_again(threads):
    driver, plain = driver_of(on_meta(), 4, threads), Model().double()
    given = {name: value for name, value in plain.state_dict().items() if not name.startswith("head")}
    del given["third.weight"]
    driver.load_state_dict(given, strict=False)
    with pytest.raises(DriverError, match=r"and 1 parameters and buffers .*: 'third\.weight'"):
        driver.run(2, IDS, TARGET)
    driver.initialize(seed=3)
    state = driver.state_dict()
    assert all(torch.equal(state[name], value) for name, value in given.items())
    other = driver_of(on_meta(), 2, threads)
    other.initialize(seed=3)
    assert torch.equal(state["third.weight"], other.state_dict()["third.weight"])


class WithUnused(Model):
    """Beside what it uses, it has a layer that no stage uses."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(2, 2)


def test_a_checkpoint_is_read_by_the_workers(threads, tmp_path):
    plain = WithUnused().double()
    PipelineDriver1F1B(pipe_of(plain, 2, REPLICATE), threads).save(tmp_path / "whole", step=1)
    driver = driver_of(on_meta(WithUnused), 4, threads)
    with pytest.raises(DriverError, match=r"save\(\) needs numbers.* driver\.load\(folder\) has it read them"):
        driver.save(tmp_path / "empty")
    driver.load(tmp_path / "whole")
    state = driver.state_dict()
    assert [name for name, value in plain.state_dict().items() if name not in state] == ["unused.weight", "unused.bias"]
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in state.items())
    before = driver.run(2, IDS, TARGET)
    driver.save(tmp_path / "used")
    other = driver_of(on_meta(WithUnused), 1, threads)
    other.load(tmp_path / "used")
    other.copy_to(plain)
    torch.testing.assert_close(other.run(2, IDS, TARGET), before)


def test_masters_are_made_of_what_was_made(threads):
    driver = driver_of(on_meta(dtype=torch.bfloat16), 2, threads)
    optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.0, master_dtype=torch.float32)
    driver.initialize(seed=0)
    before = driver.state_dict()
    driver.run(2, IDS, TARGET)
    optimizer.step()
    after = driver.state_dict()
    assert torch.equal(after["first.weight"], before["first.weight"])


def test_only_what_is_on_meta_is_made(threads):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    model[1] = given = nn.Linear(4, 4)
    driver = PipelineDriver1F1B(Pipe.from_sequential(model), threads)
    driver.initialize(seed=0)
    state = driver.state_dict()
    assert torch.equal(state["1.weight"], given.weight)
    assert state["0.weight"].abs().max() <= 0.5


def test_it_computes_nothing_in_this_process():
    with pytest.raises(InputError, match=r"its model is on the meta device.*driver\.initialize\(\)"):
        pipe_of(on_meta(), 2)(IDS, TARGET)
    assert pipe_of(on_meta(), 2)(IDS.to("meta"), TARGET.to("meta")).is_meta


def test_statistics_of_the_mini_batch_begin_with_what_was_made(threads):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).double()
    driver = PipelineDriver1F1B(Pipe.from_sequential(pippy.convert_deferred_batch_norm(model), nn.MSELoss()), threads)
    driver.initialize()
    plain = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).double()
    driver.copy_to(plain)
    x = torch.randn(8, 4).double()
    driver.run(4, x, torch.zeros(8, 1).double())
    plain(x)
    state = driver.state_dict()
    torch.testing.assert_close(state["1.running_var"], plain[1].running_var)
    assert int(state["1.num_batches_tracked"]) == 1


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.own = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.lin(x) * self.own


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def reset_parameters(self):
        pass

    def forward(self, x):
        return self.lin(x) * self.table


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 7.0)

    def forward(self, x):
        return self.lin(x)


def two_of(kind):
    with torch.device("meta"):
        return nn.Sequential(kind(), nn.Linear(4, 4))


def test_a_module_without_a_function_is_refused_and_given_one(threads):
    driver = PipelineDriver1F1B(Pipe.from_sequential(two_of(Own)), threads)
    with pytest.raises(InitializationError, match=r"0 \(Own\) has '0\.own', and no reset_parameters\(\)"):
        driver.initialize()

    def function(module):
        if isinstance(module, Own):
            nn.init.constant_(module.own, 2.0)

    driver.initialize(function)
    assert torch.equal(driver.state_dict()["0.own"], torch.full((4,), 2.0))
    assert driver.run(2, torch.ones(4, 4)).isfinite().all()


def test_a_buffer_that_nothing_writes_is_refused_and_written(threads):
    driver = PipelineDriver1F1B(Pipe.from_sequential(two_of(Table)), threads)
    with pytest.raises(
        InitializationError, match=r"nothing wrote all of '0\.table' \(float32\[4\]\).*what __init__ computes is lost"
    ):
        driver.initialize()
    with pytest.raises(DriverError, match=r"run\(\) needs numbers"):
        driver.run(2, torch.ones(4, 4))

    def function(module):
        if isinstance(module, Table):
            module.table.copy_(torch.arange(4.0))

    driver.initialize(function, seed=0)
    plain = nn.Sequential(Table(), nn.Linear(4, 4))
    driver.copy_to(plain)
    assert torch.equal(plain[0].table, torch.arange(4.0))
    torch.testing.assert_close(driver.run(2, torch.ones(4, 4)), plain(torch.ones(4, 4)).detach())


def test_a_buffer_may_be_made_elsewhere(threads):
    class Kept(Table):
        def __init__(self):
            super().__init__()
            with torch.device("cpu"):
                self.table = torch.arange(4.0)

    driver = PipelineDriver1F1B(Pipe.from_sequential(two_of(Kept)), threads)
    driver.initialize()
    plain = nn.Sequential(Table(), nn.Linear(4, 4))
    driver.copy_to(plain)
    torch.testing.assert_close(driver.run(2, torch.ones(4, 4)), plain(torch.ones(4, 4)).detach())


def test_it_is_asked_whether_init_weights_is_called(threads):
    model = two_of(Weights)
    driver = PipelineDriver1F1B(Pipe.from_sequential(model), threads)
    with pytest.raises(
        InitializationError, match=r"0 \(Weights\) has _init_weights.*if so, call initialize\(model\.0\._init_weights\)"
    ):
        driver.initialize()
    driver.initialize(model[0]._init_weights)
    assert torch.equal(driver.state_dict()["0.lin.weight"], torch.full((4, 4), 7.0))


def test_an_error_of_a_function_comes_back(threads):
    driver = PipelineDriver1F1B(Pipe.from_sequential(two_of(Own)), threads)

    def function(module):
        raise KeyError("mine")

    with pytest.raises(StepError, match="mine"):
        driver.initialize(function)
    with pytest.raises(DriverError, match=r"run\(\) needs numbers"):
        driver.run(2, torch.ones(4, 4))
    driver.initialize(lambda module: nn.init.ones_(module.own) if isinstance(module, Own) else None)
    assert driver.run(2, torch.ones(4, 4)).isfinite().all()


def test_what_cannot_be_made_is_refused_before_anything_is_sent(threads):
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.table = nn.Linear(4, 4), torch.arange(4.0)

        def forward(self, x):
            return self.lin(x) * self.table

    with pytest.raises(PackingError, match=r"tensor of the meta device, float32\[4\].*Register it as a buffer"):
        PipelineDriver1F1B(Pipe.from_sequential(two_of(Plain)), threads)
    with torch.device("meta"):
        loss = nn.CrossEntropyLoss(torch.ones(4))
    with pytest.raises(PackingError, match=r"tensor of the meta device, float32\[4\]"):
        PipelineDriver1F1B(Pipe.from_sequential(two_of(lambda: nn.Linear(4, 4)), loss), threads)
    copied = copy.deepcopy(Pipe.from_sequential(two_of(Own)))
    with pytest.raises(InitializationError, match="this Pipe, a copy, does not hold"):
        PipelineDriver1F1B(copied, threads).initialize()
    driver = PipelineDriver1F1B(Pipe.from_sequential(two_of(Own)), threads)
    with pytest.raises(InitializationError, match="function=3 is called with each module"):
        driver.initialize(3)
    driver.initialize(lambda module: nn.init.ones_(module.own) if isinstance(module, Own) else None)
    with pytest.raises(DriverError, match="a model on the meta device, which cannot hold numbers"):
        driver.copy_to(two_of(Own))


def test_time_is_not_measured_where_nothing_is_computed():
    model, example = on_meta(), (IDS.to("meta"), TARGET.to("meta"))
    options = {"num_stages": 2, "example_args": example}
    with pytest.raises(pippy.errors.BalanceError, match="split='time' runs the model to measure it"):
        pipeline(model, nn.CrossEntropyLoss(), split="time", **options)
    assert pipeline(model, nn.CrossEntropyLoss(), **options).balance.policy == "parameters (auto)"
    sizes = [pipeline(each, nn.CrossEntropyLoss(), split="size", **options).balance for each in (model,)]
    real = pipeline(Model().double(), nn.CrossEntropyLoss(), split="size", num_stages=2, example_args=(IDS, TARGET))
    assert str(sizes[0]) == str(real.balance)


def test_memory_is_counted_as_for_a_model_with_numbers(threads):
    counts = [driver_of(model, 2, threads).memory(4, IDS, TARGET) for model in (on_meta(), Model().double())]
    check = "\nthe check of the first step:"  # has a plain model only where a process holds it
    assert str(counts[0]) == str(counts[1]).partition(check)[0] and check not in str(counts[0])
