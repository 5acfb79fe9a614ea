"""What a script changes after pipeline() counts from the next step on; what it defines travels to workers."""

import copy
import functools
import gc
import importlib.util
import pickle
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
from torch import nn
from torch._library.custom_ops import OPDEFS
from torch.nn import functional as F

from pippy import PipelineDriver, pipe_split, pipeline
from pippy.drivers.base.errors import DriverError, OptimizerError, StepError
from pippy.drivers.wire import script_objects
from pippy.drivers.wire.pickling import pickle_by_value, unpickle
from pippy.ir.base.errors import ModeError
from pippy.ir.base.names import named_state
from pippy.ir.record.model_watch import ModelWatch
from pippy.ir.trace.tracer import PipeTracer
from tests.comparisons import Beside, update
from tests.drivers.changed_scripts import (
    FOLLOWED,
    LOSSES,
    REFUSED,
    Net,
    Script,
    Whole,
    batch,
    plain_script,
    reset,
    set_here,
    trained,
)

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


class KeepsWhole(PipeTracer):
    def is_leaf_module(self, m, module_qualified_name):
        return isinstance(m, Whole) or super().is_leaf_module(m, module_qualified_name)


class OnWorkers:
    """The script with a driver. It does once as a refusal advises."""

    def __init__(self, cluster, change, model, refused=None, **options):
        self.cluster, self.change, self.refused = cluster, change, refused
        self.model, self.loss, self.options = model, LOSSES[change.loss](), options
        self.told = None
        self.make_pipe()

    def make_pipe(self):
        self.pipe = pipeline(self.model, self.loss, tracer=KeepsWhole())
        self.make_driver()

    def make_driver(self):
        self.driver = PipelineDriver(self.pipe, self.cluster, schedule="1f1b", **self.options)
        self.optimizer = self.driver.instantiate_optimizer(self.change.optimizer, **self.change.options)
        self.gradients, self.zero_grad = self.driver.gradients, self.driver.zero_grad

    def step(self):
        x, target = batch()
        if self.refused is None or self.told is not None:
            return self.driver.run(3, x, target)
        try:
            return self.driver.run(3, x, target)
        except (ModeError, DriverError) as error:
            self.told = str(error)
        with pytest.raises((ModeError, DriverError), match=self.refused.match):  # it is refused again
            self.driver.run(3, x, target)
        getattr(self, f"follow_{self.refused.advice}")()
        return self.driver.run(3, x, target)

    def follow_load(self):
        name = self.told.partition("'")[2].partition("'")[0]
        tensor = dict(named_state(self.model))[name]
        get = "get_parameter" if isinstance(tensor, nn.Parameter) else "get_buffer"
        assert f"driver.load_state_dict({{'{name}': model.{get}('{name}')}}, strict=False)" in self.told
        self.driver.load_state_dict({name: tensor}, strict=False)

    def follow_driver(self):
        assert "make the driver again" in self.told
        self.go_on(self.make_driver)

    def follow_pipeline(self):
        assert "call pipeline() again, and make the driver of what it gives" in self.told
        self.go_on(self.make_pipe)

    def go_on(self, make):
        assert "driver.copy_to(model)" in self.told
        if self.refused.undo is None:
            self.driver.copy_to(self.model)
        else:  # "before a part is replaced"
            self.refused.undo(self)
            self.driver.copy_to(self.model)
            self.change.act(self)
        state = self.optimizer.state_dict()
        make()
        names = [name for name, _ in self.model.named_parameters()]
        replaced = {"first.weight"} if "'first.weight'" in self.told else set()
        kept = {name: each for name, each in state["state"].items() if name in names and name not in replaced}
        groups = [{**state["param_groups"][0], "params": names}]
        self.optimizer.load_state_dict({"state": kept, "param_groups": groups})


def numbers(model):
    return {name: each.detach() for name, each in model.named_parameters()}


