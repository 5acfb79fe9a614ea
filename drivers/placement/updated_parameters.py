"""Who sends which updated parameters to whom, for an optimizer whose state is divided among replicas of the pipeline."""

from collections.abc import Container, Iterable

from pippy.drivers.plan.language.exchange_program import ExchangeProgram
from pippy.drivers.plan.language.instructions import ReceiveParameters, SendParameters
from pippy.drivers.plan.passes.exchange import exchange
from pippy.drivers.protocol.state import GradientBucket


def passing_on(buckets: Iterable[GradientBucket], names: Container[str]) -> ExchangeProgram:
    """The program that follows an update of the parameters with these names: who adds up their gradients updates them.

    >>> from pippy.drivers.protocol.state import ReplicatedParameter
    >>> buckets = [GradientBucket(2, (ReplicatedParameter("weight", ((0, "here"), (2, "there"))),), "stage 0 part 1")]
    >>> print(passing_on(buckets, {"weight"}))
    exchange parameters
    worker 0
      receive parameters of stage 0 part 1 from 2
    worker 2
      send parameters of stage 0 part 1 to 0
    """
    own = [bucket for bucket in buckets if any(each.name in names for each in bucket.parameters)]
    moved = dict.fromkeys((each.sum, each.owner, to) for each in own for to in each.workers if to != each.owner)
    return exchange(
        "parameters", ((SendParameters(sum, to), ReceiveParameters(sum, owner)) for sum, owner, to in moved)
    )
