"""Compiled pieces: the numbers of the stage to rounding, each piece compiled once, and a compiler that fails stops nothing."""

import contextlib
import copy
import shutil
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from pippy import PipelineDriver, pipeline
from pippy.drivers.worker.compiled import pieces
from pippy.drivers.worker.compiled.pieces import CalledBackend, Inductor, PieceCompiler
from pippy.drivers.worker.compiled.stage_graphs import StageGraphs
from pippy.ir.halves import adding_up
from pippy.ir.run.stage_backward import stage_backward
from tests.comparisons import assert_bits


@pytest.fixture(autouse=True)
def adds_up_all_sizes(monkeypatch):
    """Pieces add up the gradients of these small parameters, too."""
    monkeypatch.setattr(adding_up, "_WORTH_IT", 0)


def layers():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.5), nn.LayerNorm(16), nn.Linear(16, 8))


class Interpreted:
    """In place of an artifact: it runs the graph that it was made of, and is saved by its number."""

    graphs: ClassVar[list[Any]] = []

    def __init__(self, graph):
        self.graph = graph

    def __call__(self, *values):
        return self.graph(*values)

    def save(self, path, format):
        with open(path, "w") as file:
            file.write(str(len(self.graphs)))
        self.graphs.append(self.graph)

    @classmethod
    def load(cls, path, format):
        with open(path) as file:
            return cls(cls.graphs[int(file.read())])


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """An `Inductor` whose compiler only notes what it is given."""
    compiled, asked = [], []

    def compile(graph, inputs, **options):
        compiled.append(graph)
        asked.append(options)
        return Interpreted(graph)

    monkeypatch.setattr(torch._inductor, "standalone_compile", compile)
    monkeypatch.setattr(torch._inductor, "CompiledArtifact", Interpreted)
    made = PieceCompiler(Inductor(folder=tmp_path))
    made.given, made.asked = compiled, asked
    return made


def counts(compiler):
    return compiler.backend.compiled, compiler.backend.loaded


def trained(stage, compiler, halves):
    """The output, the gradient of the input and those of parameters."""
    graphs = StageGraphs("stage", stage, compiler=compiler)
    torch.manual_seed(1)
    x = torch.randn(4, 8, requires_grad=True)
    graphs.forward([x], halves=halves)  # the first F is not compiled
    torch.manual_seed(2)
    output, run = graphs.forward([x], halves=halves)
    if halves:
        (gradient,) = run.backward_input(torch.ones(4, 8))
        assert all(each.grad is None for each in stage.parameters()), "W makes all of these"
        run.backward_weight()
    else:
        (gradient,) = run.backward(torch.ones(4, 8))
    return [output.detach(), gradient, *(each.grad for each in stage.parameters())], graphs.said()


def plainly(stage):
    torch.manual_seed(1)
    x = torch.randn(4, 8, requires_grad=True)
    torch.manual_seed(2)
    output = stage(x)
    stage_backward(output, torch.ones(4, 8), [x])
    return [output.detach(), x.grad, *(each.grad for each in stage.parameters())]


def said_with_the_same_bits(stage, compiler, halves=False):
    """What is said of a stage, which gives what the plain one gives."""
    expected = plainly(copy.deepcopy(stage))
    found, said = trained(stage, compiler, halves)
    assert all(map(torch.equal, expected, found))
    return said


COMPILED = "compiled graphs for 1 form of inputs"


@pytest.mark.parametrize("halves", [False, True])
def test_what_is_drawn_is_drawn_outside_of_compiled_code(compiler, halves):
    assert said_with_the_same_bits(layers(), compiler, halves) == COMPILED
    assert counts(compiler)[0] == len(compiler.given) == (3 if halves else 2)
    targets = [str(node.target) for graph in compiler.given for node in graph.graph.nodes if node.op == "call_function"]
    assert not any("bernoulli" in each for each in targets)


def test_stages_that_are_alike_are_compiled_once_and_found_by_the_next_process(compiler, tmp_path):
    for _ in range(3):
        trained(layers(), compiler, halves=True)
    assert counts(compiler) == (3, 0)
    other = PieceCompiler(Inductor(folder=tmp_path))
    said_with_the_same_bits(layers(), other, halves=True)
    assert counts(other) == (0, 3)
    trained(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), other, halves=True)
    assert other.backend.compiled == 3, "another stage"


def test_modes_and_options_are_inductors_and_their_pieces_are_kept_apart(compiler, tmp_path):
    options = {"epilogue_fusion": False}
    for given in ({}, {"mode": "max-autotune"}, {"options": options}, {"mode": "default"}):
        other = PieceCompiler(Inductor(**given, folder=tmp_path))
        trained(layers(), other, halves=False)
        assert counts(other) == ((0, 2) if given.get("mode") == "default" else (2, 0))
    asked = [each["options"]["config_patches"] for each in compiler.asked[::2]]
    assert asked[0] == {} and asked[1]["max_autotune"] is True and asked[2] == options


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_other_backends_have_real_halves(backend):
    stage = layers()
    plain = plainly(copy.deepcopy(stage))
    found, said = trained(stage, PieceCompiler(CalledBackend(backend)), halves=True)
    torch.testing.assert_close(found, plain)
    assert said == COMPILED


