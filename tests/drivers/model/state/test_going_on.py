"""Checkpoints: a run that goes on from one is the run that was not interrupted, whoever goes on."""

import copy
import random

import pytest
import torch

from pippy import load_checkpoint
from tests.drivers.model.state.saved_runs import REPLICATE, TRANSMIT, Plain, Training, WithDropout, assert_equal, close
from tests.drivers.models import TiedLanguage

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


@pytest.mark.parametrize("wait", [True, False])
def test_a_run_that_goes_on_elsewhere_equals_the_undisturbed_one_to_the_bit(cluster, tmp_path, wait):
    first = Training(cluster, model=WithDropout())
    first.train(range(3))
    random.seed(5)
    path = first.driver.save(tmp_path, **first.parts, step=3, drawn=[1.5, "a"], wait=wait)
    assert path == str(tmp_path / "step-3")
    drawn = torch.rand(2), random.random()
    undisturbed, end = first.train(range(3, 8)), first.everything()
    first.driver.close()

    torch.manual_seed(99)
    second = Training(cluster, model=WithDropout())
    second.train(range(50, 52))
    values = second.driver.load(tmp_path, **second.parts)
    assert values == {"step": 3, "drawn": [1.5, "a"]}
    assert torch.equal(torch.rand(2), drawn[0]) and random.random() == drawn[1]
    assert torch.equal(second.train(range(values["step"], 8)), undisturbed)
    assert_equal(second.everything(), end)
    second.driver.close()


SPLITS = [
    (4, REPLICATE, "1f1b", 2, TRANSMIT, "fill_drain"),
    (2, TRANSMIT, "zb_h1", 4, REPLICATE, "1f1b"),
    (1, REPLICATE, "1f1b", 2, REPLICATE, "interleaved_1f1b"),
]


@pytest.mark.parametrize("workers, config, schedule, others, other_config, other_schedule", SPLITS)
def test_any_split_goes_on_as_plain_pytorch_would(
    threads, tmp_path, workers, config, schedule, others, other_config, other_schedule
):
    model = TiedLanguage()
    plain = Plain(copy.deepcopy(model))
    options = {} if schedule != "interleaved_1f1b" else {"stages_per_worker": 2}
    first = Training(threads, config, schedule, model, {"world_size": workers, **options})
    close(first.train(range(3)), plain.train(range(3)))
    first.driver.save(tmp_path, **first.parts)

    second = Training(threads, other_config, other_schedule, driver_options={"world_size": others})
    second.driver.load(tmp_path, **second.parts)
    mine, theirs = second.train(range(3, 8)), plain.train(range(3, 8))
    close(mine, theirs)
    close(dict(second.driver.state_dict()), dict(plain.model.state_dict()))


def test_plain_pytorch_goes_on_from_a_checkpoint_and_a_driver_from_plain_pytorch(threads, tmp_path):
    model = TiedLanguage()
    plain = Plain(copy.deepcopy(model))
    training = Training(threads, model=model)
    close(training.train(range(3)), plain.train(range(3)))
    training.driver.save(tmp_path, **training.parts, step=3)
    other = Plain(TiedLanguage())
    assert load_checkpoint(tmp_path, **vars(other)) == {"step": 3}
    close(other.train(range(3, 6)), plain.train(range(3, 6)))

    back = Training(threads, TRANSMIT)
    back.driver.load_state_dict(other.model.state_dict())
    saved = load_checkpoint(
        tmp_path
    )  # numbered in the order of the groups, which is another one than that of the plain ones
    names = [name for group in saved["optimizer"]["param_groups"] for name in group["param_names"]]
    assert names == [name for name, _ in back.optimizer.named_parameters()]
    own = {id(each): name for name, each in other.model.named_parameters()}
    plains = [own[id(each)] for group in other.optimizer.param_groups for each in group["params"]]
    state = other.optimizer.state_dict()
    saved["optimizer"]["state"] = {names.index(name): state["state"][plains.index(name)] for name in names}
    for group, its in zip(saved["optimizer"]["param_groups"], state["param_groups"]):
        group.update({key: value for key, value in its.items() if key not in ("params", "param_names")})
    back.optimizer.load_state_dict(saved["optimizer"])
    back.scheduler.load_state_dict(other.scheduler.state_dict())
    close(back.train(range(6, 9)), plain.train(range(6, 9)))
