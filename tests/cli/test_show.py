"""`pippy show`: models are found by name, and shown as the library shows them; mistakes are said."""

from typing import Any

import pytest
import torch
from torch import nn

from pippy import Pipe, SplitPoint, annotate_split_points, pipeline
from tests.models.hugging_face import transformers

MODEL = """
import torch
from torch import nn
from pippy import Pipe, pipe_split

class Net(nn.Module):
    def __init__(self, layers=1, width=8):
        super().__init__()
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 1)
        self.blocks = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def forward(self, x):
        x = torch.relu(self.first(x))
        pipe_split()
        return self.last(self.blocks(x) + x)

class Branches(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x

class Inside:
    Net = Net

def made(**options):
    return Net(**options)

def broken():
    raise RuntimeError("no weights")

def number():
    return 3

def distance(output, target):
    return ((output - target) ** 2).mean()

chain = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1))
pipe = Pipe.from_sequential(chain, nn.MSELoss())
size = 3

class Deep(nn.Sequential):
    def __init__(self, width, depth):
        super().__init__(*(nn.Linear(width, width) for _ in range(depth)))
"""


IN_THE_FILE: dict[str, Any] = {}
exec(MODEL, IN_THE_FILE)
Net = IN_THE_FILE["Net"]


@pytest.fixture(autouse=True)
def model(tmp_path):
    (tmp_path / "nets.py").write_text(MODEL)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "inner.py").write_text("from nets import Net\n")


@pytest.mark.parametrize(
    "target", ["nets.py:Net", "nets:Net", "./nets.py:made", "nets:Inside.Net", "pack.inner:Net", "pack/inner.py:Net"]
)
def test_a_model_is_found_and_shown_as_the_library_does(pippy, tmp_path, monkeypatch, target):
    monkeypatch.syspath_prepend(tmp_path)  # for what a file imports from beside its folder
    pipe = pipeline(Net(layers=2), nn.MSELoss())
    code = "".join(str(pipe).partition("def forward")[1:]).strip()
    output = pippy("show", target, "--arg", "layers=2", "--loss", "torch.nn:MSELoss")
    assert pippy("show", target, "--arg", "layers=2", "--loss", "MSELoss") == output
    assert output == f"{code}\n\n{pipe.draw()}\n\n{pipe.draw().table()}\n"


def test_formats_and_shapes(pippy):
    pipe, x, target = pipeline(Net(width=4), nn.MSELoss()), torch.zeros(3, 8), torch.zeros(3, 1)
    command = ["nets:Net", "--arg", "width=4", "--loss", "torch.nn:MSELoss", "--input", "float32[3, 8]"]
    command += ["--input", "target=[3,1]", "--format"]
    drawing = pipe.draw(x, target)
    for name, drawn in (
        ("text", str(drawing)),
        ("table", drawing.table()),
        ("mermaid", drawing.mermaid()),
        ("svg", drawing.svg()),
    ):
        assert pippy("show", *command, name).rstrip() == drawn.rstrip(), name


def test_splits_and_the_loss_by_name(pippy):
    model = Net(layers=3)
    annotate_split_points(model, {"blocks.1": SplitPoint.BEGINNING, "blocks.2": SplitPoint.END})
    output = pippy("show nets:Net --arg layers=3 --split blocks.1,blocks.2:end --loss nets:distance --format text")
    assert output.rstrip() == str(pipeline(model, lambda output, target: (output - target).mean()).draw())


def test_a_pipe_and_a_sequential(pippy):
    pipe = Pipe.from_sequential(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1)), nn.MSELoss())
    assert pippy("show nets:pipe --format table").rstrip() == pipe.draw().table()
    command = "show nets:chain --sequential --loss torch.nn:MSELoss --format table"
    assert pippy(command).rstrip() == pipe.draw().table()


@pytest.mark.parametrize(("name", "begins"), [("a.svg", "<svg "), ("a.mmd", "flowchart"), ("a.txt", "def forward")])
def test_the_name_of_the_file_says_which_drawing(pippy, tmp_path, name, begins):
    assert pippy("show nets:Net -o", name) == f"written: {name}\n"
    assert (tmp_path / name).read_text().startswith(begins)


