"""Work on a thread beside the one that asks for it, and what became of the work."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

WorkResult = TypeVar("WorkResult")


def beside(work: Callable[[], WorkResult], name: str, daemon: bool = True) -> Future[WorkResult]:
    """Begin to do work on a thread of its own, with this name. The future has what the work gives, or raises.

    >>> beside(lambda: 2 + 2, "adds up").result()
    4
    """
    future: Future[WorkResult] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=daemon).start()
    return future
