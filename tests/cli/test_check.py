"""`pippy check`: a script runs up to its first training step, which is compared with the plain model's."""

TRAINING = """
import torch
from torch import nn
from pippy import PipelineDriver1F1B, cluster, pipe_split, pipeline

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x):
        x = torch.tanh(self.a(x))
        pipe_split()
        return self.b({})

torch.manual_seed(0)
driver = PipelineDriver1F1B(pipeline(Net().double(), nn.MSELoss()), cluster())
optimizer = driver.instantiate_optimizer(torch.optim.Adam, lr=0.1)
x, y = torch.randn(4, 4).double(), torch.randn(4, 1).double()
with torch.no_grad():
    driver.run(2, x, y)
print("evaluated")
try:
    {}driver.run(2, x, y)
    print("trained")
except Exception:
    print("went on")
"""


def said(pippy, tmp_path, status, row="x", step=""):
    (tmp_path / "script.py").write_text(TRAINING.format(row, step))
    return pippy("check script.py -n 2 --threads 1", status=status)


def test_step_that_is_the_plain_models(pippy, tmp_path):
    lines = said(pippy, tmp_path, 0).splitlines()
    assert lines[0] == "evaluated" and lines[1].startswith(
        "the same as the plain model, with 2 micro-batches: the loss"
    )
    assert len(lines) == 3


def test_step_that_is_not(pippy, tmp_path):
    lines = said(pippy, tmp_path, 1, "x - x.mean(0)").splitlines()
    assert lines[1].startswith("not the same as the plain model")
    assert lines[-1].startswith("begins in submod_1 on worker1: ") and "mixes rows" in lines[-1]


def test_batch_norms_are_told_before_the_rest_is_said_to_be_the_same(pippy, tmp_path):
    """Until the norm is converted, as the verdict says; then nothing comes before "the same"."""
    script = TRAINING.format("x", "").replace(
        "nn.Linear(4, 8), nn", "nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), nn"
    )
    said = []
    for model in ("Net()", "pippy.convert_deferred_batch_norm(Net())"):
        (tmp_path / "script.py").write_text("import pippy\n" + script.replace("Net()", model))
        said.append(pippy("check script.py -n 2 --threads 1").splitlines()[1:])
    statistics, rest, _, left_out = said[0]
    assert statistics.startswith(
        "running statistics will be those of micro-batches: 'a.1' changes its running statistics by each of 2 micro-batches"
    )
    assert "pippy.convert_deferred_batch_norm(model) makes them those of the whole mini-batch" in statistics
    assert rest.startswith("all else is the same as the plain model, with 2 micro-batches: the loss, 1 output")
    assert left_out.startswith("not compared: statistics of batch norms") and "convert" not in left_out
    assert said[1][0].startswith("the same as the plain model, with 2 micro-batches: the loss, 1 output")


def test_script_that_does_not_train(pippy, tmp_path):
    assert "script.py ran no step that trains" in said(pippy, tmp_path, 1, step="0 and ")


def test_script_that_raises(pippy, tmp_path):
    (tmp_path / "script.py").write_text("raise ValueError('no data')")
    assert "ValueError: no data" in pippy("check script.py -n 2", status=1)
