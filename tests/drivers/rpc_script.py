"""A script for torchrun whose ranks pass all commands and values by RPC. What is lost on the way is an error, soon."""

import os
import sys

import pytest
import torch

import pippy
from pippy.drivers.base.errors import ClusterError, StepError, WorkerLostError
from tests.drivers.cut_connections import CONTROLLERS, call_this_process
from tests.drivers.failing_model import CUT, SILENCE, UNREADABLE, Training
from tests.drivers.processes import within

how, timeout = sys.argv[1], float(sys.argv[2])
if os.environ["RANK"] == "0":
    call_this_process(CONTROLLERS)
torch.manual_seed(1)
torch.set_default_dtype(torch.float64)
with pippy.cluster(threads=1, timeout=timeout, transport="rpc", controller_hosts=False, start_timeout=60) as cluster:
    training = Training(cluster)
    training.step()
    if how == "cut":
        unread = r"getitem_3 of micro-batch 1, from worker 0, could not be read: ValueError"
        with within(2.0), pytest.raises(StepError, match=unread):
            training.fail(UNREADABLE)
        training.check()
        lost = r"is lost: worker 'worker\d' (could not send it a value: the connection broke|found the connection)"
        with within(4.0), pytest.raises(WorkerLostError, match=lost):
            training.fail(CUT)
        with pytest.raises(ClusterError, match="torchrun started the workers, and it starts all of them again"):
            training.driver.recover()
    else:
        cluster.session.timeout = 20.0  # one of the workers finds it first
        late = r"is lost: worker 'worker\d' (could not send it a value: it has not taken up .* within 5 s|found the connection)"
        with within(7.0), pytest.raises(WorkerLostError, match=late):
            training.fail(SILENCE)
    print("lost", flush=True)
