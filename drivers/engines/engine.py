"""What a cluster asks of its engine, which starts the workers where they are asked for, and ends them.

    local/        processes of this host, which a fork server starts and watches
    torchrun/     processes that torchrun has started, on one host or several
    hub/          members that come from outside, from any host; two kinds of them:
    ray/          actors of Ray
    joined/       processes that join from any shell

What workers send each other goes by the wire, of which an engine knows nothing but who may be connected with whom. All
engines pass the tests of tests/drivers/engines/contract.py. The shortest engine, for tests, has threads of this process:
tests/drivers/thread_cluster.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from pippy.drivers.engines.routes import Routes
from pippy.drivers.session.calls import Address, Messages
from pippy.drivers.session.session import Session


class Engine(Protocol):
    """The workers of one cluster, as the operating system, or another program, has them: their ``names``, and their devices.

    ``fixed`` is why a worker cannot be replaced; None if it can. ``recovery_advice`` ends the error for a lost worker.
    ``messages``, once the workers are started, carries the controller's messages to them, and ``routes`` says how values go
    between them.
    """

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def device_type(self) -> str: ...

    @property
    def fixed(self) -> str | None: ...

    @property
    def recovery_advice(self) -> str: ...

    @property
    def messages(self) -> Messages: ...

    @property
    def routes(self) -> Routes: ...

    def start(self, timeout: float) -> Sequence[Address]:
        """Start the workers, and wait until each can take messages. Gives where they are, in their order."""

    def deaths(self, wait: float = 0.0) -> Mapping[int, str]:
        """The workers that have died, and how, as far as that is told here. Waits up to so many seconds for the first."""

    def replace(self, workers: Iterable[int]) -> Mapping[int, Address]:
        """End what is left of some workers, and start others in their places. Gives where those are.

        Raises ClusterError where workers are fixed.
        """

    def end(self, workers: Iterable[int]) -> None:
        """End what is left of some workers. The cluster goes on without them, or `replace` starts others in their places.

        Raises ClusterError where workers are fixed.
        """

    def close(self, lost: str | None = None) -> None:
        """End all workers; ``lost`` says which the cluster has lost, if it has. A second call does nothing."""


def start(engine: Engine, timeout: float, start_timeout: float) -> Session:
    """Start the workers of an engine. Returns what calls them."""
    addresses = engine.start(start_timeout)
    return Session(
        addresses, timeout, deaths=engine.deaths, messages=engine.messages, recovery_advice=engine.recovery_advice
    )
