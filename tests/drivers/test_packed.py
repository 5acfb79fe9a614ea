"""Packed sequences: micro-batches of other numbers of tokens and documents take the plain model's step, on every schedule."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pippy import MicroBatches, PipelineDriver, pipe_split, pipeline
from pippy.drivers.plan.orders.registry import REGISTRY

WORDS, WIDTH, LONGEST = 11, 8, 16
DOCUMENTS = [[3, 4], [7], [2, 2, 5, 1], [6, 3, 2]]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


class Packed(nn.Module):
    """Reads documents one behind the other, [tokens], each of which sees itself alone."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids, cu_seqlens):
        at = torch.arange(ids.shape[0], device=ids.device)
        document = torch.bucketize(at, cu_seqlens, right=True)
        mask = (document[:, None] == document[None, :]) & (at[:, None] >= at[None, :])
        x = self.words(ids) + self.places(at - cu_seqlens[document - 1])
        for number, block in enumerate(self.blocks):
            if number:
                pipe_split()
            x = block(x, mask)
        return self.head(x)


def packs():
    """For each micro-batch: ids, the first token of each document and the end, labels."""
    found = []
    for lengths in DOCUMENTS:
        ids = [torch.randint(WORDS, (length,)) for length in lengths]
        labels = [torch.cat([each[1:], torch.tensor([-100])]) for each in ids]
        found.append((torch.cat(ids), torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]), torch.cat(labels)))
    return found


@pytest.mark.parametrize("schedule", [name for name, entry in REGISTRY.items() if entry.training])
def test_documents_by_their_ends(threads, in_float64, schedule):
    model = Packed()
    plain, given = copy.deepcopy(model), packs()
    alone = [plain(ids[:3], torch.tensor([0, 3])) for ids, *_ in given[:1]]
    assert torch.allclose(plain(*given[0][:2])[:3], alone[0])  # documents do not see each other
    total = sum((labels >= 0).sum() for *_, labels in given)
    loss = sum(F.cross_entropy(plain(ids, ends), labels, reduction="sum") for ids, ends, labels in given) / total
    loss.backward()
    pipe = pipeline(model, nn.CrossEntropyLoss(), example_args=given[2])
    ids, ends, labels = (list(each) for each in zip(*given))
    driver = PipelineDriver(pipe, threads, world_size=2, schedule=schedule, check=False)
    made = driver.run(4, MicroBatches(ids), MicroBatches(ends, dim=None), MicroBatches(labels))
    assert torch.allclose(made, loss)
    for name, gradient in driver.gradients().items():
        assert torch.allclose(gradient, plain.get_parameter(name).grad), name
    driver.close()


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_documents_by_their_positions_in_a_model_of_transformers(threads, in_float64, schedule):
    """A row for each micro-batch. The model returns its loss, a mean over labels: micro-batches count by these unasked."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=16, num_hidden_layers=4,
                                      num_attention_heads=2, num_key_value_heads=1, use_cache=False)  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    plain, given = copy.deepcopy(model), []
    for (ids, _, labels), lengths in zip(packs(), DOCUMENTS):
        shifted = torch.cat([torch.tensor([-100]), labels[:-1]])  # the model shifts them
        positions = torch.cat([torch.arange(length) for length in lengths])
        given.append({"input_ids": ids[None], "position_ids": positions[None], "labels": shifted[None]})
    counts = [(each["labels"][:, 1:] >= 0).sum() for each in given]
    assert len({int(each) for each in counts}) > 1
    loss = sum(count * plain(**each).loss for count, each in zip(counts, given)) / sum(counts)
    loss.backward()
    pipe = pipeline(model, num_stages=4, split="parameters", example_kwargs=given[2])
    driver = PipelineDriver(pipe, threads, world_size=2, schedule=schedule)
    made = driver.run(4, outputs=False, **{name: MicroBatches([each[name] for each in given]) for name in given[0]})
    assert torch.allclose(made.double(), loss.double(), rtol=1e-6)  # it is made in float32
    for name, gradient in driver.gradients().items():
        assert torch.allclose(gradient, plain.get_parameter(name).grad, rtol=1e-5, atol=1e-8), name
    driver.close()
