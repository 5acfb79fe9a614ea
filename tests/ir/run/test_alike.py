"""What is computed in `alike` depends on the rows alone: a batch gives what its rows give one by one, in any order."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pippy.drivers.compare.alike import _arguments_if_random, alike


def _lstm(x):
    torch.manual_seed(1)
    return nn.LSTM(6, 6, num_layers=2, dropout=0.5, batch_first=True, dtype=torch.float64)(x.unsqueeze(1))[0]


def _attention(x):
    heads = x.reshape(len(x), 2, 1, 3).expand(-1, -1, 4, -1)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.4)


OPERATIONS = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout by half": lambda x: F.dropout(x),
    "dropout in place": lambda x: F.dropout((x * 1.0), 0.3, inplace=True),
    "of features": lambda x: F.dropout1d(x.unsqueeze(-1), 0.3),
    "alpha": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "attention": _attention,
    "lstm": _lstm,
    "rand": lambda x: x * torch.rand(len(x), 6, dtype=x.dtype),
    "rand_like": lambda x: x + torch.rand_like(x),
    "randn": lambda x: x + torch.randn(x.shape, dtype=x.dtype),
    "normal of tensors": lambda x: torch.normal(x, x.abs()),
    "rsample": lambda x: torch.distributions.Normal(x, x.exp()).rsample(),
    "bernoulli": lambda x: x * torch.bernoulli(x.sigmoid().detach()),
    "bernoulli in place": lambda x: x * torch.empty_like(x).bernoulli_(0.3),
    "multinomial": lambda x: x * torch.multinomial(x.softmax(-1), 2).sum(-1, keepdim=True),
    "gumbel": lambda x: F.gumbel_softmax(x, hard=True),
    "randint": lambda x: x * torch.randint(1, 5, (len(x), 1)),
    "poisson": lambda x: x * torch.poisson(x.abs()),
    "exponential": lambda x: x * torch.empty_like(x).exponential_(2.0),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "gamma": lambda x: torch.distributions.Gamma(x.exp(), 1.0).rsample(),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_batch_gives_what_its_rows_give(name):
    torch.manual_seed(0)
    given = torch.randn(5, 6, dtype=torch.float64)
    order = torch.tensor([3, 0, 4, 1, 2])
    gradients, outputs = [], []
    for parts in ([given], [given[:2], given[2:]], [given[order]]):
        leaves = [part.clone().requires_grad_() for part in parts]
        with alike():
            made = [OPERATIONS[name](leaf) for leaf in leaves]
            sum(each.double().square().sum() for each in made).backward()
        outputs.append(torch.cat([each.detach() for each in made]))
        gradients.append(torch.cat([leaf.grad for leaf in leaves]))
    for found in (outputs, gradients):
        torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found[2], found[0][order], rtol=1e-12, atol=1e-12)


def test_a_batch_norm_keeps_its_statistics():
    norm = nn.BatchNorm1d(3)
    before = norm.running_mean.clone(), norm.running_var.clone()
    with alike():
        norm(torch.randn(4, 3))
    assert torch.equal(norm.running_mean, before[0]) and torch.equal(norm.running_var, before[1])
    with alike(batch_norms=False):
        norm(torch.randn(4, 3))
    assert not torch.equal(norm.running_mean, before[0])


def test_the_state_of_a_generator_is_made_as_it_is_asked_for():
    """cuDNN's recurrent layers have one made with a rate; it refuses a rate of 0."""
    make = torch.ops.aten._cudnn_init_dropout_state.default
    assert _arguments_if_random(make) == ((), None)
    names, dropped = _arguments_if_random(torch.ops.aten._cudnn_rnn.default)
    assert dropped == "dropout" and dropped in names
