"""After a trace, one that succeeds and one that is refused, torch and the caches of the user's code are as they were."""

import contextlib
import copy
import functools
import importlib

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from pippy import PipeTracer, PippyWarning, pipe_split, pipeline
from pippy.ir.base.errors import PippyError, TracingError
from pippy.ir.trace.left_as_it_was import torch_as_it_is

X = torch.randn(2, 4)
TABLES: dict[int, torch.Tensor] = {}
LIST: list[torch.Tensor] = []
LAST = None
CALLS: list[int] = []


@functools.lru_cache
def limited(n):
    return torch.arange(n) * 1.0


@functools.cache
def unlimited(n):
    return {"table": (torch.arange(n) * 1.0,)}


def in_a_global(n):
    if n not in TABLES:
        TABLES[n] = torch.arange(n) * 1.0
    return TABLES[n]


def in_a_default(n, known={}):  # noqa: B006
    return known.setdefault(n, torch.arange(n) * 1.0)


def made():
    known = {}

    def in_a_closure(n):
        return known.setdefault(n, torch.arange(n) * 1.0)

    return in_a_closure


in_a_closure = made()


def as_an_attribute(n):
    if not hasattr(as_an_attribute, "table"):
        as_an_attribute.table = torch.arange(n) * 1.0
    return as_an_attribute.table


class Tables:
    table = None

    def __init__(self):
        self.known = {}

    def of(self, n):
        return self.known.setdefault(n, torch.arange(n) * 1.0)

    @classmethod
    def of_class(cls, n):
        if cls.table is None:
            cls.table = torch.arange(n) * 1.0
        return cls.table

    @staticmethod
    @functools.cache
    def cached(n):
        return torch.arange(n) * 1.0


tables = Tables()


def in_a_global_name(n):
    global LAST
    if LAST is None:
        LAST = torch.arange(n) * 1.0
    return LAST


def in_a_list(n):
    CALLS.append(n)
    if not LIST:
        LIST.append(torch.arange(n) * 1.0)
    return LIST[0]


CACHING = [
    limited,
    lambda n: unlimited(n)["table"][0],
    in_a_global,
    in_a_default,
    in_a_closure,
    as_an_attribute,
    tables.of,
    Tables.of_class,
    Tables.cached,
    in_a_global_name,
    in_a_list,
]
NAMES = """limited unlimited in_a_global in_a_default in_a_closure as_an_attribute of_object of_class cached_method
    in_a_global_name in_a_list""".split()


class Adds(nn.Module):
    """It adds a table that it keeps, and asks for numbers if it is to be refused."""

    def __init__(self, table, is_refused):
        super().__init__()
        self.lin, self.table, self.is_refused = nn.Linear(4, 4), [table], is_refused

    def forward(self, x):
        x = self.lin(x) + self.table[0](4)
        pipe_split()
        return x * 2 if self.is_refused and x.sum() > 0 else x * 3


class Whole(PipeTracer):
    def is_leaf_module(self, m, module_qualified_name):
        return isinstance(m, Adds) or super().is_leaf_module(m, module_qualified_name)


def forget():
    global LAST
    limited.cache_clear(), unlimited.cache_clear(), Tables.cached.cache_clear()
    for each in (TABLES, LIST, in_a_default.__defaults__[0], tables.known, CALLS):
        each.clear()
    in_a_closure.__closure__[0].cell_contents.clear()
    as_an_attribute.__dict__.clear()
    Tables.table = LAST = None


@pytest.mark.parametrize("with_example", [True, False])
@pytest.mark.parametrize("is_refused", [False, True], ids=["traced", "refused"])
@pytest.mark.parametrize("table", CACHING, ids=NAMES)
@pytest.mark.filterwarnings("ignore")
def test_the_plain_model_computes_with_real_tensors_afterwards(table, is_refused, with_example):
    """A cached function kept a fake tensor, or a proxy, and the plain model gave fakes from then on."""
    forget()
    model = Adds(table, is_refused)
    expected = model.lin(X) + torch.arange(4)
    kind = {"example_args": (X,)} if with_example else {}
    try:
        pipe = pipeline(model, **kind)
        assert torch.equal(pipe(X), expected * 3)
    except PippyError:
        assert is_refused
    assert type(table(4)) is torch.Tensor
    result = model(X)
    assert not isinstance(result, FakeTensor)
    assert torch.equal(result, expected * (2 if is_refused and expected.sum() > 0 else 3))


class DropsOut(Adds):
    def forward(self, x):
        return torch.dropout(super().forward(x), 0.5, self.training)


def test_a_model_that_is_traced_in_both_modes_finds_nothing_of_the_first_trace():
    forget()
    model = DropsOut(limited, False)
    pipe = pipeline(model, example_args=(X,))
    assert torch.equal(pipe.eval()(X), model.eval()(X))


