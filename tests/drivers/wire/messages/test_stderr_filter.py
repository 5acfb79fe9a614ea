"""The filter holds back what it should, and nothing else; a script with a cluster writes nothing to stderr."""

import os
import subprocess
import sys

from pippy.drivers.wire.messages.stderr_filter import StderrFilter

SCRIPT = """
from pippy import local_cluster
with local_cluster(2) as cluster:
    cluster.dump()
"""


def test_only_lines_with_the_word_are_held_back(capfd):
    stderr_filter = StderrFilter(b"noise")
    stderr_filter.start()
    stderr_filter.start()
    os.write(2, b"first\nsome noise\nsecond\n")
    assert capfd.readouterr().err == ""
    stderr_filter.stop()
    stderr_filter.stop()
    os.write(2, b"third noise\n")
    assert capfd.readouterr().err == "first\nsecond\nthird noise\n"


def test_without_a_standard_error():
    code = "import os; from pippy.drivers.wire.messages.stderr_filter import StderrFilter; os.close(2)\n"
    code += "h = StderrFilter(b'x'); h.start(); h.stop(); print('fine')"
    assert (
        subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=280).stdout == "fine\n"
    )


def test_a_script_with_a_cluster_writes_nothing():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=280)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