def followed(cluster, change, refused=None, model=None, **options):
    """The script with a driver, where the change has given the numbers of the plain loop."""
    model = Net() if model is None else model
    before = copy.deepcopy(model)
    script = OnWorkers(cluster, change, model, refused, **options)
    losses, state = trained(script, change, [], lambda: script.driver.state_dict())
    reset()
    plain = plain_script(change, before)
    expected, parameters = trained(plain, change, [], lambda: numbers(plain.model))
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=1e-12)
    for name, parameter in parameters.items() if "average" not in plain.model._modules else ():
        torch.testing.assert_close(state[name], parameter, rtol=1e-10, atol=1e-12)
    return script


@pytest.fixture(autouse=True)
def as_at_first():
    reset()
    yield
    reset()


@pytest.mark.parametrize("change", FOLLOWED.values(), ids=FOLLOWED)
def test_a_change_is_followed(threads, change):
    """Each but the modes of parts, what is frozen, and what nothing reads was ignored without a word."""
    assert not followed(threads, change, check=False).told


@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED)
def test_a_change_that_cannot_be_followed_is_refused_and_the_advice_works(threads, refused):
    """Each was ignored without a word."""
    assert followed(threads, refused.change, refused, check=False).told is not None


IN_PROCESSES = [
    "an option of the loss",
    "class weights for none",
    "a keyword of a partial",
    "a closure",
    "two attributes",
]


@pytest.mark.parametrize("name", [*IN_PROCESSES, "attributes of parameters"])
def test_a_change_is_followed_in_other_processes_and_checked_by_the_witness(cluster, name):
    followed(cluster, FOLLOWED[name])


@pytest.mark.parametrize("name", ["an option of a layer", "a closure"])
def test_graphs_of_stages_are_recorded_again(threads, name):
    model = Net()
    model.whole = nn.Tanh()  # what assigns attributes is not recorded
    script = followed(threads, FOLLOWED[name], model=model, check=False, compile="graphs")
    assert script.driver.compiled["submod_0"].startswith("graphs for")


@pytest.mark.parametrize("name", REFUSED)
def test_a_pipe_in_this_process_follows_what_it_calls_and_refuses_the_rest(name):
    change, model, (x, target) = REFUSED[name].change, Net(), batch()
    loss = LOSSES[change.loss]()
    pipe = pipeline(model, loss, tracer=KeepsWhole())
    pipe(x, target)
    change.act(Script(model, loss, None, dict, dict, lambda: None))
    if REFUSED[name].advice == "pipeline" and name != "a parameter assigned":  # of a layer that its stage shares
        with pytest.raises(ModeError, match=REFUSED[name].match):
            pipe(x, target)
    else:
        torch.testing.assert_close(pipe(x, target), loss(model(x), target))


def script_function(**values):
    """A loss as in the file of a script, whose functions travel with what they read."""
    code = (
        "def helper(loss):\n    return loss * FACTOR\n"
        "def loss(output, target):\n"
        "    return helper(cross_entropy(output, target, label_smoothing=SETTINGS['smoothing']))\n"
    )
    script = {"__name__": "__main__", "cross_entropy": F.cross_entropy, **values}
    exec(compile(code, "script.py", "exec"), script)
    return script


@pytest.mark.parametrize("kind", ["number", "entry", "dictionary"])
def test_globals_of_a_script_that_its_loss_reads_are_followed(cluster, kind):
    script, model, (x, target) = script_function(FACTOR=1.0, SETTINGS={"smoothing": 0.1}), Net(), batch()
    driver = PipelineDriver(pipeline(model, script["loss"], tracer=KeepsWhole()), cluster)
    for number in (0.5, 0.3):
        if kind == "number":
            script["FACTOR"] = number
        elif kind == "entry":
            script["SETTINGS"]["smoothing"] = number
        else:
            script["SETTINGS"] = {"smoothing": number}
        torch.testing.assert_close(driver.run(3, x, target), script["loss"](model(x), target).detach())


def test_globals_of_a_module_that_workers_import_are_refused_and_the_advice_works(cluster):
    model, (x, target), loss = Net(), batch(), LOSSES["function"]()
    driver = PipelineDriver(pipeline(model, loss, tracer=KeepsWhole()), cluster)
    driver.run(3, x, target)
    set_here(FACTOR=3.0)(None)
    with pytest.raises(ModeError, match=r"'FACTOR' of tests.*is 3.0 now in place of 1.0.*functools.partial\(loss_fn"):
        driver.run(3, x, target)
    reset()
    driver.close()
    followed(cluster, FOLLOWED["a keyword of a partial"])


