"""Evaluates a model on other data: its loss and metrics, without gradients. The training does not change.

eval mode, no_grad ──▶ a step for each item, two ahead ──▶ means, each item weighted by its rows
afterwards every module is in the mode, and every generator has the state, that it had before
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from pippy.drivers.base.errors import DriverError
from pippy.drivers.batch.items import call_of_items
from pippy.drivers.driver.driver_base import PipelineDriverBase
from pippy.drivers.driver.steps.driver_arguments import check_chunks
from pippy.drivers.driver.steps.updates import evaluating, loss_alone
from pippy.ir.base.public_calls import placing_words
from pippy.ir.base.trees import describe
from pippy.ir.pipe import follow_training_flags
from pippy.ir.run.random_state import untouched_random_state
from pippy.training.reader import check_data, generators_of_data, may_read_ahead

Metric = Callable[[Any, Any], Any]
_AHEAD = 2


@placing_words("pippy.evaluate(driver, data, chunks=4)")
def evaluate(
    driver: PipelineDriverBase, data: Iterable[Any], *, chunks: int | None, metric: Metric | None = None
) -> dict[str, float]:
    """The loss of a model on ``data``, and a metric: means over all items, each weighted by its rows.

    Each item is a mini-batch, as for `pippy.train`. ``metric(outputs, item)`` is given what the model returned for an item; it
    gives a number, or a dict of numbers by name. The stages are in evaluation mode meanwhile. Steps are sent ahead.

    >>> from pippy import Pipe, PipelineDriver1F1B, cluster, evaluate
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    >>> def mean_error(outputs, item):
    ...     return (outputs - item[1]).abs().mean()
    >>> with cluster(2, threads=1) as workers:
    ...     driver = PipelineDriver1F1B(Pipe.from_sequential(model, torch.nn.MSELoss()), workers)
    ...     values = evaluate(driver, [(torch.ones(4, 2), torch.ones(4, 1))], chunks=2, metric=mean_error)
    >>> list(values)
    ['loss', 'mean_error']
    """
    evaluation = Evaluation(driver, data, chunks, metric)
    return evaluation.run()


class Evaluation:
    """An evaluation that can be run again and again."""

    def __init__(
        self,
        driver: PipelineDriverBase,
        data: Iterable[Any],
        chunks: int | None,
        metric: Metric | None,
        name: str = "data",
    ) -> None:
        if not isinstance(driver, PipelineDriverBase):
            raise DriverError(f"evaluate() is given a driver first, and this is a {type(driver).__name__}")
        check_data(data, name)
        check_chunks(chunks, driver._auto)
        if metric is not None and not callable(metric):
            raise DriverError(f"metric={describe(metric)}: give a function metric(outputs, item) that gives a number")
        if driver.compiled_pipe.loss is None and metric is None:
            raise DriverError("the Pipe has no loss, so there is nothing to evaluate but a metric; give metric=")
        self.driver, self.data, self.chunks, self.metric, self.name = driver, data, chunks, metric, name
        with evaluating(driver.pipe):  # raises now if the Pipe is not right in evaluation mode
            follow_training_flags(driver.pipe)

    def run(self) -> dict[str, float]:
        """Evaluate."""
        means = _Means()
        under_way: deque[tuple[Any, Any]] = deque()
        ahead = _AHEAD if may_read_ahead(self.driver) else 0
        with untouched_random_state(), _untouched(self.data), evaluating(self.driver.pipe), torch.no_grad():
            for item in self.data:
                under_way.append((item, self._sent(item)))
                while len(under_way) > ahead:
                    self._take(means, *under_way.popleft())
            while under_way:
                self._take(means, *under_way.popleft())
        if not means.rows:
            raise DriverError(f"{self.name} gave no mini-batch; is it empty, or an iterator that was read already?")
        return means.values()

    def _sent(self, item: Any) -> Any:
        call = call_of_items([item], self.chunks)
        has_loss = self.driver.compiled_pipe.loss is not None
        asked = {"outputs": True} if self.metric is not None and has_loss else loss_alone(self.driver)
        return self.driver.run_async(call.chunks, *call.args, **asked, **call.kwargs)

    def _take(self, means: "_Means", item: Any, running: Any) -> None:
        result, rows = running.result(), running.rows or 1
        if self.driver.compiled_pipe.loss is None:
            loss, outputs = None, result
        else:
            loss, outputs = result if self.metric is not None else (result, None)
        if loss is not None:
            means.add("loss", loss, rows)
        if self.metric is not None:
            value = self.metric(outputs, item)
            named = value if isinstance(value, Mapping) else {getattr(self.metric, "__name__", "metric"): value}
            for name, each in named.items():
                means.add(str(name), each, rows)
        means.rows += rows


class _Means:
    """Means by name, weighted by rows."""

    def __init__(self) -> None:
        self.rows = 0
        self._totals: dict[str, float] = {}

    def add(self, name: str, value: Any, rows: int) -> None:
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DriverError(f"the metric gave {describe(value)} for {name!r}; it is to give a number") from error
        self._totals[name] = self._totals.get(name, 0.0) + number * rows

    def values(self) -> dict[str, float]:
        return {name: total / self.rows for name, total in self._totals.items()}


@contextmanager
def _untouched(data: Any) -> Iterator[None]:
    """Generators of the data's own have their state again afterwards."""
    states = [(each, each.get_state()) for each in generators_of_data(data)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
