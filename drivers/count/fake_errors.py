"""What is said where a model cannot run with fake tensors, with which its bytes are counted."""

from collections.abc import Iterator
from contextlib import contextmanager

from pippy.drivers.base.errors import DriverError
from pippy.ir.base.errors import PippyError


@contextmanager
def explain_fake_errors() -> Iterator[None]:
    """Inside, what fake tensors cannot do is an error that says what to do."""
    try:
        yield
    except PippyError as error:
        raise DriverError(_advice(str(error))) from error
    except Exception as error:
        raise DriverError(_advice(f"{type(error).__name__}: {error}")) from error


def _advice(reason: str) -> str:
    return (
        "what a step holds is counted with fake tensors, which have shapes and no numbers, and this model cannot run with "
        f"them:\n{reason}\nWhat to do: measure it, in a step that runs: with driver.record(memory=True) as recording"
    )