class Normed(nn.Module):
    """Its statistics change in each step, on the workers, and in the witness."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.steps = 0

    def forward(self, x):
        self.steps = self.steps + 1
        x = self.norm(self.first(x))
        pipe_split()
        return self.last(x)


@pytest.mark.filterwarnings("ignore")
def test_what_a_script_may_do_between_steps_is_no_alarm(threads, tmp_path):
    model, loss, (x, target) = Normed(), nn.CrossEntropyLoss(), batch()
    driver = PipelineDriver(pipeline(model, loss), threads)
    optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
    elsewhere = copy.deepcopy(model)

    def load_trained():
        model.load_state_dict(driver.state_dict())

    def average():
        model.average = copy.deepcopy(model.first)

    between = [
        lambda: driver.copy_to(model),
        lambda: driver.copy_to(elsewhere),
        load_trained,
        lambda: driver.load_state_dict(elsewhere.state_dict()),
        lambda: driver.load(driver.save(tmp_path, optimizer=optimizer), optimizer=optimizer),
        lambda: driver.check(3, x, target),
        lambda: driver.memory(3, x, target),
        lambda: driver.eval_batch(iter([(x, target)]), chunks=1),
        lambda: (model.eval(), model(x), driver.pipe(x, target), model.train()),
        lambda: pickle.loads(pickle.dumps(driver.pipe)),
        average,
        lambda: setattr(model, "_is_hf_initialized", True),
        lambda: model.register_forward_pre_hook(lambda *_: None).remove(),
        lambda: setattr(model, "steps", 7),
        lambda: (model.double(), loss.to("cpu"), gc.collect()),
        lambda: model.zero_grad(),
    ]
    for act in between:
        driver.run(3, x, target)
        update(optimizer)
        act()
    driver.run(3, x, target)


def test_nothing_is_told_to_workers_if_nothing_was_changed(threads, monkeypatch):
    told, model, (x, target) = [], Net(), batch()
    driver = PipelineDriver(pipeline(model, nn.CrossEntropyLoss(), tracer=KeepsWhole()), threads)
    post = driver.commands.post_step
    monkeypatch.setattr(
        driver.commands,
        "post_step",
        lambda steps, *args: told.append({s.flags is None for s in steps.values()}) or post(steps, *args),
    )
    looked = []
    follow = ModelWatch.follow
    monkeypatch.setattr(ModelWatch, "follow", lambda *args, **kwargs: looked.append(1) or follow(*args, **kwargs))
    for number in range(6):
        if number == 3:
            model.act.negative_slope = 0.3
        driver.run(3, x, target)
    assert told == [{False}, {True}, {True}, {False}, {True}, {True}]
    assert len(looked) == 2  # in the first step, and where something was changed


def test_a_copy_of_a_pipe_notices_tensors_in_place_of_its_own():
    model, (x, target) = Net(), batch()
    pipe = copy.deepcopy(pipeline(model, nn.CrossEntropyLoss(), tracer=KeepsWhole()))
    with pytest.raises(ModeError, match="'offset' of the model is another tensor now"):
        torch.func.functional_call(pipe, {"offset": torch.ones(4)}, (x, target))
    pipe(x, target)


def test_an_edit_of_gradients_is_refused_and_hooks_change_them(threads):
    """It was lost without a word."""
    model, (x, target) = Net(), batch()
    driver = PipelineDriver(pipeline(model, nn.CrossEntropyLoss(), tracer=KeepsWhole()), threads)
    optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
    driver.run(3, x, target)
    first = driver.get_grad("last.weight")
    for use in (optimizer.step, lambda: driver.clip_grad_norm_(1.0), lambda: driver.clip_grad_value_(1.0)):
        for gradient in driver.gradients().values():
            gradient.mul_(0.5)
        with pytest.raises(DriverError, match=r"were changed in place, but they are copies.*parameter.register_hook"):
            use()
    assert torch.equal(driver.get_grad("last.weight"), first)
    driver.get_grad("last.weight").clone().mul_(0.5)
    model.last.weight.register_hook(lambda gradient: gradient * 0.5)
    optimizer.zero_grad()
    driver.run(3, x, target)
    torch.testing.assert_close(driver.get_grad("last.weight"), first * 0.5)
    optimizer.step()


def test_the_states_of_an_optimizer_are_said_to_be_on_the_workers(threads):
    model, (x, target) = Net(), batch()
    driver = PipelineDriver(pipeline(model, nn.CrossEntropyLoss(), tracer=KeepsWhole()), threads)
    optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    driver.run(3, x, target)
    optimizer.step()
    for read in (
        lambda: optimizer.state[model.last.weight],
        lambda: list(optimizer.state.values()),
        lambda: list(optimizer.state),
        lambda: optimizer.state.update({1: 2}),
        lambda: setattr(optimizer, "state", {model.last.weight: {}}),
        lambda: bool(optimizer.state),
    ):
        with pytest.raises(OptimizerError, match="states of this optimizer are on the workers"):
            read()
    state = optimizer.state_dict()
    state["state"]["last.weight"]["momentum_buffer"] = torch.zeros(4, 4)
    optimizer.load_state_dict(state)  # as it says
    assert not optimizer.state_dict()["state"]["last.weight"]["momentum_buffer"].any()
    optimizer.state.clear()
    assert not optimizer.state_dict()["state"]


# Custom functions and operators, cached and scripted functions of a script travel to workers, and give the plain numbers.


def run_script():
    """The script as a module that workers cannot import."""
    path = Path(__file__).with_name("functions_of_a_script.py")
    spec = importlib.util.spec_from_file_location("a_script_of_tests", path)
    module = sys.modules["a_script_of_tests"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    return module


SCRIPT = run_script()


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("name", SCRIPT.ROWS)
def test_what_a_script_defines_travels(cluster, name, schedule):
    middle, loss_fn = SCRIPT.ROWS[name]
    model, plain = SCRIPT.Net(middle()), SCRIPT.Net(middle())
    plain.load_state_dict(model.state_dict())
    both = Beside(cluster, model, loss_fn, plain=plain, schedule=schedule)
    both.step(3, torch.randn(7, 4), torch.randn(7, 4))


def test_an_operator_of_a_library_is_refused_by_name(cluster):
    """The row "a custom operator" above follows the advice."""
    model = SCRIPT.Net(SCRIPT.Traced(SCRIPT.of_a_library))
    with pytest.raises(
        StepError, match=r"library_of_tests::cubed is defined in the script.*define it by torch.library.custom_op"
    ):
        PipelineDriver(pipeline(model, torch.nn.functional.mse_loss), cluster).run(
            2, torch.randn(6, 4), torch.randn(6, 4)
        )


def defined(by):
    def kernel(x: torch.Tensor) -> torch.Tensor:
        return x * by

    return torch.library.custom_op("script_of_tests::scaled", mutates_args=())(kernel)


def test_an_operator_that_is_defined_anew_arrives_anew_and_another_process_s_own_stays():
    sent = [pickle_by_value([defined(by), torch.ops.script_of_tests.scaled.default]) for by in (2.0, 3.0)]
    own = defined(5.0)
    assert unpickle(sent[0])[0] is own, "a process that has defined it itself keeps that"
    del own
    OPDEFS.pop("script_of_tests::scaled")
    try:
        for by, pickled in zip((2.0, 3.0), sent):
            definition, operator = unpickle(pickled)
            assert definition(torch.ones(1)).item() == operator(torch.ones(1)).item() == by
    finally:
        script_objects._arrived.pop("script_of_tests::scaled")


def test_a_cached_function_arrives_with_its_options_and_an_empty_cache():
    calls = []

    @functools.lru_cache(maxsize=3, typed=True)
    def counted(n):
        calls.append(n)
        return n + 1

    counted(1)
    arrived = unpickle(pickle_by_value(counted))
    assert arrived.cache_parameters() == {"maxsize": 3, "typed": True}
    assert arrived.cache_info().currsize == 0
    assert arrived(1) == arrived(1) == 2
    assert arrived.cache_info().hits == 1
