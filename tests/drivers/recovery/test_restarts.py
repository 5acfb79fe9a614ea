"""Under torchrun a lost rank ends the job, which torchrun starts again, and the script goes on from its newest checkpoint."""

from pippy import local_cluster
from tests.drivers.processes import close_open_cluster
from tests.drivers.recovery.restarted_script import STEPS, train
from tests.drivers.torchrun_jobs import ROOT, started

SCRIPT = str(ROOT / "tests/drivers/recovery/restarted_script.py")


def test_torchrun_starts_the_ranks_again_and_the_run_goes_on_to_the_bit_also_on_other_workers(tmp_path):
    folder = str(tmp_path / "run")
    close_open_cluster()
    with local_cluster(3, threads=1) as workers:
        losses = train(workers, None, stages=2, steps=STEPS + 2).losses
        options = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
        with started(*options, SCRIPT, folder) as process:
            out, err = process.communicate(timeout=250)
            assert process.returncode == 0, err
        assert out.splitlines() == ["refused True", f"from 1 losses {losses[:STEPS]}"]
        result = train(workers, folder, stages=3, steps=STEPS + 2)
    assert (result.resumed_at, result.losses) == (STEPS, losses)
