"""Makes tokens on a worker: it runs the program `prompt` once, and then the program `token` again and again.

Each run is for one token of every row, and has a context of its own. From run to run a micro-batch keeps the keys and values of
its layers, its inputs grow, and the worker that chooses keeps what it has chosen. Where all rows of a micro-batch have ended
early, `AllEnded` goes once in place of its token and of all values, and every worker passes over the micro-batch from then on.

The next token of each row is chosen from the logits as `generate` of transformers does.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from pippy.drivers.lowering.flow import TOGETHER
from pippy.drivers.plan.language.instructions import Compute, Instruction, Receive, Send, own_value
from pippy.drivers.protocol.programs import AddGeneration, AllEnded, Generate, Generated, Sampling
from pippy.drivers.wire.pickling import Pickled
from pippy.drivers.wire.transport import Transport
from pippy.drivers.worker.executor import BoundProgram, Executor
from pippy.drivers.worker.measure.calls import BoundCall, Handle
from pippy.drivers.worker.model_graphs import made_stages
from pippy.drivers.worker.step_context import StepContext, StepDevice
from pippy.ir.run.key_value_cache import KeyValueCache, using_cache


class Noise:
    """The random numbers of a call, for all its rows. Each token takes them in the order in which the plain model does.

    `torch.multinomial` takes one sample so: it divides the probabilities by exponential noise, and gives the largest.
    """

    def __init__(self, state: torch.Tensor, rows: int) -> None:
        self.generator, self.rows = torch.Generator(), rows
        self.generator.set_state(state)
        self.latest, self.drawn = torch.empty(0), 0

    def of(self, token: int, words: int) -> torch.Tensor:
        """The noise for a token, counted from 0: a row for each sequence. It is that of the token before, or the next one."""
        if self.drawn <= token:
            self.latest = torch.empty(self.rows, words).exponential_(1, generator=self.generator)
            self.drawn += 1
        return self.latest


def probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The probabilities of the next tokens.

    >>> probabilities(torch.tensor([[1.0, 3.0, 2.0]]), Sampling(1.0, 1, None, torch.get_rng_state()))
    tensor([[0., 1., 0.]])
    """
    scores = logits
    if sampling.temperature is not None and sampling.temperature != 1.0:
        scores = scores / sampling.temperature
    if sampling.top_k:
        least = torch.topk(scores, min(sampling.top_k, scores.shape[-1]))[0][..., -1, None]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if sampling.top_p is not None and sampling.top_p < 1.0:
        scores = scores.masked_fill(_unlikely(scores, sampling.top_p), -torch.inf)
    found = scores.softmax(dim=-1)
    if not found.isfinite().all():
        raise ValueError(
            "the next token cannot be drawn, because a logit is nan or infinite; check whether the parameters are "
            "finite"
        )
    return found