def test_pieces_with_other_constants_are_compiled_apart(compiler):
    class Scaled(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.layer, self.factor = nn.Linear(8, 8), torch.full((8,), factor)

        def forward(self, x):
            return self.layer(x) * self.factor

    for factor in (1.0, 2.0, 2.0):
        said_with_the_same_bits(Scaled(factor), compiler)
    assert compiler.backend.compiled == 4


def test_pieces_that_another_worker_compiles_come_last(compiler, tmp_path, monkeypatch):
    """So two workers with equal stages compile each one half of the pieces."""
    stage = layers()
    trained(stage, compiler, halves=True)
    saved = [path for path in tmp_path.iterdir() if not path.name.endswith(".lock")]
    asked, locked = [], pieces._locked

    @contextlib.contextmanager
    def busy(path, wait):
        asked.append((path.stem, wait))
        with locked(path, wait) as free:
            yield free and (wait or path.stem != asked[0][0])

    monkeypatch.setattr(pieces, "_locked", busy)
    other = PieceCompiler(Inductor(folder=tmp_path))
    trained(layers(), other, halves=True)
    assert counts(other) == (0, 3) and len(saved) == 3
    assert [wait for _, wait in asked] == [False, False, False, True] and asked[0][0] == asked[3][0]


def test_a_lock_that_another_has_is_not_waited_for(tmp_path):
    with (
        pieces._locked(tmp_path / "lock", wait=True) as mine,
        pieces._locked(tmp_path / "lock", wait=False) as other,
    ):
        assert mine and not other


def test_a_file_that_cannot_be_read_is_compiled_again(compiler, tmp_path):
    trained(layers(), compiler, halves=False)
    for path in tmp_path.iterdir():
        if not path.name.endswith(".lock"):
            path.write_text("half written")
    other = PieceCompiler(Inductor(folder=tmp_path))
    trained(layers(), other, halves=False)
    assert counts(other) == (2, 0) and other.failures == []


def test_an_artifact_of_another_version_or_setting_is_not_loaded(compiler, tmp_path, monkeypatch):
    trained(layers(), compiler, halves=False)
    for change in (
        lambda: monkeypatch.setattr(torch, "__version__", "3.0.0"),
        lambda: monkeypatch.setattr(torch._inductor.config, "epilogue_fusion", False),
        lambda: monkeypatch.setattr(torch, "get_num_threads", lambda: 77),
    ):
        change()
        other = PieceCompiler(Inductor(folder=tmp_path))
        trained(layers(), other, halves=False)
        assert counts(other) == (2, 0)


def test_code_that_cannot_be_saved_runs(compiler, monkeypatch):
    def full(*_, **__):
        raise OSError("no space left on device")

    monkeypatch.setattr(Interpreted, "save", full)
    assert said_with_the_same_bits(layers(), compiler) == COMPILED and counts(compiler) == (2, 0)


@pytest.mark.parametrize("fails", ["the compiler", "the folder"])
def test_what_cannot_be_compiled_runs_as_a_graph_and_says_why(monkeypatch, compiler, tmp_path, fails):
    if fails == "the compiler":

        def refuse(*_, **__):
            raise RuntimeError("no working C++ compiler\nand a long trace")

        monkeypatch.setattr(torch._inductor, "standalone_compile", refuse)
    else:
        shutil.rmtree(tmp_path)
        tmp_path.write_text("a file")
    said = said_with_the_same_bits(layers(), compiler, halves=True)
    why = {"the compiler": "RuntimeError: no working C++ compiler", "the folder": "FileExistsError"}[fails]
    assert said.startswith(f"{COMPILED}; as graphs that are not compiled: {why}")


class Attends(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.layer, self.dropout = nn.Linear(8, 8), dropout

    def forward(self, x):
        q = self.layer(x).view(1, 2, 2, 8)
        return nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=self.dropout).view(4, 8)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_is_compiled(compiler, dropout):
    assert said_with_the_same_bits(Attends(dropout), compiler) == COMPILED and counts(compiler) == (2, 0)


def test_random_numbers_that_depend_on_values_are_drawn_by_the_graph(compiler):
    class Draws(nn.Linear):
        def forward(self, x):
            return super().forward(x) * torch.bernoulli(x.detach().sigmoid())

    assert said_with_the_same_bits(Draws(8, 8), compiler).endswith("draws random numbers that depend on values")


def test_drivers_compile_their_stages(threads, compiler, monkeypatch, tmp_path):
    """Equal stages on several workers are compiled once, and a second step compiles nothing."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    pipe = pipeline(model, nn.MSELoss(), split=["1", "2", "3"])
    x, target = torch.randn(12, 8), torch.randn(12, 8)
    made = []
    for compile in (False, True):
        driver = PipelineDriver(pipe, threads, schedule="zb_h1", compile=compile, check=False)
        made.append((driver.run(4, x, target), driver.gradients()))
        driver.zero_grad()
        driver.run(4, x, target)
        said = driver.compiled
        driver.close()
    assert torch.equal(made[0][0], made[1][0])
    assert_bits(made[1][1], made[0][1])
    assert set(said.values()) == {COMPILED}
    # All stages share F. The first one, whose input needs no gradient, has a W of its own; the others share I and W. The loss
    # has F and I.
    assert len(compiler.given) == 6


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_itself(tmp_path):
    compiler = PieceCompiler(Inductor(folder=tmp_path))
    stage = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    expected = plainly(copy.deepcopy(stage))
    found, _ = trained(stage, compiler, halves=False)
    assert compiler.failures == [] and compiler.backend.compiled == 2
    for one, other in zip(expected, found):
        torch.testing.assert_close(one, other)
    other = PieceCompiler(Inductor(folder=tmp_path))
    again, _ = trained(copy.deepcopy(stage), other, halves=False)
    assert counts(other) == (0, 2) and all(map(torch.equal, found[:2], again[:2]))
