"""A training under torchrun that loses a rank at its second step, once, and goes on when it is started again."""

import os
import signal
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pippy
from pippy import PipelineDriver1F1B, cluster, pipeline
from pippy.errors import ClusterError

STEPS = 4


def train(workers, folder, stages=2, steps=STEPS, **options):
    """Train, as each start of the script does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    driver = PipelineDriver1F1B(pipeline(model, nn.MSELoss(), split="parameters", num_stages=stages), workers)
    optimizer = driver.instantiate_optimizer(torch.optim.AdamW, lr=0.1)
    data = DataLoader(TensorDataset(torch.randn(12, 4), torch.randn(12, 1)), batch_size=4, shuffle=True)
    callbacks = [(lambda report, made=made: made(driver, report)) for made in options.pop("callbacks", ())]
    return pippy.train(
        driver, data, optimizer, chunks=2, steps=steps, folder=folder, callbacks=callbacks, progress=False, **options
    )


def main(folder):
    begins = not os.path.isdir(folder)

    def lose_a_rank(driver, report):
        if begins and report.step == 2:
            driver.saving.finish()
            os.kill(driver.cluster.control.workers[1].pid, signal.SIGKILL)

    with cluster(start_timeout=30) as workers:
        # When a rank is lost, torchrun ends the others; this one is to say first what it was told.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            result = train(workers, folder, save_every=1, max_recoveries=1, callbacks=[lose_a_rank])
        except ClusterError as error:
            print("refused", "max-restarts" in str(error) and "driver.load" in str(error), flush=True)
            raise
        print("from", result.resumed_at, "losses", result.losses, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
