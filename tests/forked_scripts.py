"""Scripts that each run in a process of their own, forked from one that has imported torch and nothing of pippy.

To start Python and to import torch takes about two seconds of a core. Tests of how a process ends start real ones.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_FORKS = """
import os, sys, types, networkx, torch
for name in sys.argv[1:]:
    pid = os.fork()
    if not pid:
        said = os.open(name + ".said", os.O_CREAT | os.O_WRONLY)
        os.dup2(said, 1), os.dup2(said, 2)
        sys.argv, status = [name], 0
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            exec(compile(open(name).read(), name, "exec"), main.__dict__)
        except BaseException as error:
            status = 1
            sys.excepthook(type(error), error, error.__traceback__.tb_next)
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def run_forked(folder: Path, scripts: Mapping[str, str]) -> dict[str, tuple[int, str]]:
    """The exit status of each script, and what it has written on both streams."""
    for name, text in scripts.items():
        (folder / name).write_text(text)
    command = [sys.executable, "-c", _FORKS, *scripts]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    statuses = map(int, done.stdout.split())
    return {
        name: (status, (folder / f"{name}.said").read_text()) for name, status in zip(scripts, statuses, strict=True)
    }