@pytest.mark.parametrize("ending", ["png", "dot"])
def test_a_picture_that_is_none_of_ours_is_refused_with_what_to_do(pippy, tmp_path, ending):
    said = pippy(f"show nets:Net -o net.{ending}", status=1)
    assert f"'net.{ending}': pippy writes no .{ending} files. Write net.svg instead" in said
    assert not (tmp_path / f"net.{ending}").exists()
    assert pippy("show nets:Net -o net.svg") == "written: net.svg\n"


def test_a_warning_is_a_line(pippy):
    assert pippy("show nets:chain --format text").startswith("Warning: Sequential has no mark that cuts it, so ")


WRONG = [
    ("nets.py:Nt", "nets.py has no 'Nt'; did you mean 'Net'?", "nets.py:Net"),
    ("net.py:Net", "there is no file 'net.py'; did you mean 'nets.py'?", "nets.py:Net"),
    ("netz:Net", "no module 'netz', neither in this folder nor where Python looks; did you mean 'nets'?", "nets:Net"),
    ("pack.iner:Net", "there is no module 'pack.iner'", None),
    ("nets.py", "'nets.py' names a module; name the model in it, too, as in nets.py:Net", "nets.py:Net"),
    ("nets", "'nets' names a module; name the model in it, too, as in nets:Net", "nets:Net"),
    (":Net", "':Net' names nothing; say where it is", None),
    ("nets:size", "nets:size is a int; name an nn.Module, a Pipe, or a class or function", None),
    ("nets:number", "what nets:number gives is a int; name an nn.Module", None),
    (
        "nets:Deep",
        "nets:Deep needs width, depth; give --arg width=VALUE --arg depth=VALUE",
        "nets:Deep --arg width=4 --arg depth=2",
    ),
    ("nets:Net --arg layer=3", "nets:Net has no argument 'layer'; did you mean 'layers'?", "nets:Net --arg layers=3"),
    (
        "nets:Branches --num-stages 2",
        "cannot be cut into 2 stages, for one must call it as a whole. cannot trace",
        None,
    ),
    ("nets:Net --split block", "did you mean 'blocks'", "nets:Net --split blocks"),
    ("nets:Net --loss nets:size", "nets:size is a int; a loss is a function or module of (output, target)", None),
    (
        "nets:Net --loss torch.nn:MSELos",
        "torch.nn has no 'MSELos'; did you mean 'MSELoss'",
        "nets:Net --loss torch.nn:MSELoss",
    ),
    ("nets:Net --loss MSELos", "torch.nn has no loss 'MSELos'; did you mean 'MSELoss'", "nets:Net --loss MSELoss"),
    # of three tensors
    ("nets:Net --loss TripletMarginLoss", "torch.nn has no loss 'TripletMarginLoss'; did you mean", None),
    ("nets:Net --loss mine", "there are L1Loss, NLLLoss, PoissonNLLLoss, KLDivLoss, MSELoss, ", None),
    ("nets:Net --loss mine", "Name one of yours as in model.py:loss", None),
    ("nets:Net --sequential", "nets:Net is a Net, no nn.Sequential; leave out --sequential", "nets:Net"),
    ("nets:Net --input y=[3,8]", "y", None),
    ("nets:Net -o no/such.svg", "'no/such.svg' cannot be written: No such file", None),
]
MISUSED = [
    ("nets:Net --arg layers", "'layers' is no NAME=VALUE; write --arg layers=4", "nets:Net --arg layers=4"),
    ("nets:Net --input x=3,8", "'x=3,8' is no tensor; write 'float32[4,8]'", "nets:Net --input x=float32[4,8]"),
    ("nets:Net --input float31[3,8]", "torch has no dtype 'float31'", None),
    ("nets:Net --split blocks:middle", "a module is cut at its beginning or its end", None),
    ("nets:pipe --split 1", "is a Pipe already, which --split cannot change; leave --split out", "nets:pipe"),
    ("nets:chain --arg a=1", "nets:chain is a Sequential and takes no --arg", "nets:chain"),
    (
        "nets:chain --sequential --split 1",
        "leave out --split, --num-stages and --shared",
        "nets:chain --sequential",
    ),
]


