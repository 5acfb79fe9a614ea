"""What the errors of pippy say to do, for those who have a Trainer: no Pipe, no tracer, no call with ``chunks=``."""

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

from transformers.utils import logging

from pippy.drivers.driver.driver_base import PipelineDriverBase
from pippy.drivers.driver.drivers import PipelineDriver
from pippy.integrations.transformers.arguments import PipelineArguments
from pippy.ir.base.errors import PippyError

logger = logging.get_logger("transformers.pippy")  # it says what a Trainer says, at the Trainer's level
_HERE = "In a PipelineTrainer: "
_TRACED = (
    "the line is followed once, without numbers, and from then on the workers do what was followed. What logs, prints or keeps "
    "a number in compute_loss belongs into a callback: on_log of a TrainerCallback is given the loss. Metrics belong into "
    "compute_metrics. In place of an `if` on numbers, take torch.where. A function that has to see numbers is called whole if "
    "it is defined outside of classes, and marked with @torch.fx.wrap"
)
# Words of an error, and what is meant by them in the script of a Trainer.
_MEANT = {
    "num_stages=": "num_stages= is stages=",
    "driver.": "the driver is trainer.driver",
    "torch.no_grad()": "trainer.evaluate() computes the loss alone",
    "known reduction": "if compute_loss gives a mean over something else than rows, divide its sum by num_items_in_batch",
}
_FIELDS = {each.name for each in fields(PipelineArguments)}
_OPTIONS = {
    name for kind in (PipelineDriver, PipelineDriverBase) for name in inspect.signature(kind).parameters
} - _FIELDS


@contextmanager
def in_words_of_trainers() -> Iterator[None]:
    """Inside, errors say what the user of a Trainer can do."""
    try:
        yield
    except PippyError as error:
        text = str(error)
        if _HERE not in "".join([text, *getattr(error, "__notes__", ())]) and (advice := advice_on(text)):
            if "is_leaf_module" in text and error.args == (text,):  # the advice there cannot be followed
                error.args = (text.partition("What to do: ")[0].rstrip(),)
            error.add_note(advice)
        raise


def advice_on(text: str) -> str:
    """What the advice of an error means in the script of a Trainer.

    >>> print(advice_on("the model mixes rows. Run one micro-batch, chunks=1, or give the driver check=False"))
    In a PipelineTrainer: chunks= is given by pipeline=PipelineArguments(chunks=...); check= by driver_options={"check": ...}
    """
    if "is_leaf_module" in text:
        return _HERE + _TRACED
    named = dict.fromkeys(re.findall(r"\b(\w+)=(?!=)", text))
    said = [f"{name}= is given by pipeline=PipelineArguments({name}=...)" for name in named if name in _FIELDS]
    said += [f'{name}= by driver_options={{"{name}": ...}}' for name in named if name in _OPTIONS]
    said += [meaning for words, meaning in _MEANT.items() if words in text]
    return _HERE + "; ".join(said) if said else ""
