"""The recipe of docs/lightning.md trains what plain PyTorch trains; what Lightning would do by itself loses the gradients."""

import copy
import csv
import logging
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pippy import PipelineDriver1F1B, pipeline
from tests.drivers.thread_cluster import thread_cluster
from tests.markdown_blocks import blocks_of

pytestmark = [
    pytest.mark.usefixtures("in_float64"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed"),
]
PAGE = Path(__file__).parents[2] / "docs/lightning.md"


@pytest.fixture(scope="module")
def recipe():
    """The classes of the page."""
    names = {}
    for block in blocks_of("docs/lightning.md", PAGE.read_text()):
        if block.code.lstrip().startswith(("import lightning", "class ")):
            exec(block.code, names)
    return names


@pytest.fixture(scope="module")
def threads():
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with thread_cluster(2) as cluster:
        yield cluster


def model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2))


def batches():
    numbers = torch.Generator().manual_seed(5)
    rows = TensorDataset(torch.randn(20, 8, generator=numbers), torch.randn(20, 2, generator=numbers))
    return DataLoader(rows, batch_size=4)


def plain_steps(steps):
    """The losses and the norms of plain PyTorch, and what it has trained."""
    plain, loss_of = model(), nn.MSELoss()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    told, data = [], list(batches())
    for step in range(steps):
        x, target = data[step % len(data)]
        loss = loss_of(plain(x), target)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        told.append((loss.item(), norm.item()))
    with torch.no_grad():
        validation = sum(loss_of(plain(x), target).item() * len(x) for x, target in data) / 20
    return told, plain, validation


def driver_of(threads):
    return PipelineDriver1F1B(pipeline(model(), nn.MSELoss(), split="parameters", num_stages=2), threads)


def trainer_of(folder, recipe, **options):
    import lightning  # here: every process that collects tests would take a second for it

    given = {"accelerator": "cpu", "devices": 1, "plugins": [recipe["OnWorkers"]()], "logger": False,
             "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
             "num_sanity_val_steps": 0, "default_root_dir": folder, **options}  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return lightning.Trainer(**given)


def test_it_trains_logs_and_goes_on_as_plain_pytorch(threads, recipe, tmp_path):
    from lightning.pytorch.loggers import CSVLogger

    expected, plain, validation = plain_steps(10)
    told, trains = [], []

    class Watched(recipe["Pipelined"]):
        def validation_step(self, *given):
            trains.append(self.driver.pipe.training)
            super().validation_step(*given)

    for steps, from_path in (5, None), (10, tmp_path / "five.ckpt"):
        driver = driver_of(threads)
        logger = CSVLogger(tmp_path, version=steps)
        trainer = trainer_of(tmp_path, recipe, max_steps=steps, logger=logger, log_every_n_steps=1)
        trainer.fit(Watched(driver, 2), batches(), batches() if steps == 10 else None, ckpt_path=from_path)
        assert trainer.global_step == steps
        if from_path is None:
            trainer.save_checkpoint(tmp_path / "five.ckpt")
        with open(f"{logger.log_dir}/metrics.csv", newline="") as file:
            told += [(float(each["loss"]), float(each["norm"])) for each in csv.DictReader(file) if each["loss"]]
        weights = driver.state_dict()
        assert driver.pipe.training and not any(trains)
        driver.close()
    assert len(trains) == 5  # after step 10, which ends an epoch
    torch.testing.assert_close(torch.tensor(told), torch.tensor(expected), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dict(weights), dict(plain.state_dict()), rtol=1e-12, atol=1e-12)
    saved = torch.load(tmp_path / "five.ckpt", weights_only=False)["state_dict"]
    assert list(saved) == list(plain.state_dict())
    assert float(trainer.callback_metrics["validation"]) == pytest.approx(validation, rel=1e-6)  # after the last step


def test_what_a_strategy_would_do_loses_the_gradients_without_an_error(threads, recipe, tmp_path):
    driver, local = driver_of(threads), model()
    before = copy.deepcopy(local.state_dict())
    trainer = trainer_of(tmp_path, recipe, max_steps=3, plugins=[], gradient_clip_val=1.0)
    trainer.fit(recipe["Automatic"](driver, local), batches())
    assert trainer.global_step == 3
    assert all(each.grad is None for each in local.parameters())
    assert all(torch.equal(value, before[name]) for name, value in local.state_dict().items())
    assert all(torch.equal(value, before[name]) for name, value in driver.state_dict().items())
    driver.close()


@pytest.mark.parametrize("option", [{"gradient_clip_val": 1.0}, {"accumulate_grad_batches": 2}])
def test_lightning_refuses_what_the_page_says(threads, recipe, tmp_path, option):
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    driver = driver_of(threads)
    with pytest.raises(MisconfigurationException, match="manual optimization"):
        trainer_of(tmp_path, recipe, max_steps=1, **option).fit(recipe["Pipelined"](driver, 2), batches())
    driver.close()


def test_another_precision_is_refused(recipe, tmp_path):
    with pytest.raises(ValueError, match="precision"):
        trainer_of(tmp_path, recipe, precision="bf16-mixed")