@pytest.mark.parametrize(
    ("status", "command", "words", "advised"), [(1, *each) for each in WRONG] + [(2, *each) for each in MISUSED]
)
def test_what_is_wrong_is_said_in_one_message_and_what_it_advises_works(pippy, status, command, words, advised):
    output = pippy(f"show {command}", status=status)
    assert words in output and "Traceback" not in output
    assert status == 2 or output.startswith("Error: ")
    assert advised is None or "submod_0" in pippy(f"show {advised}")


def test_the_users_own_lines_are_shown_where_the_users_code_raises(pippy, tmp_path):
    output = pippy("show nets:broken", status=1).splitlines()
    assert output[0] == "Error: nets:broken() raised RuntimeError: no weights"
    assert output[1].startswith('  File "') and output[1].endswith('nets.py", line 28, in broken')
    assert "pippy/cli" not in "".join(output)
    (tmp_path / "bad.py").write_text("import torch\nimport no_such_thing\n")
    for target in ("bad.py:Net", "bad:Net"):
        output = pippy("show", target, status=1).splitlines()
        assert output[0].endswith(" raised ModuleNotFoundError: No module named 'no_such_thing'")
        assert output[1].endswith('bad.py", line 2, in <module>')
    (tmp_path / "worse.py").write_text("class Net(:\n")
    output = pippy("show worse.py:Net", status=1)
    assert output.startswith("Error: worse.py raised SyntaxError: invalid syntax\n")
    assert 'worse.py", line 1' in output


def test_a_file_called_like_a_module_of_python_hides_nothing(pippy, tmp_path):
    (tmp_path / "token.py").write_text("from torch import nn\nmodel = nn.Linear(2, 2)\n")
    assert "6" in pippy("show token.py:model --format table")
    import token

    assert token.NAME == 1


def test_the_inputs_are_the_example_of_a_model_that_asks_for_sizes(pippy, tmp_path):
    (tmp_path / "asks.py").write_text(
        "from torch import nn\n\n\nclass Asks(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))\n\n    def forward(self, x):\n"
        "        for layer in self.layers:\n            x = layer(x) if x.shape[0] > 1 else x\n        return x\n"
    )
    assert "give example_args" in pippy("show asks.py:Asks --num-stages 2", status=1)
    shown = pippy("show asks.py:Asks --num-stages 2 --format table --input", "float32[3,4]")
    assert "layers.0, layers.1" in shown and "layers.2, layers.3" in shown


def test_a_model_of_hugging_face(pippy, tmp_path):
    transformers()
    (tmp_path / "language.py").write_text(
        "from transformers import GPT2Config, GPT2LMHeadModel\n\n"
        "sizes = {'vocab_size': 9, 'n_embd': 4, 'n_head': 1, 'n_layer': 2, 'n_positions': 8}\n"
        "model = GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, bos_token_id=1, eos_token_id=2))\n"
    )
    inputs = ("--input", "input_ids=int64[2,8]", "--input", "labels=int64[2,8]")
    shown = pippy("show language.py:model --num-stages 2", *inputs)
    assert "stage_backward" in shown and "submod_1" in shown and "(loss)" in shown and "int64[2, 8]" in shown


STAGES = """
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        y = nn.functional.relu(self.wide(self.norm(x)))
        return x + self.back((y + 1) * y)

class Hooked(nn.Linear):
    def __init__(self):
        super().__init__(16, 16)
        self.register_full_backward_hook(lambda module, grad_input, grad_output: None)

stages = nn.Sequential(Block(), Hooked(), Block())
"""


def test_what_compile_makes_of_stages(pippy, tmp_path):
    (tmp_path / "stages.py").write_text(STAGES)
    command = ["show", "stages.py:stages", "--sequential", "--loss", "torch.nn:MSELoss", "--compile"]
    done = pippy(*command, "--input", "[4,16]", "--input", "[4,16]")
    rows = {line.split()[0]: line for line in done.splitlines()}
    assert "runs eagerly: it has hooks on " in rows["submod_1"]
    operations = [int(each) for each in rows["submod_2"].split()[1:5]]
    assert 0 < operations[3] < operations[2] < operations[1] <= operations[2] + operations[3]
    # kept: the input of the norm with its mean and deviation, its output, and y; without cut, y + 1 and the product, too
    assert rows["submod_2"].split()[5:9] == ["1.5", "KiB", "3.5", "KiB"]
    assert rows["_loss"].split()[5:7] == ["512", "B"]
    refused = pippy(*command, status=2)
    assert "give them, as in --input" in refused
