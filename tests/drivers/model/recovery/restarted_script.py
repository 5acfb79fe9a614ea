"""A training under torchrun that loses a rank at its second step, once, and goes on when it is started again, until Ctrl-C."""

import os
import signal
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pippy
from pippy import PipelineDriver1F1B, cluster, pipeline
from pippy.errors import ClusterError


def train(workers, folder, stages=2, steps=1_000_000, **options):
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
            os.kill(driver.cluster.session.workers[1].pid, signal.SIGKILL)

    noted, note = os.pipe()
    os.set_blocking(note, False)
    signal.set_wakeup_fd(note)

    def tell(driver, report):
        print("step", report.step, flush=True)
        if report.step == 4:
            os.read(noted, 1)  # until Ctrl-C

    with cluster(start_timeout=30) as workers:
        # When a rank is lost, torchrun ends the others; this one is to say first what it was told.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run where it is ignored
        try:
            train(workers, folder, save_every=1, keep=2, max_recoveries=1, callbacks=[lose_a_rank, tell])
        except ClusterError as error:
            print("refused", "max-restarts" in str(error) and "driver.load" in str(error), flush=True)
            raise


if __name__ == "__main__":
    main(sys.argv[1])