def test_a_cache_of_an_installed_package_is_not_used_by_another_trace(tmp_path, monkeypatch):
    """No walk reaches it. The graph of the other mode had a node of the first graph."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "keeps_tables.py").write_text(
        "import torch\ntables = {}\ndef table(n):\n    return tables.setdefault(n, torch.arange(n) * 1.0)\n"
    )
    monkeypatch.syspath_prepend(folder)
    keeps_tables = importlib.import_module("keeps_tables")
    pipe = pipeline(DropsOut(lambda n: keeps_tables.table(n), False), example_args=(X,))
    with pytest.raises(PippyError, match="kept in a cache of an installed package"):
        pipe.eval()(X)


@pytest.mark.filterwarnings("ignore")
def test_what_a_leaf_caches_while_its_result_is_found_on_fake_tensors():
    forget()
    model = nn.Sequential(nn.Linear(4, 4), Inner(), nn.Linear(4, 4))
    pipe = pipeline(model, tracer=KeepsInner, example_args=(X,), num_stages=2)
    assert type(limited(4)) is torch.Tensor
    assert torch.equal(pipe(X), model(X))


class Inner(nn.Module):
    def forward(self, x):
        return x + limited(4)


class KeepsInner(PipeTracer):
    def is_leaf_module(self, m, module_qualified_name):
        return isinstance(m, Inner) or super().is_leaf_module(m, module_qualified_name)


def test_what_the_user_had_cached_stays():
    forget()
    mine, other = limited(4), in_a_global(3)
    with pytest.raises(PippyError):
        pipeline(Adds(in_a_global, True), example_args=(X,))
    assert limited(4) is mine and TABLES[3] is other and len(TABLES) == 1 and not CALLS
    pipeline(Adds(in_a_list, False), example_args=(X,))
    assert CALLS and not LIST  # a counter that holds no stand-in is the user's


class Mapped(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.lin, self.function = nn.Linear(4, 4), function

    def forward(self, x):
        x = self.lin(x)
        pipe_split()
        return self.function(x)


def fails(x):
    return x * 2 if x.sum() > 0 else x


class Doubles(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def enters_all(x):
    Doubles().__enter__()
    torch.autocast("cpu").__enter__()
    torch.no_grad().__enter__()
    torch.set_default_dtype(torch.float64)
    forward_ad.enter_dual_level()
    torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t).__enter__()
    raise ValueError("stops here")


FUNCTIONS = {
    "vmap": torch.vmap(torch.sin),
    "vmap refused": torch.vmap(fails),
    "grad": torch.func.grad(lambda x: torch.vmap(fails)(x).sum()),
    "jvp": lambda x: torch.func.jvp(fails, (x,), (x,)),
    "enters": enters_all,
}


def state():
    c = torch._C
    return (
        c._functorch.get_dynamic_layer_stack_depth(),
        c._len_torch_function_stack(),
        c._len_torch_dispatch_stack(),
        c._autograd._top_saved_tensors_default_hooks(True),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.get_default_dtype(),
        torch.get_default_device(),
        forward_ad._current_level,
    )


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.filterwarnings("ignore")
def test_torch_is_as_it_was(name):
    """A model with a torch.vmap that was refused left a level of torch.func: requires_grad_() raised from then on."""
    before = state()
    with contextlib.suppress(PippyError):
        pipeline(Mapped(FUNCTIONS[name]), example_args=(X,))
    assert state() == before
    x = torch.randn(3, 3).requires_grad_()
    torch.vmap(torch.sin)(x).sum().backward()
    assert torch.equal(x.grad, x.cos())
    assert torch.allclose(torch.func.grad(lambda v: (v**2).sum())(x), 2 * x)


def test_a_forward_that_stops_within_everything():
    before = state()
    with pytest.raises(ValueError), contextlib.ExitStack() as stack:
        stack.callback(torch_as_it_is())
        enters_all(X)
    assert state() == before
    with torch.autocast("cpu", torch.bfloat16):
        within = state()
        restore = torch_as_it_is()
        torch.autocast("cpu", torch.float16).__enter__()
        restore()
        assert state() == within and (X @ X.T).dtype == torch.bfloat16
    assert state() == before


class RunningMean:
    """Divides by a mean that it keeps."""

    def __init__(self):
        self.mean = torch.ones(())

    def __call__(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return x / self.mean


class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.by = nn.Linear(4, 4), nn.Linear(4, 4), RunningMean()

    def forward(self, x):
        return self.last(self.by(self.first(x)))


class Marked(Normalized):
    def forward(self, x):
        x = self.first(x)
        pipe_split()
        return self.last(self.by(x))


def test_a_number_that_an_object_keeps_is_no_constant():
    """Each step had the number of before the first."""
    with pytest.raises(TracingError, match="sets 'mean' of a RunningMean to what it computes"):
        pipeline(Marked())
    model = Normalized()
    assert torch.equal(model.by.mean, torch.ones(()))
    with pytest.warns(PippyWarning, match="'mean' of a RunningMean"):
        pipe = pipeline(model)
    plain, x = copy.deepcopy(model), torch.randn(3, 4)
    for _ in range(3):
        torch.testing.assert_close(pipe(x), plain(x))
