"""The dispatch mode that modes of pippy inherit from: entering one does not load torch.compile."""

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A `TorchDispatchMode` in which nothing is compiled.

    At its first operation torch's own mode imports torch._dynamo, to switch it off: 300 modules, a second of processor time and
    60 MB in each worker. A torch without ``_should_skip_dynamo`` works, and imports them.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
