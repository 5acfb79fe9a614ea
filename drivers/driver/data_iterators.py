"""Steps whose micro-batches come one by one from an iterator, as DeepSpeed's engine takes them, and evaluation mode for a
while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pippy.drivers.base.errors import DriverError
from pippy.drivers.batch.items import RunCall, call_of_items
from pippy.drivers.driver.steps.driver_arguments import check_chunks
from pippy.drivers.model.model_on_workers import ModelOnWorkers
from pippy.ir.base.trees import describe
from pippy.ir.pipe import Pipe, follow_training_flags


def next_call(data_iter: Iterator[Any], chunks: Any, method: str) -> RunCall:
    """The call of `driver.run` with the next ``chunks`` items, each of which is a micro-batch.

    >>> import torch
    >>> next_call(iter([torch.ones(2), torch.ones(3)]), 2, "train_batch")
    RunCall(chunks=2, args=(MicroBatches([float32[2], float32[3]]),), kwargs={})
    """
    check_chunks(chunks, None)
    if not isinstance(data_iter, Iterator):
        raise DriverError(
            f"{method}() takes {chunks} items from an iterator at each call, but this is {describe(data_iter)}, not "
            "an iterator; call iter() once, before the loop, or give pippy.RepeatingLoader(loader)"
        )
    items = []
    for _ in range(chunks):
        try:
            items.append(next(data_iter))
        except StopIteration:
            raise DriverError(
                f"the iterator ended after {len(items)} of the {chunks} micro-batches of this step, and nothing was run; "
                "pippy.RepeatingLoader(loader) begins anew at the end"
            ) from None
    return call_of_items(items, 1)


def loss_alone(driver: ModelOnWorkers) -> dict[str, Any]:
    """The arguments with which `run` gives the loss alone. What the model returns beside it stays on the workers."""
    return (
        {} if driver.compiled_pipe.loss_module is not None or driver.compiled_pipe.loss is None else {"outputs": False}
    )


@contextmanager
def evaluating(pipe: Pipe) -> Iterator[None]:
    """Put all stages in evaluation mode inside; afterwards each module has its mode of before."""
    follow_training_flags(pipe)
    flags = {module: module.training for module in pipe.modules()}
    pipe.eval()
    try:
        yield
    finally:
        for module, flag in flags.items():
            module.training = flag
        follow_training_flags(pipe)
