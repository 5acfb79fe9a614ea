"""The errors of everything that runs a Pipe on workers."""

from typing import Any

from pippy.ir.base.errors import PippyError


class LoweringError(PippyError, ValueError):
    """A schedule or program that does not fit the Pipe it is to run.

    >>> issubclass(LoweringError, PippyError)
    True
    """


class PackingError(PippyError, TypeError):
    """Something that cannot travel to a worker.

    >>> issubclass(PackingError, TypeError)
    True
    """


class DriverError(PippyError, ValueError):
    """A driver cannot do what it was asked for.

    >>> issubclass(DriverError, ValueError)
    True
    """


class StepError(PippyError, RuntimeError):
    """An instruction raised on a worker. The step was given up on all workers, and they can run the next one.

    Gradients are as before the step. Buffers that the forward changes, such as running means, may have moved on in some
    stages. If one worker failed, ``worker`` is its number and ``failure`` its message.

    >>> issubclass(StepError, RuntimeError)
    True
    """

    worker: int | None = None
    failure: Any = None


class OptimizerError(PippyError, ValueError):
    """Arguments or a state that an optimizer on the workers cannot use.

    >>> issubclass(OptimizerError, ValueError)
    True
    """


class CheckError(PippyError, RuntimeError):
    """A step on the workers is not that of the plain model. ``report`` says what differs: what `driver.check` gave.

    >>> CheckError("the report").report
    'the report'
    """

    def __init__(self, report: Any) -> None:
        super().__init__(str(report))
        self.report = report


class CheckpointError(PippyError, RuntimeError):
    """A checkpoint cannot be written or read, or is not one of this model. Nothing was changed, and the last one is as it was.

    >>> issubclass(CheckpointError, RuntimeError)
    True
    """


class MicrobatchError(PippyError, ValueError):
    """A mini-batch that cannot be cut into micro-batches as it was asked for, or outputs that cannot be put together.

    >>> issubclass(MicrobatchError, PippyError)
    True
    """


class PeerLost(PippyError, ConnectionError):
    """A worker that ended before it had sent a value that another waits for. ``peer`` is its number.

    >>> PeerLost(2, "it ended").peer
    2
    """

    def __init__(self, peer: int, message: str) -> None:
        super().__init__(message)
        self.peer = peer


class ClusterError(PippyError, RuntimeError):
    """A cluster cannot be started, or cannot be used (any more).

    >>> issubclass(ClusterError, RuntimeError)
    True
    """


RECOVERY_ADVICE = "; call driver.recover(), or close this cluster and open another"


class WorkerLostError(ClusterError):
    """A worker has died, or answers no more. `driver.recover` has a local cluster replace it; else open another cluster.

    >>> print(WorkerLostError("stage-host", 1, "localhost", 4711, "killed by SIGKILL"))
    worker 'stage-host' (number 1, pid 4711 on localhost) is lost: killed by SIGKILL; call driver.recover(), or close ...
    """

    def __init__(self, worker: str, index: int, host: str, pid: int, how: str, advice: str = RECOVERY_ADVICE) -> None:
        super().__init__(f"worker {worker!r} (number {index}, pid {pid} on {host}) is lost: {how}{advice}")
        self.worker, self.index, self.host, self.pid, self.how, self.advice = worker, index, host, pid, how, advice

    def __reduce__(self) -> tuple[type["WorkerLostError"], tuple[str, int, str, int, str, str]]:
        return WorkerLostError, (self.worker, self.index, self.host, self.pid, self.how, self.advice)
