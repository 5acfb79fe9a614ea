"""The quick start on one host: a model of three stages, trained on three workers.

Question: how short can a script be?
Command:  python exps/quickstart_local.py
Finding:  it needs a mark in `forward`, `pipeline`, a cluster and a driver; the rest is a training loop. The loss falls.
"""

import torch
from torch import nn

from pippy import PipelineDriver1F1B, cluster, pipe_split, pipeline


class Net(nn.Module):
    """Three linear layers, each a stage; the first's output skips the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = torch.relu(self.first(x))
        pipe_split()
        x = torch.relu(self.middle(skip))
        pipe_split()
        return self.last(x + skip)


torch.manual_seed(0)
x, target = torch.randn(64, 16), torch.randn(64, 1)
with cluster(3):
    driver = PipelineDriver1F1B(pipeline(Net(), nn.MSELoss()))
    optimizer = driver.instantiate_optimizer(torch.optim.AdamW, lr=1e-2)
    for step in range(31):
        loss = driver.run(4, x, target)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step}: loss {loss:.3f}")
    trained = driver.state_dict()
print("trained:", ", ".join(trained))
