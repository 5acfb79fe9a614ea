"""Hands what workers have logged to the handlers of the script."""

import logging
from collections.abc import Iterable
from contextlib import suppress

from pippy.drivers.protocol.commands import WorkerLogRecord


def log_for_worker(worker: str, pid: int, records: Iterable[WorkerLogRecord]) -> None:
    """Have loggers of this process handle records of a worker. The message begins with its name; ``record.worker`` has it.

    >>> handler = logging.NullHandler()
    >>> handler.handle = lambda record: print(record.name, record.levelname, record.getMessage(), record.worker)
    >>> logging.getLogger("pippy.example").addHandler(handler)
    >>> log_for_worker("worker1", 4711, [WorkerLogRecord("pippy.example", 30, "100 % of it", 0.0, "/a/file.py", 7, "function")])
    pippy.example WARNING worker1: 100 % of it worker1
    """
    for each in records:
        logger = logging.getLogger(each.logger)
        if not logger.isEnabledFor(each.level):
            continue
        message = f"{worker}: {each.message}"
        record = logger.makeRecord(each.logger, each.level, each.path, each.line, message, (), None, each.function)
        record.created, record.msecs = each.created, each.created % 1 * 1000
        record.worker = record.processName = worker
        record.process, record.thread, record.threadName = pid, 0, f"pippy {worker}"
        with suppress(Exception):  # a handler of the script that fails is no failure of the answer
            logger.handle(record)
