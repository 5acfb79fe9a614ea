"""torchrun, as ``python -m torch.distributed.run``, with ranks that are forked from it: torch and pippy are imported once.

That takes three seconds of a core for each rank. All else is torch's: how ranks meet, how a rank that fails ends the others,
how they are started again, and what is said of it. Tests of how a rank's process begins and ends have torchrun itself.
"""

import atexit
import gc
import importlib
import os
import signal
import subprocess
import sys
import threading
import types
import warnings
from unittest.mock import patch

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

IMPORTED = ("networkx", "torch._dynamo", "torch.distributed.rpc", "pippy.api")
_MOST_FILES = 1 << 16


class Forked(subprocess.Popen):
    """The process of ``python -u script arguments``, forked from this one."""

    def _execute_child(self, words, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        sys.stdout.flush(), sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # of Python 3.12: torchrun has threads, and ranks need none
            self.pid = os.fork()
        if self.pid == 0:
            _become(words[2:], env)
        self._child_created = True


def _become(words, env):
    """Run a script as a new process does, and end as it does."""
    os.setsid()
    atexit._clear()
    os.closerange(3, _MOST_FILES)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(env)
    sys.stdin = os.fdopen(0)
    sys.stdout.reconfigure(write_through=True)
    sys.argv, sys.path[0] = list(words), os.path.dirname(words[0])
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = words[0]
    status = 0
    try:
        with open(words[0]) as script:
            code = compile(script.read(), words[0], "exec")
        exec(code, main.__dict__)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        status = 1
        sys.excepthook(type(error), error, error.__traceback__.tb_next)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    with patch.object(subprocess_handler, "Popen", Forked):
        run.main()
