"""What a stage draws random numbers from, and stages that are seeded once for all of a call: losses."""

from torch import fx, nn

from pippy.ir.run.keyed_draws import draw_key, seed_draws
from pippy.ir.run.may_draw import Draws, module_draws


def drawn_as_whole(module: nn.Module) -> Draws:
    """From which generators something draws that is seeded once, for all of a call: a loss."""
    return Draws.NOTHING if isinstance(module, fx.GraphModule) else module_draws(module)


def stage_draws(module: nn.Module) -> Draws:
    """From which generators a stage, or the loss, may draw."""
    seeding = (
        module.graph.find_nodes(op="call_function", target=seed_draws) if isinstance(module, fx.GraphModule) else ()
    )
    nodes = [Draws.PYTHONS_TOO if node.kwargs.get("pythons") else Draws.TORCHS for node in seeding]
    return Draws.of([drawn_as_whole(module), *nodes])


def seed_whole(name: str, draws: Draws) -> None:
    """Seed the generators for all of a call, if this thread draws with a key."""
    if draws is not Draws.NOTHING:
        seed_draws(draw_key(), name, draws is Draws.PYTHONS_TOO)
