"""The kinds of faults, where each can happen, and how soon it must be noticed."""

from tests.drivers import failing_model, scarce

RAISES = {
    "forward": failing_model.FORWARD,
    "exit": failing_model.EXIT,
    "backward": failing_model.BACKWARD,  # in whole, or the half of the inputs
    "weight half": failing_model.BACKWARD,  # the first stage has nothing in the other half
    "send": failing_model.UNSENDABLE,
    "unreadable": failing_model.UNREADABLE,
    "loss": failing_model.LOSS,
}
SHORTAGES = {
    "no memory": scarce.NO_MEMORY,
    "no descriptors": scarce.NO_DESCRIPTORS,
    "no shared memory": scarce.NO_SHARED_MEMORY,
}
# those that a cluster survives
GENTLE = [*RAISES, *SHORTAGES, "optimizer", "load", "ctrl-c", "ctrl-c twice", "lid"]
ANYWHERE = "ctrl-c anywhere"
TORCHRUN = ("ranks", "hosts")  # on one host, and on two
_EVERYWHERE = ["kill worker", "stop worker", "kill controller", ANYWHERE]
DEADLY = {
    "local": [*_EVERYWHERE, "cut", "kill fork server", "stop fork server", "stuck", "hold lock"],
    "ranks": [*_EVERYWHERE, "cut", "cut tcp", "stuck"],
    "hosts": [*_EVERYWHERE, "cut tcp", "kill host", "cut host"],
    "ray": [*_EVERYWHERE, "cut", "kill node", "kill head", "stuck"],
    "joined": [*_EVERYWHERE, "cut", "cut tcp", "stuck"],
}
BY_THE_WATCHER = ["kill controller", "kill host", "cut host", "cut tcp", "kill node", "kill head"]
UNNOTICED = ["stop fork server", "kill head", "hold lock"]  # steps go on
TIMEOUT = 3.0  # of the clusters: what does not answer is lost after that and another second
ALL_DEADLY = list(dict.fromkeys(kind for kinds in DEADLY.values() for kind in kinds))

# Seconds on a machine that has nothing else to do. A first optimizer on a worker imports much of torch.
_BOUNDS = {"optimizer": 10.0, "load": 5.0, "stop worker": TIMEOUT + 1, "cut host": TIMEOUT + 1, "cut tcp": TIMEOUT + 2}
_BOUNDS |= {"stuck": TIMEOUT + 2, "lid": TIMEOUT + 1, ANYWHERE: 10.0}


def bound(kind: str) -> float:
    """How many seconds a fault of this kind may take until the script is told.

    >>> bound("forward"), bound("stop worker")
    (2.0, 4.0)
    """
    return _BOUNDS.get(kind, 2.0)
