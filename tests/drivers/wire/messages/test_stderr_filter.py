"""The filter holds back what it should, and nothing else. Scripts with clusters write nothing to stderr in test_cluster.py."""

import os

from pippy.drivers.wire.messages.stderr_filter import StderrFilter


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
    pid = os.fork()
    if not pid:
        status = 1
        try:
            os.close(2)
            stderr_filter = StderrFilter(b"x")
            stderr_filter.start()
            stderr_filter.stop()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
