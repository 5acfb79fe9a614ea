"""How a model of the papers is run, and how fast that is, by simulation from measured layers, beside what was published."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from exps.seeds.layer_costs import LayerCosts
from pippy.drivers.plan import Program, make_schedule
from pippy.drivers.plan.cost.simulate import simulate_with
from pippy.drivers.plan.language.instructions import Compute, Op
from pippy.drivers.plan.passes.rewrites import add_recompute


@dataclass(frozen=True)
class Setting:
    """So many layers on each worker, so many micro-batches, and what is computed again.

    >>> Setting([3, 4], 8, "except_last").workers
    2
    """

    balance: Sequence[int]
    chunks: int
    checkpoint: str = "never"

    @property
    def workers(self) -> int:
        return len(self.balance)

    def program(self) -> Program:
        """Fill-drain as torchgpipe runs it: backwards begin with the last micro-batch. Its forward was the latest, so that to
        compute all but the last again ("except_last") holds no more than to compute all again.

        >>> print(*Setting([1], 3, "except_last").program().orders[0])
        F0.0 F0.1 F0.2 B0.2 R0.1 B0.1 R0.0 B0.0
        """
        plain = make_schedule("fill_drain", workers=self.workers, chunks=self.chunks)
        last = self.chunks - 1
        orders = [
            [each if each.op == Op.FORWARD else Compute(each.op, each.stage, last - each.microbatch) for each in order]
            for order in plain.computations
        ]
        return add_recompute(plain.with_orders(orders), self.checkpoint)

    def throughput(self, costs: LayerCosts) -> float:
        """Micro-batches in a second, by simulation. All have the same rows, whatever their number; values travel in no time.

        >>> Setting([1, 1], 3, "always").throughput(LayerCosts([1.0, 1.0], [2.0, 2.0]))
        0.2
        """
        return self.chunks / float(simulate_with(self.program(), costs.of_stages(self.balance)).makespan)

    def balanced(self, costs: LayerCosts) -> "Setting":
        """With the layers where they are light by these costs."""
        forwards = 1 if self.checkpoint == "never" else 2
        return replace(self, balance=costs.balance(self.workers, forwards))


def speed_table(settings: Mapping[str, Setting], published: Mapping[str, float], costs: LayerCosts) -> list[str]:
    """Throughputs relative to the first setting's: published, simulated as published, and balanced by these costs."""
    base = next(iter(settings.values())).throughput(costs)
    lines = [f"{'speed-up':14}{'published':>10}{'simulated':>11}{'balanced by our layers':>24}"]
    for name, setting in settings.items():
        ours = setting.balanced(costs)
        speeds = setting.throughput(costs) / base, ours.throughput(costs) / base
        lines.append(f"{name:14}{published[name]:10.3f}{speeds[0]:11.3f}{speeds[1]:12.3f}  {list(ours.balance)}")
    return lines
