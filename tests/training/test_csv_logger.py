"""The file of a CSVLogger, where lines are added to it, replaced in it, or not written to their end."""

import os

import pytest

from pippy import CSVLogger
from pippy.drivers.base.errors import DriverError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.csv"


def logged(path, *rows, begin=None):
    logger = CSVLogger(path)
    if begin is not None:
        logger.begin(begin)
    for step, values in rows:
        logger.log(step, values)
    logger.close()
    return path.read_text().splitlines()


def test_a_value_that_comes_later_has_a_column(path):
    assert logged(path, (1, {"loss": 0.5}), (2, {"loss": 0.25}), (3, {"norm": 2, "loss": 0.125}), (4, {"norm": 3})) == [
        "step,loss,norm", "1,0.5,", "2,0.25,", "3,0.125,2", "4,,3",
    ]  # fmt: skip
    assert os.listdir(path.parent) == ["metrics.csv"]


def test_values_of_one_step_are_one_line(path):
    assert logged(path, (1, {"loss": 0.5}), (1, {"norm": 2}), (1, {"loss": 0.25}), (2, {"norm": 1})) == [
        "step,loss,norm", "1,0.25,2", "2,,1",
    ]  # fmt: skip


def test_what_follows_the_step_is_replaced(path):
    logged(path, *((step, {"loss": step / 8, "text": 'a "b", c\nd'}) for step in range(1, 6)))
    again = logged(path, (4, {"loss": 4.0}), (5, {"new": 5.0}), begin=3)
    kept = [line for step in (1, 2, 3) for line in (f'{step},{step / 8},"a ""b"", c', 'd",')]
    assert again == ["step,loss,text,new", *kept, "4,4.0,,", "5,,,5.0"]
    assert os.listdir(path.parent) == ["metrics.csv"]


def test_a_line_that_was_not_written_to_its_end_is_dropped(path):
    path.write_text("step,loss\n1,0.5\n2,0.2")
    assert logged(path, (2, {"loss": 0.25}), begin=2) == ["step,loss", "1,0.5", "2,0.25"]


def test_a_file_of_another_training_gets_another_name(path):
    for loss in 0.5, 0.25, 0.125:
        assert logged(path, (1, {"loss": loss}), begin=0) == ["step,loss", f"1,{loss}"]
    names = "metrics.csv", "metrics-1.csv", "metrics-2.csv"
    assert [(path.parent / each).read_text() for each in names] == [
        f"step,loss\n1,{loss}\n" for loss in (0.125, 0.5, 0.25)
    ]


def test_a_file_of_another_kind_is_left_alone(path):
    path.write_text("name,loss\na,0.5\n")
    with pytest.raises(DriverError, match=r"metrics.csv is no file of a CSVLogger, whose first column is 'step'; give"):
        CSVLogger(path)
    assert path.read_text() == "name,loss\na,0.5\n"
