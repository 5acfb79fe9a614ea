"""The smallest models: one linear layer, and two. Tests write the forward."""

from torch import nn


class OneLinear(nn.Module):
    """It has a layer, `lin`."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)


class TwoLinear(nn.Module):
    """It has the layers `first` and `second`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
