"""Translation by a network with attention, as in PyTorch's tutorial: encoder, decoder, with and without teacher forcing."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pippy import pipe_split
from tests.models.idioms import ROWS, assert_same_steps, in_all_ways

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")
SOS, WORDS, HIDDEN, LENGTH = 0, 9, 6, 4


class EncoderRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.gru = nn.Embedding(WORDS, HIDDEN), nn.GRU(HIDDEN, HIDDEN, batch_first=True)

    def forward(self, input):
        return self.gru(self.embedding(input))


class BahdanauAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.Wa, self.Ua, self.Va = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 1)

    def forward(self, query, keys):
        scores = self.Va(torch.tanh(self.Wa(query) + self.Ua(keys))).squeeze(2).unsqueeze(1)
        weights = F.softmax(scores, dim=-1)
        return torch.bmm(weights, keys), weights


class AttnDecoderRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.attention = nn.Embedding(WORDS, HIDDEN), BahdanauAttention()
        self.gru, self.out = nn.GRU(2 * HIDDEN, HIDDEN, batch_first=True), nn.Linear(HIDDEN, WORDS)

    def forward(self, encoder_outputs, encoder_hidden, target_tensor=None):
        batch_size = encoder_outputs.size(0)
        decoder_input = torch.empty(batch_size, 1, dtype=torch.long, device=encoder_outputs.device).fill_(SOS)
        decoder_hidden, decoder_outputs, attentions = encoder_hidden, [], []
        for i in range(LENGTH):
            decoder_output, decoder_hidden, weights = self.forward_step(decoder_input, decoder_hidden, encoder_outputs)
            decoder_outputs.append(decoder_output)
            attentions.append(weights)
            if target_tensor is not None:
                decoder_input = target_tensor[:, i].unsqueeze(1)  # teacher forcing
            else:
                _, topi = decoder_output.topk(1)
                decoder_input = topi.squeeze(-1).detach()
        decoder_outputs = F.log_softmax(torch.cat(decoder_outputs, dim=1), dim=-1)
        return decoder_outputs, decoder_hidden, torch.cat(attentions, dim=1)

    def forward_step(self, input, hidden, encoder_outputs):
        query = hidden.permute(1, 0, 2)
        context, weights = self.attention(query, encoder_outputs)
        output, hidden = self.gru(torch.cat((self.embedding(input), context), dim=2), hidden)
        return self.out(output), hidden, weights


class Translator(nn.Module):
    """The encoder is a stage, the decoder another."""

    def __init__(self, forces):
        super().__init__()
        self.encoder, self.decoder, self.forces = EncoderRNN(), AttnDecoderRNN(), forces

    def forward(self, source, target):
        outputs, hidden = self.encoder(source)
        pipe_split()
        decoded, _, _ = self.decoder(outputs, hidden, target if self.forces else None)
        return F.nll_loss(decoded.view(-1, decoded.size(-1)), target.view(-1))


class Translating(Translator):
    """Returns words for a loss function; the target is an input, too."""

    def forward(self, source, target):
        outputs, hidden = self.encoder(source)
        pipe_split()
        return self.decoder(outputs, hidden, target)[0]


class CutInTheDecoder(Translator):
    """Stages within the loop over words, which share the decoder."""

    def forward(self, source, target):
        outputs, hidden = self.encoder(source)
        words, word = [], torch.full((source.size(0), 1), SOS)
        for i in range(LENGTH):
            if i in (1, 3):
                pipe_split()
            output, hidden, _ = self.decoder.forward_step(word, hidden, outputs)
            words.append(output)
            word = target[:, i].unsqueeze(1)
        return F.cross_entropy(torch.cat(words, 1).flatten(0, 1), target.flatten())


def sentences(count=3):
    return [(torch.randint(1, WORDS, (ROWS, 5)), torch.randint(1, WORDS, (ROWS, LENGTH))) for _ in range(count)]


@pytest.mark.parametrize("model, forces", [(Translator, True), (Translator, False), (CutInTheDecoder, True)])
@in_all_ways
def test_a_translator_that_returns_its_loss(model, forces, workers, schedule, chunks):
    assert_same_steps(model(forces), None, sentences(), workers, schedule, chunks)


@in_all_ways
def test_a_loss_over_the_words(workers, schedule, chunks):
    batches = [(source, target, target) for source, target in sentences()]
    assert_same_steps(Translating(True), of_words, batches, workers, schedule, chunks)


@in_all_ways
def test_padding_that_differs_by_step_and_row(workers, schedule, chunks):
    """The mean is over words that are there; the first batch has no padding."""
    batches = [(source, target, target) for source, target in sentences()]
    for number, (_, target, _) in enumerate(batches):
        for row in range(ROWS):
            target[row, LENGTH - min(number * row % LENGTH, 3) :] = SOS
    assert_same_steps(Translating(True), of_words_that_are_there, batches, workers, schedule, chunks)


def of_words(output, target):
    return F.nll_loss(output.flatten(0, 1), target.flatten())


def of_words_that_are_there(output, target):
    return F.nll_loss(output.flatten(0, 1), target.flatten(), ignore_index=SOS)
