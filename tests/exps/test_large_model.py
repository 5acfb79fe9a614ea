"""A model that no process holds: what the script's process and the workers take, measured in another process."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_neither_the_script_nor_a_worker_holds_the_model():
    """The bounds for 3 GiB are 500 MiB for the script; here they are for a tenth, beside 100 MiB of what Python imports."""
    command = [sys.executable, "-m", "exps.large_model", "--mib", "320"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300).stdout
    model, script = map(int, re.findall(r"(\d+) MiB", printed)[:2])
    workers = [list(map(float, re.findall(r"([\d.]+) MiB", line))) for line in printed.splitlines()[3:]]
    assert 300 < model < 350
    assert script < 100 + model / 6
    assert len(workers) == 4
    assert sum(parameters for parameters, _, _ in workers) < model + 20  # the tied parameter is there twice
    for parameters, rose, most in workers:
        assert parameters < model / 3
        assert parameters - 10 < rose < parameters + 40
        assert most < parameters + 60
