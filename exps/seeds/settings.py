"""How a model of the papers is run, and how fast that is, by simulation from measured layers, beside what was published."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from exps.seeds.layer_costs import LayerCosts


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

    def throughput(self, costs: LayerCosts) -> float:
        """Micro-batches in a second, by simulation. All have the same rows, whatever their number."""
        return self.chunks / costs.step(self.balance, self.chunks, self.checkpoint)

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
