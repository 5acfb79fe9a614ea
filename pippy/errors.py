"""Every error that pippy raises on purpose: those of the compiler, and those of what runs on workers.

>>> from pippy.errors import PippyError, TracingError
>>> issubclass(TracingError, PippyError)
True
"""

from pippy.drivers.base.errors import (
    CheckError,
    CheckpointError,
    ClusterError,
    DriverError,
    LoweringError,
    MicrobatchError,
    OptimizerError,
    PackingError,
    PeerLost,
    StepError,
    WorkerLostError,
)
from pippy.ir.base.errors import (
    BalanceError,
    BatchNormError,
    GenerationError,
    GuardError,
    InitializationError,
    InputError,
    LossError,
    MarkError,
    ModeError,
    NameLookupError,
    PippyError,
    PippyWarning,
    SharedParameterError,
    SliceError,
    SplitError,
    StageError,
    StateDictError,
    TracingError,
    VerificationError,
)

__all__ = [
    "BalanceError",
    "BatchNormError",
    "CheckError",
    "CheckpointError",
    "ClusterError",
    "DriverError",
    "GenerationError",
    "GuardError",
    "InitializationError",
    "InputError",
    "LossError",
    "LoweringError",
    "MarkError",
    "MicrobatchError",
    "ModeError",
    "NameLookupError",
    "OptimizerError",
    "PackingError",
    "PeerLost",
    "PippyError",
    "PippyWarning",
    "SharedParameterError",
    "SliceError",
    "SplitError",
    "StageError",
    "StateDictError",
    "StepError",
    "TracingError",
    "VerificationError",
    "WorkerLostError",
]
