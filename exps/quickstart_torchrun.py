"""The quick start under torchrun, on one host or on several: rank 0 is the controller, and every rank is a worker.

Question: what changes in a script, so that it runs on several hosts?
Command:  torchrun --standalone --nproc-per-node 2 exps/quickstart_torchrun.py; on several hosts as in docs/hosts.md;
          without torchrun: PIPPY_WORKERS=2 python exps/quickstart_torchrun.py
Finding:  nothing: `cluster()` joins the workers of torchrun, and without it starts workers. Under torchrun only rank 0
          runs the code inside the `with`.
"""

import torch
from torch import nn

from pippy import PipelineDriver1F1B, cluster, pipe_split, pipeline


class Net(nn.Module):
    """Two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        pipe_split()
        return self.last(x)


with cluster() as workers:
    torch.manual_seed(0)
    x, target = torch.randn(64, 16), torch.randn(64, 1)
    driver = PipelineDriver1F1B(pipeline(Net(), nn.MSELoss()), workers)
    optimizer = driver.instantiate_optimizer(torch.optim.AdamW, lr=1e-2)
    for step in range(31):
        loss = driver.run(4, x, target)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step}: loss {loss:.3f}")
    trained = driver.state_dict()
    print("trained:", ", ".join(trained))
