"""What the controller sends to the fork server: the settings of a local cluster, and which worker to fork or to end."""

from dataclasses import dataclass

from pippy.drivers.engines.routes import on_devices

CONTROLLER = "controller"  # its name for RPC


@dataclass(frozen=True)
class LaunchConfig:
    """The settings of a local cluster, for the fork server and the workers.

    Attributes:
        worker: the dotted name of the class that the workers run.
        transport: how workers pass tensors: "shared_memory", "rpc" or "none".
        directory: a private one, where the processes find one another if they use RPC.
        cores: the core of each worker, if they are pinned.
        controller: the controller's process.
        dies_with_thread: whether the fork server is killed when the thread of the controller that started it ends.
        sockets: the file descriptors of a worker's sockets to the controller, if it has any: for messages, and for urgent ones.
        timeout: how many seconds a process may leave others without an answer.
        patience: how many seconds a worker that waits for a value polls for it before it sleeps.
        log_level: from which level on records of the workers are sent to the controller.
        start: which start of a worker it is: 1, and one more whenever another process takes its place.

    >>> LaunchConfig("package.module:Class", ("a", "b"), ("cpu", "cpu"), 1, None, "none", "", 4711).rpc_name(0)
    'worker0'
    """

    worker: str
    names: tuple[str, ...]
    devices: tuple[str, ...]
    threads: int
    cores: tuple[int, ...] | None
    transport: str
    directory: str
    controller: int
    dies_with_thread: bool = False
    sockets: tuple[int, ...] = ()
    timeout: float = 5.0
    patience: float = 0.0
    log_level: int = 30
    start: int = 0

    def rpc_name(self, index: int) -> str:
        """The name that a worker has for RPC."""
        return f"worker{index}"

    def near(self, index: int) -> list[int]:
        """The other workers that compute on devices, if values may stay on them on their way from a worker."""
        if self.transport != "shared_memory":
            return []
        return [worker for worker in on_devices(self.devices) if worker != index]

    @property
    def uses_rpc(self) -> bool:
        """Whether messages and values travel by RPC; else by sockets that the controller and the fork server make."""
        return self.transport == "rpc"

    @property
    def meeting(self) -> str:
        """The address of the store at which the processes find each other."""
        return f"file://{self.directory}/store"


@dataclass(frozen=True)
class Fork:
    """Asks the fork server to end what is left of a worker, and to fork it; its two sockets, if it has any, come beside this.

    >>> Fork(1, start=1)
    Fork(index=1, start=1)
    """

    index: int
    start: int


@dataclass(frozen=True)
class End:
    """Asks the fork server to end what is left of a worker.

    >>> End(1)
    End(index=1)
    """

    index: int
