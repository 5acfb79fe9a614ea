"""What the system refuses a cluster is said in a sentence, and what the sentence advises works. Nothing is left behind."""

import errno
import json
import os
import resource
import subprocess
import sys
import textwrap
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from pippy.drivers.base.errors import ClusterError
from pippy.drivers.base.host_errors import HostError, in_words
from pippy.drivers.engines.local.local_cluster import local_cluster
from tests.drivers.processes import assert_no_more_shared_files, children, open_descriptors, shared_files, within

ROOT = Path(__file__).parents[3]
STAND_IN = "tests.drivers.scripted_worker:Worker"

pytestmark = pytest.mark.usefixtures("alone")


def start(n=2, **options):
    return local_cluster(n, timeout=20.0, _worker=STAND_IN, **options)


def answers(cluster):
    """Whether the workers answer."""
    return [cluster.session.answer(cluster.session.send(each, ("echo", each))) for each in range(2)] == [0, 1]


@contextmanager
def executable(patch, value):
    patch.setattr(sys, "executable", value)
    yield
    patch.undo()


@contextmanager
def variable(patch, size):
    patch.setenv("SOME_LARGE", "x" * size)
    yield
    patch.delenv("SOME_LARGE")


@pytest.mark.parametrize(
    ("disturbed", "given", "words"),
    [
        (executable, None, r"no Python can be started for 2 workers: sys.executable is None, .*sys.executable = '/usr"),
        (executable, "", r"sys.executable is '', and must be the path of a Python"),
        (executable, "/nowhere/python", r"sys.executable is '/nowhere/python', and must be"),
        (variable, 200_000, r"the environment is too large for 2 workers: .*131,072 bytes for one.*from os.environ"),
    ],
)
def test_a_start_that_the_system_refuses_says_why_and_what_to_do(disturbed, given, words, monkeypatch, quick_clusters):
    """In place of a TypeError, a PermissionError or an OSError of 'Argument list too long'."""
    open_before, children_before = open_descriptors(), set(children(os.getpid()))
    with quick_clusters.left_out(), within(1.0):
        with disturbed(monkeypatch, given), pytest.raises(ClusterError, match=words) as caught:
            start()
        assert isinstance(caught.value.__cause__, OSError)
    assert open_descriptors() == open_before
    assert set(children(os.getpid())) == children_before
    with start() as cluster:  # the advice was followed
        assert answers(cluster)


def test_a_path_of_thousands_of_entries_reaches_the_workers(monkeypatch, tmp_path, quick_clusters):
    """One packet held it, and so many bytes are no packet."""
    entries = [str(tmp_path / f"{number}" / ("x" * 200)) for number in range(5000)]
    monkeypatch.setattr(sys, "path", [*sys.path, *entries])
    for manner in (quick_clusters.left_out(), nullcontext()):
        with manner, start() as cluster:
            assert cluster.session.answer(cluster.session.send(1, ("path",))) == sys.path


def script(text, *arguments, **options):
    """What a script has printed as JSON. It may read and write all files, though it may be another user's."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text), *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        **options,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


BEGIN = f"""
import ctypes, json, os, resource, struct, sys, threading
import torch
from pippy import PipelineDriver1F1B, local_cluster, pipeline
from pippy.drivers.base.errors import ClusterError, StepError
from tests.drivers.models import Chain
from tests.drivers.processes import open_descriptors

def capabilities(*kept):
    '''Give up all capabilities but these, also in what this process starts.'''
    libc, mask = ctypes.CDLL(None, use_errno=True), sum(1 << each for each in kept)
    if os.getuid() == 0:
        for each in range(40):
            each in kept or libc.prctl(24, each, 0, 0, 0)
        libc.prctl(8, 1, 0, 0, 0)
        os.setgroups([]), os.setuid(65534)
        assert not libc.capset(struct.pack("II", 0x20080522, 0), struct.pack("6I", mask, mask, mask, 0, 0, 0))
        for each in kept:
            assert not libc.prctl(47, 2, each, 0, 0)

def tries(n=2, **options):
    '''The error of a start, or the answers of the workers.'''
    try:
        with local_cluster(n, threads=1, _worker="{STAND_IN}", **options) as cluster:
            return [cluster.session.answer(cluster.session.send(each, ("echo", each))) for each in range(n)]
    except ClusterError as error:
        return f"{{type(error).__name__}}: {{error}}"
