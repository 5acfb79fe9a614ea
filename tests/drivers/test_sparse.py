"""Sparse gradients and sparse tensors: every driver gives the numbers, and the layouts, of plain PyTorch."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pippy import (
    MultiUseParameterConfig,
    PipelineDriver,
    PipelineDriver1F1B,
    PipelineDriverFillDrain,
    Replicate,
    pipe_split,
    pipeline,
)
from pippy.drivers.base.errors import DriverError, OptimizerError
from pippy.drivers.worker.measure.live_storages import LiveStorages
from tests.comparisons import Beside, assert_same_gradients

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")
REPLICATE, TRANSMIT = MultiUseParameterConfig.REPLICATE, MultiUseParameterConfig.TRANSMIT


class Words(nn.Module):
    """A sparse embedding in the first stage, and a sparse bag in the second."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(13, 8, sparse=True, padding_idx=0)
        self.hidden = nn.Linear(8, 8)
        self.bag = nn.EmbeddingBag(13, 8, sparse=True, mode="mean")

    def forward(self, x):
        y = torch.tanh(self.hidden(self.words(x).sum(1)))
        pipe_split()
        return y * self.bag(x)


class Tied(nn.Module):
    """A sparse embedding that three stages use; with ``dense``, the last one as a matrix, whose gradient is dense."""

    def __init__(self, dense=False):
        super().__init__()
        self.words, self.hidden, self.dense = nn.Embedding(13, 8, sparse=True), nn.Linear(8, 8), dense

    def forward(self, x):
        y = self.hidden(self.words(x))
        pipe_split()
        y = y * self.words(x + 1)
        pipe_split()
        return y @ self.words.weight.t() if self.dense else y + self.words(x - 1)


