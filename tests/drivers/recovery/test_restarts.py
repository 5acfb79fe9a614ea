"""Under torchrun a lost rank ends the job, which torchrun starts again, and the script goes on from its newest checkpoint."""

from tests.drivers.recovery.restarted_script import STEPS, driver_on, step_of
from tests.drivers.thread_cluster import thread_cluster
from tests.drivers.torchrun_jobs import ROOT, started

SCRIPT = str(ROOT / "tests/drivers/recovery/restarted_script.py")


def test_torchrun_starts_the_ranks_again_and_the_run_goes_on_to_the_bit(tmp_path):
    with thread_cluster(2) as threads:
        driver = driver_on(threads)
        *_, loss = [step_of(driver) for _ in range(STEPS)]
    options = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    with started(*options, SCRIPT, str(tmp_path / "run")) as process:
        out, err = process.communicate(timeout=250)
        assert process.returncode == 0, err
    assert out.splitlines() == ["from 0", "refused True", f"from {STEPS - 1}", f"loss {loss}"]
