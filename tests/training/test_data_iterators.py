"""Steps whose micro-batches come one by one, as DeepSpeed's engine takes them."""

import pytest
import torch
from torch.nn import functional as F

from pippy import RepeatingLoader
from pippy.drivers.base.errors import DriverError, MicrobatchError
from tests.training.models import Noisy, Parts, Plain, groups_of, shuffled

pytestmark = pytest.mark.usefixtures("in_float64")


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_train_batch_takes_micro_batches_from_an_iterator_over_the_end_of_the_data(parts, max_norm):
    """Items of 4 rows, the last one of 2: 9 steps of 4 items are 6 epochs."""
    plain = Plain()
    torch.manual_seed(7)
    loader = shuffled()
    expected = plain.train(groups_of([item for _ in range(6) for item in loader], 4, 1), max_norm)
    torch.manual_seed(7)
    data = RepeatingLoader(shuffled())
    losses = [parts.driver.train_batch(data, chunks=4, scheduler=parts.scheduler, max_norm=max_norm) for _ in range(9)]
    close(torch.stack(losses), torch.tensor(expected))
    close(parts.driver.state_dict(), dict(plain.model.state_dict()))
    assert data.epoch == 5


def test_a_step_is_one_command_and_the_optimizer_another(cluster):
    parts, data = Parts(cluster), RepeatingLoader(shuffled())
    for _ in range(6):  # other numbers of rows are compared, once
        parts.driver.train_batch(data, chunks=4)
    before = list(cluster.session.counts)
    for _ in range(3):
        parts.driver.train_batch(data, chunks=4)
    assert [after - was for after, was in zip(cluster.session.counts, before)] == [6, 6]
    parts.driver.close()


def test_eval_batch_is_without_dropout_and_gradients_and_leaves_the_modes(threads):
    parts = Parts(threads, Noisy)
    items = list(shuffled())[:3]
    parts.model.last.eval()
    loss, outputs = parts.driver.eval_batch(iter(items), chunks=3, outputs=True)
    assert parts.driver.eval_batch(iter(items), chunks=3) == loss
    x, target = (torch.cat(each) for each in zip(*items))
    with torch.no_grad():
        expected = parts.model.last(torch.tanh(parts.model.first(x)))
    close(outputs, expected)
    close(loss, F.mse_loss(expected, target))
    assert parts.driver.get_grad("first.weight") is None
    assert parts.model.training and parts.model.first.training and not parts.model.last.training
    parts.driver.close()


def test_a_scaler_of_the_driver_steps(parts):
    scaler = parts.driver.instantiate_grad_scaler(init_scale=8.0, growth_interval=2)
    data = RepeatingLoader(shuffled())
    for _ in range(4):
        parts.driver.train_batch(data, chunks=2)
    assert scaler.get_scale() == 32.0


def test_the_position_of_a_loader_is_saved_with_the_rest(cluster, tmp_path):
    """Shuffled data and dropout: a loop by hand that goes on equals the one that was not disturbed."""

    def made():
        parts = Parts(cluster, Noisy, keyed_random=3)
        torch.manual_seed(2)
        return parts, RepeatingLoader(shuffled())

    parts, data = made()
    given = {"optimizer": parts.optimizer, "data": data}
    for _ in range(4):
        parts.driver.train_batch(data, chunks=2)
    parts.driver.save(tmp_path, **given, step=4)
    expected = [parts.driver.train_batch(data, chunks=2) for _ in range(7)]
    parts.driver.close()
    parts, data = made()
    parts.driver.load(tmp_path, optimizer=parts.optimizer, data=data)
    assert [parts.driver.train_batch(data, chunks=2) for _ in range(7)] == expected
    parts.driver.close()


def test_what_cannot_be_done_is_refused(threads):
    parts = Parts(threads)
    driver, items = parts.driver, [(torch.ones(4, 8), torch.ones(4, 8))] * 3
    for method in (driver.train_batch, driver.eval_batch):
        with pytest.raises(DriverError, match=r"items from an iterator.*RepeatingLoader"):
            method(items, chunks=2)
        with pytest.raises(DriverError, match="ended after 3 of the 4 micro-batches of this step, and nothing was run"):
            method(iter(items), chunks=4)
        with pytest.raises(DriverError, match="chunks=0"):
            method(iter(items), chunks=0)
        with pytest.raises(MicrobatchError, match="collate_fn"):
            method(iter([1]), chunks=1)
    with torch.no_grad(), pytest.raises(DriverError, match=r"inside of torch.no_grad\(\)"):
        driver.train_batch(iter(items), chunks=1)
    with pytest.raises(DriverError, match="a AdamW"):
        driver.train_batch(iter(items), chunks=1, optimizer=torch.optim.AdamW(parts.model.parameters()))
    assert driver.get_grad("layers.0.weight") is None
    driver.close()
