"""A worker that writes down which functions of pippy it calls, in the order of calls."""

import os
import sys
from contextlib import contextmanager
from pathlib import Path

from pippy.drivers.worker import worker

ROOM = os.path.realpath(Path(worker.__file__).parents[1])
FOLDER = "PIPPY_TEST_CALLS"  # the environment variable: where workers write


@contextmanager
def noting_calls(note):
    """Inside, ``note`` is called with the file and the qualified name of each function of drivers/ that this thread calls."""

    def called(frame, event, _):
        if event == "call" and (path := os.path.realpath(frame.f_code.co_filename)).startswith(ROOM):
            note(os.path.relpath(path, ROOM), frame.f_code.co_qualname)

    sys.setprofile(called)
    try:
        yield
    finally:
        sys.setprofile(None)


class Worker(worker.Worker):
    def run(self):
        with (
            open(Path(os.environ[FOLDER]) / self.context.name, "a", buffering=1) as calls,
            noting_calls(lambda *call: calls.write(" ".join(call) + "\n")),
        ):
            super().run()