CASES = {
    "embedding and bag": (Words, {}),
    "copies": (Tied, {"multi_use_param_spec": REPLICATE}),
    "a copy with a dense gradient": (lambda: Tied(dense=True), {"multi_use_param_spec": REPLICATE}),
    "one that travels": (Tied, {"multi_use_param_spec": TRANSMIT}),
    "one that travels, with a dense gradient": (lambda: Tied(dense=True), {"multi_use_param_spec": TRANSMIT}),
}
OPTIMIZERS = {
    "SparseAdam": (torch.optim.SparseAdam, {"lr": 1e-2}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
}


class Twins(Beside):
    """A model on a driver and its plain twin, each with an optimizer for embeddings and one for all else."""

    def __init__(self, cluster, case, kind="SGD", **options):
        model, pipe = CASES[case]
        super().__init__(cluster, model(), F.mse_loss, pipe=pipe, **options)
        names = [name for name, _ in self.plain.named_parameters()]
        sparse = [name for name in names if not name.startswith("hidden")]
        rest = [name for name in names if name not in sparse]
        for own, (optimizer, settings) in ((sparse, OPTIMIZERS[kind]), (rest, OPTIMIZERS["SGD"])):
            mine = self.driver.instantiate_optimizer(optimizer, param_groups=[{"params": own}], **settings)
            self.optimizers += [mine, optimizer([self.plain.get_parameter(name) for name in own], **settings)]

    def backward(self, chunks=3):
        x = torch.randint(1, 12, (7, 5))
        self.run(chunks, x, torch.randn(self.plain(x).shape))

    def dense_gradients(self):
        """The plain model's are dense from here on. Gives them."""
        for parameter in self.plain.parameters():
            parameter.grad = parameter.grad.to_dense()
        return [parameter.grad for parameter in self.plain.parameters()]


TRAINED = [(case, "SGD") for case in CASES]
TRAINED += [("embedding and bag", "SparseAdam"), ("embedding and bag", "Adagrad"), ("copies", "SparseAdam")]


@pytest.mark.parametrize(("case", "kind"), TRAINED)
def test_sparse_gradients_train_as_in_plain_pytorch(threads, case, kind):
    twins = Twins(threads, case, kind)
    for steps in range(1, 4):  # gradients of several steps add up
        for _ in range(steps):
            twins.backward()
        twins.same_gradients()
        twins.update()
        assert all(gradient is None for gradient in twins.driver.gradients().values())
    twins.same_state()


def test_the_reference_adds_sparse_and_dense_gradients_of_copies():
    for model, options in CASES.values():
        plain = model()
        pipe = pipeline(copy.deepcopy(plain), F.mse_loss, **options)
        x = torch.randint(1, 12, (7, 5))
        target = torch.randn(plain(x).shape)
        for _ in range(2):
            pipe(x, target)
            F.mse_loss(plain(x), target).backward()
        assert_same_gradients(pipe, plain)


@pytest.mark.parametrize("options", [{"schedule": "zb_h1"}, {"out_of_order": True}, {"schedule": "auto"}], ids=str)
def test_sparse_gradients_under_other_drivers(threads, options):
    twins = Twins(threads, "copies", "SparseAdam", **options)
    for _ in range(2):
        with twins.driver.record():
            twins.backward(4)
        twins.same_gradients()
        twins.update()
    twins.same_state()


@pytest.mark.parametrize("case", ["embedding and bag", "copies"])
def test_norms_of_sparse_gradients(threads, case):
    """torch.nn.utils.clip_grad_norm_ raises for sparse gradients; here it gives what it gives for their dense form."""
    twins = Twins(threads, case)
    for norm_type in (2.0, 1.0, 0.0, -1.0, float("inf"), float("-inf")):
        twins.backward()
        expected = nn.utils.get_total_norm(twins.dense_gradients(), norm_type)
        torch.testing.assert_close(twins.driver.grad_norm(norm_type), expected)
        nn.utils.clip_grad_norm_(twins.plain.parameters(), 0.01, norm_type)
        torch.testing.assert_close(twins.driver.clip_grad_norm_(0.01, norm_type), expected)
        for name, gradient in twins.driver.gradients().items():
            assert gradient.layout == (torch.strided if name.startswith("hidden") else torch.sparse_coo)
            torch.testing.assert_close(gradient.to_dense(), twins.plain.get_parameter(name).grad)
        twins.zero_grad()


@pytest.mark.parametrize("case", ["embedding and bag", "copies", "a copy with a dense gradient"])
def test_gradients_are_clipped_by_value(threads, case):
    """torch.nn.utils.clip_grad_value_ raises for sparse gradients; here they are clipped as their dense form is."""
    twins = Twins(threads, case)
    for _ in range(2):  # an element may be stored in several parts
        twins.backward()
    twins.dense_gradients()
    nn.utils.clip_grad_value_(twins.plain.parameters(), 1e-3)
    twins.driver.clip_grad_value_(1e-3)
    for name, gradient in twins.driver.gradients().items():
        torch.testing.assert_close(gradient.to_dense(), twins.plain.get_parameter(name).grad)
    twins.update()
    twins.same_state()


def test_the_norm_of_a_gradient_that_stores_nothing(threads):
    twins = Twins(threads, "embedding and bag")
    twins.run(2, torch.zeros(4, 3, dtype=torch.long), torch.randn(4, 8))  # padding only
    assert twins.driver.get_grad("words.weight")._nnz() == 0
    gradients = twins.dense_gradients()
    for norm_type in (2.0, float("inf")):
        torch.testing.assert_close(twins.driver.grad_norm(norm_type), nn.utils.get_total_norm(gradients, norm_type))


def test_an_optimizer_that_does_not_take_sparse_gradients_is_refused(threads):
    """torch raises in the step; here other workers would have done the update by then."""
    driver = PipelineDriver1F1B(pipeline(Words(), F.mse_loss), threads)
    before = list(threads.session.counts)
    for kind, options in ((torch.optim.Adam, {}), (torch.optim.SGD, {"weight_decay": 0.1})):
        with pytest.raises(OptimizerError, match=r"sparse gradients of 'words.weight', 'bag.weight' .*SparseAdam"):
            driver.instantiate_optimizer(kind, **options)
    with pytest.raises(OptimizerError, match=r"sparse gradients only, and those of 'hidden.weight', 'hidden.bias' are"):
        driver.instantiate_optimizer(torch.optim.SparseAdam)
    assert threads.session.counts == before
    advised = [
        driver.instantiate_optimizer(torch.optim.SparseAdam, param_groups=[{"params": ["words.weight", "bag.weight"]}]),
        driver.instantiate_optimizer(torch.optim.Adam, param_groups=[{"params": "hidden.*"}]),
    ]
    driver.run(2, torch.randint(1, 12, (4, 3)), torch.randn(4, 8))
    for each in advised:
        each.step()


def test_a_sparse_embedding_with_a_dense_gradient_has_any_optimizer(threads):
    """It is the output layer too, so its gradient is dense; SparseAdam fails on it, as in plain PyTorch."""
    for config in (REPLICATE, TRANSMIT):
        pipe = pipeline(Tied(dense=True), F.mse_loss, multi_use_param_spec=config)
        driver = PipelineDriver1F1B(pipe, threads)
        optimizer = driver.instantiate_optimizer(torch.optim.Adam)
        driver.run(2, torch.randint(1, 12, (4, 3)), torch.randn(4, 3, 13))
        optimizer.step()
        driver.close()


@pytest.mark.parametrize("kind", ["SparseAdam", "SGD"])
def test_the_state_of_an_optimizer_of_sparse_gradients(threads, kind):
    twins = Twins(threads, "copies", kind)
    for _ in range(2):
        twins.backward(), twins.update()
    saved, plain = (each.state_dict() for each in twins.optimizers[:2])
    for key, value in plain["state"][0].items():
        mine = saved["state"]["words.weight"][key]
        if isinstance(value, torch.Tensor):
            assert mine.layout == value.layout
            torch.testing.assert_close(mine.to_dense(), value.to_dense())
    for state in (saved, plain):
        twins.optimizers[0].load_state_dict(state)
        twins.backward(), twins.update()
    twins.same_state()


def test_sparse_gradients_between_processes(cluster):
    for case in ("copies", "one that travels"):
        twins = Twins(cluster, case)
        twins.backward()
        twins.same_gradients()
        twins.update()
        twins.optimizers[0].load_state_dict(twins.optimizers[0].state_dict())  # its momentum is sparse
        twins.backward(), twins.update()
        twins.same_state()


class Frequent(nn.Module):
    def __init__(self, as_function):
        super().__init__()
        self.words = nn.Embedding(13, 8, scale_grad_by_freq=not as_function)
        self.hidden, self.as_function = nn.Linear(8, 8), as_function

    def forward(self, x):
        y = F.embedding(x, self.words.weight, scale_grad_by_freq=True) if self.as_function else self.words(x)
        pipe_split()
        return self.hidden(y)


@pytest.mark.parametrize("as_function", [False, True])
def test_gradients_by_the_frequency_in_the_mini_batch_are_refused_for_micro_batches(threads, as_function):
    both = Beside(threads, Frequent(as_function), F.mse_loss)
    x, target = torch.randint(13, (6, 5)), torch.randn(6, 5, 8)
    before = list(threads.session.counts)
    with pytest.raises(DriverError, match=r"(?s)scale_grad_by_freq=True.*test_sparse.py.*words"):
        both.driver.run(2, x, target)
    assert threads.session.counts == before
    both.step(1, x, target)
    with torch.no_grad():
        both.driver.run(2, x, target)


# Sparse tensors as inputs, between stages, as outputs and targets


class Matrix(nn.Module):
    """Takes a sparse matrix; one more, if ``made`` says which kind, goes from the first stage to the second."""

    def __init__(self, made=None, given_by=torch.relu, output=None):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.made, self.given_by, self.output = made, given_by, output

    def forward(self, x):
        y = self.first(x)
        if self.made is not None:
            y = self.given_by(y).to_sparse(layout=self.made)
        pipe_split()
        y = torch.sparse.mm(y, self.second.weight) if self.made is not None else self.second(y)
        return y if self.output is None else torch.relu(y).to_sparse(layout=self.output)


def detached(tensor):
    return tensor.detach()


def with_zeros(rows=7):
    return torch.randn(rows, 4).clamp(min=0)


def twin_of(plain):
    """torch does not copy a module with a compressed buffer."""
    buffers = dict(plain.named_buffers())
    for name in buffers:
        setattr(plain, name, None)
    twin = copy.deepcopy(plain)
    for name, buffer in buffers.items():
        setattr(plain, name, buffer)
        setattr(twin, name, buffer.clone())
    return twin


def compare(cluster, plain, args, chunks, kind=None, loss=F.mse_loss, **options):
    """A step of a model on a driver and plainly: loss, or outputs, and gradients. The last of ``args`` may be a target."""
    both = Beside(cluster, twin_of(plain), loss, kind, plain=plain, **options)
    if loss is None:
        mine, theirs = both.driver.run(chunks, *args), plain(*args).detach()
        assert mine.layout == theirs.layout
        torch.testing.assert_close(mine.to_dense(), theirs.to_dense())
    else:
        both.step(chunks, *args)
    both.driver.close()


LAYOUTS = [torch.sparse_coo, torch.sparse_csr]


@pytest.mark.parametrize("layout", [*LAYOUTS, torch.sparse_csc])
def test_sparse_inputs(threads, layout):
    compare(threads, Matrix(), (with_zeros().to_sparse(layout=layout), torch.randn(7, 4)), 3)


class Graph(nn.Module):
    """A graph convolution: the matrix of the graph is an input, and a buffer of the second stage."""

    def __init__(self, layout):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("graph", with_zeros(4).to_sparse(layout=layout))

    def forward(self, x, graph):
        y = torch.sparse.mm(graph, self.first(x).t())
        pipe_split()
        return self.second(torch.sparse.mm(self.graph, y).t())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sparse_input_for_all_micro_batches_and_a_sparse_buffer(threads, layout):
    graph = with_zeros(4).to_sparse(layout=layout)
    args = torch.randn(7, 4), graph, torch.randn(7, 4)
    compare(threads, Graph(layout), args, 3, chunk_spec={"graph": Replicate()})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("given_by", [torch.relu, detached], ids=["with gradient", "without"])
def test_sparse_tensors_between_stages(threads, layout, given_by):
    compare(threads, Matrix(layout, given_by), (with_zeros(), torch.randn(7, 4)), 3)


def test_the_memory_of_sparse_tensors_is_measured(threads):
    x = with_zeros(8)
    pipe, target = pipeline(Matrix(torch.sparse_coo), F.mse_loss), torch.randn(8, 4)
    driver = PipelineDriver(pipe, threads, schedule="auto", memory_limit="1GiB")
    with pytest.raises(DriverError, match=r"(?s)cannot run with them:.*SparseTensorImpl.*leave memory_limit= out"):
        driver.run(4, x, target)  # how many numbers are stored is not known without numbers
    driver.close()
    driver = PipelineDriver(pipe, threads, schedule="auto")
    with driver.record(memory=True) as recording:
        driver.run(4, x, target)
    parameters = sum(each.nbytes for each in pipe.parameters())
    assert sum(max(each.held[0]) for each in recording.steps[0].noted) > 2 * parameters + x.nbytes
    driver.close()
    for stored, rows in ((x.to_sparse(), 0), (x.to_sparse_csr(), 9)):
        live = LiveStorages()
        live.add([stored, stored.detach()])
        assert live.bytes == 8 * (rows + 3 * stored._nnz())  # columns of rows are a view: both indices of all are alive


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_outputs(threads, layout):
    compare(threads, Matrix(output=layout), (with_zeros(),), 3, loss=None)


@pytest.mark.parametrize("config", [REPLICATE, TRANSMIT])
def test_a_sparse_parameter_of_two_stages(threads, config):
    plain, model = Twice(), Twice()
    model.load_state_dict(plain.state_dict())
    both = Beside(threads, model, F.mse_loss, plain=plain, pipe={"multi_use_param_spec": config})
    both.optimize(torch.optim.SGD, lr=0.1)
    for _ in range(2):
        both.run(2, torch.randn(6, 4), torch.randn(6, 4))
        assert both.driver.get_grad("weight").layout == plain.weight.grad.layout
        both.update(zero_grad=False)
    state = both.driver.state_dict()
    torch.testing.assert_close(state["weight"].to_dense(), plain.weight.to_dense())
    both.driver.load_state_dict({"weight": 2 * state["weight"]})
    both.driver.copy_to(plain)
    torch.testing.assert_close(plain.weight.to_dense(), 2 * state["weight"].to_dense())


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(with_zeros(4).to_sparse())

    def forward(self, x):
        y = torch.sparse.mm(self.weight, x.t())
        pipe_split()
        return torch.sparse.mm(self.weight, y).t()


def squared(output, target):
    return ((output.to_dense() - target.to_dense()) ** 2).mean()


@pytest.mark.parametrize(
    ("layout", "kind", "options"),
    [
        (torch.sparse_coo, None, {}),
        (torch.sparse_csr, PipelineDriverFillDrain, {"single_loss": True}),
        (torch.sparse_csr, None, {"schedule": "zb_h1"}),
    ],
)
def test_a_loss_of_sparse_tensors(threads, layout, kind, options):
    """The loss is checked on parts of a micro-batch, or computed over all rows."""
    target = with_zeros().to_sparse(layout=layout)
    compare(threads, Matrix(output=layout), (with_zeros(), target), 2, kind, squared, **options)


def test_sparse_tensors_between_processes(cluster):
    layout = torch.sparse_coo
    compare(cluster, Matrix(layout), (with_zeros().to_sparse(), torch.randn(7, 4)), 2)
    args = torch.randn(7, 4), with_zeros(4).to_sparse(layout=layout), torch.randn(7, 4)
    compare(cluster, Graph(layout), args, 2, chunk_spec={"graph": Replicate()})
    compare(cluster, Matrix(output=layout), (with_zeros(),), 2, loss=None)
