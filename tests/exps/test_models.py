"""The table of models: what works has its row, and what does not has the reason."""

import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

from exps import models
from exps.tried_models.candidate import Candidate
from tests.distributions import ROOT


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

    def forward(self, x):
        return self.layers(x).mean()


def arguments():
    return {"x": torch.ones(4, 4, dtype=torch.float64)}


def write_page(folder):
    """Try two models by hand, each in a run of its own, and write their page."""
    models.KINDS["by hand"] = lambda: {
        "works": Candidate(Net, arguments, returns_only_a_loss=True),
        "wrong": Candidate(nn.ReLU, arguments, returns_only_a_loss=True),
    }
    models.warm_up = lambda: None
    page, kept = Path(folder, "models.md"), str(Path(folder, "found.json"))
    page.write_text(f"before\n{models.BEGIN}\nold\n{models.END}\nafter\n")
    models.main(["--kinds", "by hand", "--only", "works", "--found", kept])
    models.main(["--kinds", "by hand", "--only", "wrong", "--found", kept, "--page", str(page)])


def test_each_model_has_a_row(tmp_path):
    """In a process of its own: each trial is a fork, and torch refuses a backward there if autograd had started threads."""
    code = f"from tests.exps.test_models import write_page; write_page({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=280)
    text = (tmp_path / "models.md").read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "| by hand | 2 | 1 |" in text and "(50%)" in text
    rows = {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if line.startswith("| ")}
    assert rows["works"].startswith("| works | 4 | ") and rows["works"].endswith("| yes |  |")
    assert "the plain model fails" in rows["wrong"]


def test_a_trial_that_takes_too_long_is_ended():
    candidate = Candidate(lambda: time.sleep(60), arguments)
    assert models.try_in_a_process("by hand", "slow", candidate, limit=0.2).reason == "not done after 0 s"
