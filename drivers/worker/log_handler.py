"""Keeps what is logged under ``pippy`` in a worker's process, until an answer to the controller takes it along.

Nothing is sent for a record, and nothing waits for it: the next answer has it, of a command or of a ping. Where that takes
long, the first records are kept, and of the others their number.
"""

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from pippy.drivers.protocol.commands import WorkerLogRecord
from pippy.ir.base.logs import LOGGER
from pippy.ir.base.readable import count_with_noun, shortened

_MOST = 1000  # records
_LONGEST = 8000  # characters of one
_traceback = logging.Formatter().formatException


class LogHandler(logging.Handler):
    """Keeps up to ``most`` records.

    >>> handler = LogHandler(most=1)
    >>> for number in range(3):
    ...     handler.handle(logging.makeLogRecord({"name": "pippy", "levelno": 20, "msg": "record %d", "args": (number,)}))
    True
    True
    True
    >>> [each.message for each in handler.take()], handler.take()
    (['record 0', '2 records of this worker were dropped here, as no answer took them'], ())
    """

    def __init__(self, most: int = _MOST) -> None:
        super().__init__()
        self.most, self.dropped = most, 0
        self._records: deque[WorkerLogRecord] = deque()

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._records) >= self.most:
            self.dropped += 1
            return
        try:
            message = record.getMessage() + (f"\n{_traceback(record.exc_info)}" if record.exc_info else "")
        except Exception:
            self.handleError(record)
            return
        message = shortened(message, _LONGEST)
        place = record.pathname if hasattr(record, "pathname") else "", record.lineno, record.funcName or ""
        self._records.append(WorkerLogRecord(record.name, record.levelno, message, record.created, *place))

    def take(self) -> tuple[WorkerLogRecord, ...]:
        """The records since the last call."""
        if not self._records:
            return ()
        taken = [self._records.popleft() for _ in range(len(self._records))]
        dropped, self.dropped = self.dropped, 0
        if dropped:
            text = f"{count_with_noun(dropped, 'record')} of this worker were dropped here, as no answer took them"
            taken.append(WorkerLogRecord(LOGGER.name, logging.WARNING, text, time.time(), __file__, 0, ""))
        return tuple(taken)

    @contextmanager
    def of_this_process(self, level: int) -> Iterator[None]:
        """Inside, all records of this level and above come here, and go nowhere else."""
        before = LOGGER.handlers, LOGGER.propagate, LOGGER.level
        LOGGER.handlers, LOGGER.propagate = [self], False
        LOGGER.setLevel(level)
        try:
            yield
        finally:
            LOGGER.handlers, LOGGER.propagate = before[:2]
            LOGGER.setLevel(before[2])
