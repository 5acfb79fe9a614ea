"""What workers would hold in a step of a model without data, counted before anything runs."""

from typing import Any

import torch

from exps.seeds.layers import Layers, cut_into
from exps.seeds.settings import Setting
from pippy.drivers.batch.divide_call import divide_call
from pippy.drivers.count.pipe_bytes import count_pipe
from pippy.drivers.lowering.lower import lower
from pippy.drivers.plan.cost.held_bytes import HeldBytes, held_bytes
from pippy.ir.pipe import compiled_of


def held(model: Layers, setting: Setting, loss_fn: Any, *batch: torch.Tensor) -> tuple[HeldBytes, ...]:
    """What each worker holds; plain SGD has no state."""
    pipe = cut_into(model, setting.balance, loss_fn)
    division = divide_call(compiled_of(pipe), setting.chunks, batch, {})
    return held_bytes(lower(pipe, setting.program()).program, count_pipe(pipe, division, torch.device("cpu")))