"""


@pytest.mark.parametrize("what_happened", ['os.chmod(".", 0)', "os.rmdir(sys.argv[1])"])
def test_workers_start_in_a_directory_that_was_deleted_or_that_this_process_may_not_enter(what_happened, tmp_path):
    """As a service has it that was started in another user's: that was a PermissionError of the directory."""
    closed = tmp_path / "closed"
    closed.mkdir()
    found = script(
        BEGIN
        + """
os.chdir(sys.argv[1])
exec(sys.argv[2])
capabilities(2)  # to read all files and folders of this test, and not to enter any
entered = os.access(sys.argv[1], os.X_OK)
print(json.dumps([entered, tries()]))
""",
        str(closed),
        what_happened,
    )
    assert found == [False, [0, 1]]


@pytest.mark.parametrize("more", [0, 1, 3])
def test_an_account_that_may_have_no_more_processes_is_told_so(more):
    """Of the controller, of the fork server, and of a worker that starts a thread."""
    found = script(
        BEGIN
        + """
capabilities(1, 2)  # to read files
own = len(os.listdir("/proc/self/task"))
limit = resource.getrlimit(resource.RLIMIT_NPROC)
before = open_descriptors()
resource.setrlimit(resource.RLIMIT_NPROC, (own + int(sys.argv[1]), limit[1]))
refused = tries()
resource.setrlimit(resource.RLIMIT_NPROC, limit)
print(json.dumps([refused, open_descriptors() - before, tries()]))
""",
        str(more),
    )
    refused, left, then = found
    assert "HostError: " in refused or "failed to start" in refused, refused
    assert "no other process or thread is allowed for" in refused, refused
    assert "ulimit -u" in refused
    assert (left, then) == (0, [0, 1])


STEP = """
torch.manual_seed(0)
model, x = Chain(2, 512), torch.randn(3000, 512)
pipe = pipeline(model, torch.nn.functional.mse_loss)
def step(driver):
    try:
        return float(driver.run(2, x, x))
    except (ClusterError, StepError) as error:
        return f"{type(error).__name__}: {error}"
limit = resource.getrlimit(resource.RLIMIT_FSIZE)
"""


@pytest.mark.parametrize("whose", ["script", "workers"])
def test_a_limit_for_files_is_said_to_count_for_shared_memory(whose):
    """It was 'File too large' of no file. With a larger limit the next step is right, in the same cluster."""
    found = script(
        BEGIN
        + STEP
        + """
with local_cluster(2, threads=1) as cluster:
    driver = PipelineDriver1F1B(pipe, cluster, check=False)
    pids = [0] if sys.argv[1] == "script" else [each.pid for each in cluster.session.workers]
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, limit[1]))
    refused = step(driver)
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)
    loss = torch.nn.functional.mse_loss(model(x), x)
    print(json.dumps([refused, abs(step(driver) - float(loss)) < 1e-5]))
""",
        whose,
    )
    refused, right = found
    assert "may not make memory for" in refused, refused
    assert (
        "a file may have 4,096 bytes at most; raise the limit before the script starts (ulimit -f unlimited)" in refused
    )
    assert ("HostError" in refused.splitlines()[0]) == (whose == "script")
    assert right


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EMFILE, "no free file descriptor for a worker: it may have .* open; .*ulimit -n"),
        (errno.ENFILE, "no free file descriptor for a worker"),
        (errno.ETOOMANYREFS, "no free file descriptor for a worker"),
        (errno.EAGAIN, "no other process or thread is allowed for a worker: this account may have .*ulimit -u"),
        (errno.ENOMEM, "there is no memory for a worker: .*ulimit -v.*; free some"),
        (errno.ENOSPC, "there is no memory for a worker"),
        (errno.EFBIG, "may not make memory for a worker: .*ulimit -f unlimited"),
        (errno.EPERM, "the system refuses a worker: Operation not permitted"),
        (None, "the system refuses a worker: timed out"),
    ],
)
def test_each_refusal_of_the_system_has_a_sentence(number, words):
    error = OSError("timed out") if number is None else OSError(number, os.strerror(number))
    with pytest.raises(HostError, match=words) as caught, in_words("a worker"):
        raise error
    assert caught.value.errno == number and caught.value.__cause__ is error
    with pytest.raises(HostError) as again, in_words("all of it"):
        raise caught.value
    assert again.value is caught.value


def test_too_little_room_for_memory_is_told_where_it_is_mapped():
    """Real, by a limit of the addresses of this process; the limit is lifted, and there is memory."""
    from pippy.drivers.wire.memory import create_shared

    shared, own = shared_files(), open_descriptors()
    limit = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + (1 << 20), limit[1]))
    try:
        with pytest.raises(HostError, match=r"no memory for 67,108,864 bytes of values .*ulimit -v: [\d,]+\)"):
            create_shared(1 << 26)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    assert open_descriptors() == own
    fd, memory = create_shared(1 << 26)
    os.close(fd)
    assert memory.size == 1 << 26
    del memory
    assert_no_more_shared_files(shared)
