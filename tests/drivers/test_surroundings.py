"""What surrounds a call bears on the workers as on plain PyTorch, or the call is refused: each row of the table."""

import copy
import re
import threading
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from pippy import Pipe, PipelineDriver, PipelineDriver1F1B, PipeTracer, pipe_split, pipeline
from pippy.drivers.base.errors import DriverError, StepError
from pippy.ir.base.errors import TracingError
from pippy.ir.base.surroundings import SETTINGS, TABLE, Refused
from tests.drivers.models import Chain

pytestmark = pytest.mark.usefixtures("seeded")


class Twice(nn.Module):
    """Two stages; each uses its weight twice, so that casting it once or twice gives other gradients."""

    def __init__(self, width=8):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        x = torch.tanh(self.first(torch.tanh(self.first(x))))
        pipe_split()
        return self.second(torch.relu(self.second(x)))


def mse(output, target):
    return F.mse_loss(output.float(), target.float())


def plain_gradients(model, x, target, chunks):
    """The loss and the gradients of plain PyTorch, with the same micro-batches."""
    losses = []
    for part, its_target in zip(x.chunk(chunks), target.chunk(chunks)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = mse(model(part), its_target) / chunks
            loss.backward()
        losses.append(loss.detach())
    return sum(losses), {name: each.grad for name, each in model.named_parameters()}


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("where", ["threads", "cluster"])
def test_autocast_goes_with_the_step(request, where, schedule):
    """It was ignored: the workers computed in float32 where plain PyTorch computes in bfloat16."""
    # Torch keeps one cache of casts for a process: threads that share it may cast a weight twice that is used twice.
    plain = Chain(2, width=64) if where == "threads" else Twice(64)
    x, target = torch.randn(512, 64), torch.randn(512, 64)
    driver = PipelineDriver(pipeline(copy.deepcopy(plain), mse), request.getfixturevalue(where), schedule=schedule)
    expected, gradients = plain_gradients(plain, x, target, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = driver.run(4, x, target)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for name, gradient in driver.gradients().items():
        torch.testing.assert_close(gradient, gradients[name], rtol=0, atol=0)
    driver.zero_grad()
    outside = driver.run(4, x, target)
    assert not torch.equal(outside, loss), "autocast ends with its region"


def test_autocast_around_the_reference():
    plain, x, target = Twice(), torch.randn(6, 8), torch.randn(6, 8)
    pipe = pipeline(copy.deepcopy(plain), mse)
    expected, gradients = plain_gradients(plain, x, target, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = pipe(x, target)
    assert torch.equal(loss, expected)
    for name, parameter in pipe.named_parameters():
        assert torch.equal(parameter.grad, gradients[name])


def test_a_weight_is_cast_anew_after_an_update(cluster):
    """Torch keeps casts until autocast ends; beyond an update they would be those of the old weight."""
    plain, x, target = Twice(), torch.randn(6, 8), torch.randn(6, 8)
    driver = PipelineDriver1F1B(pipeline(copy.deepcopy(plain), mse), cluster)
    optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=1.0)
    theirs = torch.optim.SGD(plain.parameters(), lr=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        theirs.zero_grad()
        expected, _ = plain_gradients(plain, x, target, 2)
        theirs.step()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.testing.assert_close(driver.run(2, x, target), expected)
            optimizer.step()


class Compares(nn.Module):
    """Gives 1 where a row of the table reads as was expected, and 0 elsewhere."""

    def __init__(self, row, expected):
        super().__init__()
        self.row, self.expected = row, expected

    def forward(self, x):
        return x * 0 + float(TABLE[self.row].read() == self.expected)


@contextmanager
def set_and_back(read, write, value):
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def reduced_precision(value):
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = value


class Counts(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@contextmanager
def transformed():
    """Inside a transform of torch.func."""
    torch._C._functorch._grad_increment_nesting()
    try:
        yield
    finally:
        torch._C._functorch._grad_decrement_nesting()


PRECISION = next(row for row in SETTINGS if "set_float32_matmul_precision" in row.name)
META = torch.device("meta")


@contextmanager
def hooks_of_all():
    handle = register_module_forward_hook(lambda *_: None)
    try:
        yield
    finally:
        handle.remove()


CONTEXTS = {
    "torch.set_default_dtype": lambda: set_and_back(torch.get_default_dtype, torch.set_default_dtype, torch.bfloat16),
    "torch.use_deterministic_algorithms": lambda: set_and_back(
        torch.are_deterministic_algorithms_enabled,
        lambda on: torch.use_deterministic_algorithms(on, warn_only=on),
        True,
    ),
    "torch.set_float32_matmul_precision, fp32_precision and allow_tf32 of torch.backends": lambda: set_and_back(
        PRECISION.read,
        lambda value: PRECISION.write(value) if value else torch.set_float32_matmul_precision("medium"),
        None,
    ),
    "allow_bf16_reduced_precision_reduction and allow_fp16_reduced_precision_reduction of torch.backends": lambda: (
        set_and_back(lambda: True, reduced_precision, False)
    ),
    "torch.backends.cudnn.flags": lambda: torch.backends.cudnn.flags(enabled=False),
    "torch.backends.mkldnn.flags": lambda: torch.backends.mkldnn.flags(enabled=False),
    "torch.nn.attention.sdpa_kernel": lambda: sdpa_kernel(SDPBackend.MATH),
    "torch.autograd.detect_anomaly": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "torch.utils.checkpoint.set_checkpoint_early_stop": lambda: set_checkpoint_early_stop(False),
    "torch.no_grad, torch.inference_mode": torch.inference_mode,
    "torch.autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False),
    "torch.compiler.set_stance": lambda: torch.compiler.set_stance("force_eager"),
    "torch.compiler.set_stance(force_backend=)": lambda: torch.compiler.set_stance(force_backend="eager"),
    "torch.set_default_device, with torch.device": lambda: META,
    "torch.autograd.graph.saved_tensors_hooks, save_on_cpu": torch.autograd.graph.save_on_cpu,
    "a TorchFunctionMode": Counts,
    "a TorchDispatchMode": lambda: FlopCounterMode(display=False),
    "a transform of torch.func": transformed,
    "torch.nn.modules.module.register_module_forward_hook and its like": hooks_of_all,
    "torch.autograd.forward_ad.dual_level": forward_ad.dual_level,
}


def test_each_row_has_an_example():
    assert [row.name for row in TABLE] == list(CONTEXTS)


FOLLOWED = [pytest.param(at, row, id=row.name) for at, row in enumerate(TABLE) if not isinstance(row, Refused)]
REFUSED = [pytest.param(row, id=row.name) for row in TABLE if isinstance(row, Refused)]


def mean(output, target):
    return output.mean()


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize(("at", "row"), FOLLOWED)
def test_what_is_followed_is_so_on_the_workers(cluster, at, row):
    outside = row.read()
    with CONTEXTS[row.name]():
        inside = row.read()
    assert inside != outside
    x, target = torch.randn(4, 2), torch.zeros(4)
    for expected in (inside, outside):
        model = nn.Sequential(nn.Linear(2, 2), Compares(at, expected))
        driver = PipelineDriver1F1B(Pipe.from_sequential(model, mean), cluster, check=False)
        with CONTEXTS[row.name]():
            assert driver.run(2, x, target) == float(expected == inside)
        assert driver.run(2, x, target) == float(expected == outside)
        driver.close()


@pytest.mark.parametrize("row", REFUSED)
def test_what_is_refused_is_refused_before_anything_is_sent_and_its_remedy_works(threads, row):
    """They were ignored: no hook was called, and no operation counted."""
    model, x, target = Chain(2), torch.randn(4, 8), torch.randn(4, 8)
    pipe = pipeline(model, F.mse_loss)
    driver = PipelineDriver1F1B(pipe, threads)
    sent = list(threads.session.counts)
    with CONTEXTS[row.name]():
        with pytest.raises(DriverError, match=re.escape(f"driver.run() is called inside of {row.name}")) as caught:
            driver.run(2, x, target)
        assert threads.session.counts == sent
        assert row.remedy in str(caught.value)
        if "pipe(...)" in row.remedy:
            pipe(x, target)
        elif "model itself" in row.remedy:
            F.mse_loss(model(x), target)
        elif "with torch.device('cpu')" in row.remedy:
            with torch.device("cpu"):
                driver.run(2, x, target)
    driver.run(2, x, target)


def test_the_page_has_a_row_for_each():
    page = (Path(__file__).parents[2] / "docs/same.md").read_text().replace("`", "")
    assert [
        row.name
        for row in TABLE
        if f"| {row.name} | {'refused' if isinstance(row, Refused) else 'followed'}" not in page
    ] == []


def test_a_step_leaves_the_script_s_settings_alone(threads):
    """Under torchrun worker 0 is a thread of the script's process: a step set the settings of when its driver was made."""
    driver = PipelineDriver1F1B(pipeline(Chain(2), F.mse_loss), threads)
    x, target = torch.randn(4, 8), torch.randn(4, 8)
    with CONTEXTS["torch.set_default_dtype"](), CONTEXTS["torch.use_deterministic_algorithms"]():
        driver.run(2, x, target)
        assert torch.get_default_dtype() is torch.bfloat16
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    driver.run(2, x, target)
    assert torch.get_default_dtype() is torch.float32 and not torch.are_deterministic_algorithms_enabled()


class Waits(nn.Module):
    """A stage that goes on when the test lets it."""

    def forward(self, x):
        assert GO_ON.wait(20)
        return x


GO_ON = threading.Event()


def test_a_script_that_changes_a_setting_while_a_step_runs_beside_it(threads):
    GO_ON.clear()
    driver = PipelineDriver1F1B(
        Pipe.from_sequential(nn.Sequential(nn.Linear(2, 2), Waits()), mean), threads, check=False
    )
    x, target = torch.randn(4, 2), torch.zeros(4)
    step = driver.run_async(2, x, target)
    with CONTEXTS["torch.set_default_dtype"]():
        GO_ON.set()
        with pytest.raises(
            StepError, match=r"changed torch.set_default_dtype while a step ran.*run_async\(...\).result"
        ):
            step.result()
    step = driver.run_async(2, x, target)
    expected = step.result()
    with CONTEXTS["torch.set_default_dtype"]():
        assert torch.equal(driver.run(2, x, target), expected)


def drawn(cluster, between):
    """What a driver draws in two steps, with something between them."""
    torch.manual_seed(3)
    pipe = Pipe.from_sequential(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), mean)
    driver = PipelineDriver1F1B(pipe, cluster)
    x, target = torch.randn(4, 8), torch.zeros(4)
    first = driver.run(2, x, target)
    between(pipe, x, target)
    return first, driver.run(2, x, target)


def test_another_driver_changes_no_random_numbers(cluster):
    """To make a driver seeded the workers anew, for all other drivers, too."""

    def another(pipe, x, target):
        driver = PipelineDriver1F1B(pipe, cluster)
        for _ in range(3):
            driver.run(2, x, target)
        driver.close()

    assert drawn(cluster, another) == drawn(cluster, lambda *_: None)


def test_a_stage_that_leaves_a_setting_changed_when_it_fails(cluster):
    """The next command has the settings of its own call."""
    model = nn.Sequential(nn.Linear(2, 2), Spoils())
    driver = PipelineDriver1F1B(Pipe.from_sequential(model, mean), cluster, check=False)
    with pytest.raises(StepError, match="spoiled"):
        driver.run(2, torch.zeros(4, 2), torch.zeros(4))
    assert driver.run(2, torch.ones(4, 2), torch.zeros(4)) == 1


class Spoils(nn.Module):
    """Gives 1 where the default dtype is as usual, and changes it before it fails."""

    def forward(self, x):
        at_most = float(torch.get_default_dtype() is torch.float32)
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 1:
            torch.set_default_dtype(torch.float64)
            raise RuntimeError("spoiled")
        return x * 0 + at_most


class Surrounded(nn.Module):
    """Enters something in its forward, around one operation."""

    def __init__(self, context):
        super().__init__()
        self.lin, self.region = nn.Linear(2, 2), Region(context)

    def forward(self, x):
        x = self.lin(x)
        pipe_split()
        return self.region(x)


class Region(nn.Module):
    def __init__(self, context):
        super().__init__()
        self.context = context

    def forward(self, x):
        with self.context():
            return x * torch.zeros(x.size(0), 1)


class Inside(Surrounded):
    """The same in the forward of the model itself, which cannot be kept whole."""

    def forward(self, x):
        x = self.lin(x)
        pipe_split()
        with self.region.context():
            return x * torch.zeros(x.size(0), 1)


class Whole(PipeTracer):
    def is_leaf_module(self, m, module_qualified_name):
        return isinstance(m, Region) or super().is_leaf_module(m, module_qualified_name)


KEPT = (
    "torch.no_grad, torch.inference_mode",
    "torch.set_default_device, with torch.device",
    "torch.utils.checkpoint.set_checkpoint_early_stop",
)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("name", [name for name in CONTEXTS if name not in KEPT])
def test_in_forward_it_is_refused_with_the_line_and_both_remedies_work(name):
    """All but autocast were dropped without a word."""
    with pytest.raises(TracingError, match="a traced graph cannot hold") as caught:
        pipeline(Inside(CONTEXTS[name]))
    assert "return x * torch.zeros(x.size(0), 1)" in str(caught.value) or "with self.region" in str(caught.value)
    around = pipeline(Inside(nullcontext))
    whole = pipeline(Surrounded(CONTEXTS[name]), tracer=Whole)
    if name == "a transform of torch.func":
        return  # it fails in plain PyTorch, too: tensors from outside take part
    x = torch.randn(3, 2)
    whole(x)
    with CONTEXTS[name]():
        around(x)


class OnMeta(nn.Module):
    def forward(self, x):
        with META:
            kept = torch.ones(3)
        pipe_split()
        return x + kept.size(0) * (kept.device.type == "meta")


def test_a_default_device_in_forward_is_kept_or_refused():
    assert torch.equal(pipeline(OnMeta())(torch.ones(2)), OnMeta()(torch.ones(2)))
    with pytest.raises(TracingError, match=r"return x \* torch.zeros\(x.size\(0\), 1\)"):
        pipeline(Inside(CONTEXTS["torch.set_default_device, with torch.device"]))


def test_what_forward_is_surrounded_by_while_it_is_traced_is_no_matter():
    for name, context in CONTEXTS.items():
        if context is hooks_of_all:
            continue  # they would be called with what is traced: pipeline() refuses them
        with context():
            assert len(pipeline(Surrounded(nullcontext)).split_gm.graph.nodes) == 4, name
