"""Under torchrun a lost rank ends the job, which torchrun starts again, and the script goes on from its newest checkpoint."""

import os
import signal

from pippy import local_cluster
from tests.drivers.model.recovery.restarted_script import train
from tests.drivers.processes import close_open_cluster
from tests.drivers.torchrun_jobs import ROOT, started

SCRIPT = str(ROOT / "tests/drivers/model/recovery/restarted_script.py")
TORCHRUN = ["-m", "tests.drivers.forking_torchrun", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]


def test_torchrun_starts_the_ranks_again_ctrl_c_saves_and_the_run_goes_on_elsewhere_to_the_bit(tmp_path):
    folder, lines = str(tmp_path / "run"), []
    with started(*TORCHRUN, SCRIPT, folder) as process:
        for line in process.stdout:
            lines.append(line.strip())
            if line == "step 4\n":
                process.send_signal(signal.SIGINT)  # torchrun tells the ranks
                break
        out, err = process.communicate(timeout=280)
    assert [*lines, *out.splitlines()] == ["step 1", "step 2", "refused True", "step 2", "step 3", "step 4"], err
    assert f"training ended by Ctrl-C after step 4, saved as {folder}/step-4; the same call goes on from there" in err
    assert sorted(os.listdir(folder)) == [".lock", "step-3", "step-4"]
    close_open_cluster()
    with local_cluster(3, threads=1) as workers:
        result = train(workers, folder, stages=3, steps=6)
        assert result.resumed_at == 4
        assert result.losses == train(workers, None, stages=2, steps=6).losses