def _unlikely(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Which tokens do not belong to the most likely ones, whose probabilities add up to ``top_p``."""
    ascending, order = torch.sort(scores, descending=False)
    unlikely = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
    unlikely[..., -1:] = False
    return unlikely.scatter(1, order, unlikely)


def next_token(logits: torch.Tensor, sampling: Sampling | None, noise: torch.Tensor | None) -> torch.Tensor:
    """The next token of each row: the most likely one, or one drawn with the ``noise`` of these rows."""
    logits = logits.float()
    if sampling is None or noise is None:
        return logits.argmax(dim=-1)
    return (probabilities(logits, sampling) / noise.to(logits.device)).argmax(dim=-1)


class Generation:
    """What a worker has of one driver to make tokens with: the code of its stages, for a prompt and for a token behind it, and
    the programs, by the number of micro-batches and whether a prompt is one token.

    ``held`` gives the code the tensors that the worker has.
    """

    def __init__(
        self, modules: Sequence[Pickled], transport: Transport, place: StepDevice, held: Callable[[Any], torch.Tensor]
    ) -> None:
        self.transport, self.place = transport, place
        self.modules = [{**made_stages(each, held, place.device), TOGETHER: Together()} for each in modules]
        for stages in self.modules:
            for module in stages.values():
                module.eval()
        self.programs: dict[tuple[int, bool], list[Executor]] = {}

    def add(self, add: AddGeneration) -> None:
        """Bind the programs for a number of micro-batches."""
        bound = [
            BoundProgram(program, self.modules[behind], {}, self.place.device)
            for program, behind in ((add.prompt, add.one_token), (add.token, True))
        ]
        self.programs[len(add.token.share), add.one_token] = [
            Executor(each, self.transport, self.place.device, self.place.copies) for each in bound
        ]


class Together(nn.Module):
    """Gives several values as one, or the values in such a one."""

    def forward(self, *values: Any) -> Any:
        return values if len(values) > 1 else values[0]


class GenerateCall:
    """One call on one worker: a run for each token. It gives each micro-batch its cache, and passes over those that have ended.

    ``ended`` are the micro-batches of which that is known in this run, and ``over`` those that take no part in it any more.
    """

    def __init__(self, generation: Generation, number: int, generate: Generate, given_up: Callable[[], bool]) -> None:
        self.generation, self.number, self.generate, self.given_up = generation, number, generate, given_up
        self.programs = generation.programs[len(generate.rows), generate.one_token]
        device = generation.place.device
        self.inputs = {name: list(each.to(device).split(generate.rows)) for name, each in generate.inputs.items()}
        self.caches = [KeyValueCache() for _ in generate.rows]
        self.finished = [torch.zeros(rows, dtype=torch.bool, device=device) for rows in generate.rows]
        self.chosen: list[list[torch.Tensor]] = [[] for _ in generate.rows]
        self.given: list[Any] = [None for _ in generate.rows]  # what was chosen last, as the next run takes it
        sampling = generate.sampling
        self.noise = None if sampling is None else Noise(sampling.state, sum(generate.rows))
        self.token, self.ended, self.over = 0, set[int](), set[int]()
        self.code: dict[bool, Sequence[BoundCall]] = {}

    def runs(self) -> Iterator[tuple[Executor, StepContext]]:
        """The program and the context of each token."""
        transport, place, chunks = self.generation.transport, self.generation.place, len(self.generate.rows)
        for token in range(self.generate.length):
            self.token, executor = token, self.programs[token > 0]
            executor.run_of = f"token {token}, "
            step = StepContext(
                self.number, self.inputs, (1.0,) * chunks, False, transport, place, given_up=self.given_up
            )
            step.choose, step.earlier = self._choose, token * chunks
            yield executor, step
            for microbatch in self.ended:
                self.caches[microbatch].layers.clear()
            self.over |= self.ended
            if len(self.over) == chunks:
                return
            self._grow()

    def _grow(self) -> None:
        """Make the inputs for one more token."""
        self.ended = {at for at, each in enumerate(self.given) if isinstance(each, AllEnded)}
        self.inputs.pop("input_ids", None)
        self.inputs.update((name, self.given) for name in self.programs[True].bound.chosen)
        for name, given in self.inputs.items():
            if name == "attention_mask":
                self.inputs[name] = [torch.cat((each, each.new_ones(len(each), 1)), dim=1) for each in given]
            elif name == "position_ids":
                self.inputs[name] = [each[:, -1:] + 1 for each in given]

    def watching(self, code: Sequence[BoundCall]) -> Sequence[BoundCall]:
        """The instructions, each passed over where its micro-batch has ended."""
        behind = self.token > 0
        if behind not in self.code:
            order = self.programs[behind].program.order
            self.code[behind] = [(self._do, (each, *bound)) for each, bound in zip(order, code, strict=True)]
        return self.code[behind]

    def _do(self, step: StepContext, each: Instruction, handle: Handle, operands: tuple[Any, ...]) -> None:
        microbatch: int = each.microbatch  # type: ignore[attr-defined]
        if microbatch in self.over:
            return
        ended = microbatch in self.ended
        if isinstance(each, Receive):
            handle(step, *operands)
            if isinstance(step.values[own_value(each)], AllEnded):
                self.ended.add(microbatch)
        elif isinstance(each, Send):
            last = ended or self.token + 1 == self.generate.length
            if last and each.value in self.programs[True].bound.chosen:
                return  # all know that no token follows
            if ended:
                step.values[own_value(each)] = AllEnded()
            handle(step, *operands)
        elif isinstance(each, Compute) and not ended:
            with using_cache(self.caches[microbatch]):
                handle(step, *operands)
        elif not ended:
            handle(step, *operands)

    def _choose(self, microbatch: int, logits: torch.Tensor) -> Any:
        """Choose a micro-batch's tokens. Gives what the next run takes: a column of them, or that all rows have ended."""
        generate, finished, noise = self.generate, self.finished[microbatch], None
        if self.noise is not None:
            noise = self.noise.of(self.token, logits.shape[-1]).split(generate.rows)[microbatch]
        token = next_token(logits, generate.sampling, noise)
        if generate.ends:
            token = token.masked_fill(finished, generate.padding)
            finished |= torch.isin(token, torch.tensor(generate.ends, device=token.device))
        self.chosen[microbatch].append(token)
        self.given[microbatch] = AllEnded() if finished.all() else token[:, None]
        return self.given[microbatch]

    def generated(self) -> Generated | None:
        """All tokens, if this worker chooses them."""
        if not self.chosen[0]:
            return None
        tokens = tuple([torch.stack(each, dim=1).cpu() for each in self.chosen])
        return Generated(tokens, None if self.noise is None else self.noise.generator.get_state())

    def close(self) -> None:
        """Free the keys and values."""
        for each in self.caches:
            each.layers.clear()
