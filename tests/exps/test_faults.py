"""Two faults at random, as the experiment injects hundreds."""

import subprocess
import sys
from pathlib import Path


def test_two_faults_at_random():
    command = [sys.executable, "-m", "exps.faults", "--count", "2", "--seed", "6", "--deadly", "0.33"]
    command += ["--places", "local"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert sum(int(row.split()[-3]) for row in done.stdout.splitlines()[1:]) == 2
