"""Makes tokens on a worker, of all chunks of a call at a time, without the controller.

    worker 0, stage 0     P.0  P.1  1.0  1.1  2.0 ...       P: the prompt; 1, 2, ...: the token behind it; .0, .1: the chunk
    worker 1, stage 1          P.0  P.1  1.0  1.1 ...       the last stage chooses the token, and sends it to the first

Each chunk is a generator, which gives the key of the message that it waits for. The worker goes on with a chunk whose message
is here. Where all rows of a chunk have ended early, None is sent once in place of its token and of all values, and every worker
ends the chunk.
"""

from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any

import torch

from pippy.drivers.protocol.generation import AddGeneration, Generate, Generated, TokenGraph, TokenStage
from pippy.drivers.wire.pickling import unpickle
from pippy.drivers.wire.received_values import Interrupted, ValueKey
from pippy.drivers.wire.transport import Transport
from pippy.drivers.worker.next_token import Noise, next_token
from pippy.drivers.worker.stage_call import StageCall
from pippy.ir.run.key_value_cache import KeyValueCache, using_cache

Wanted = (
    tuple[ValueKey, int] | None
)  # the key of a message and the worker that sends it; None to let other chunks go on
TOKEN = (
    1 << 20
)  # the number of a token in the keys of messages; those of values are the numbers of the stages that make them


class LoadedGraph:
    """A worker's part of a graph, with the code of its stages: ``held`` gives them the tensors that the worker has."""

    def __init__(self, graph: TokenGraph, held: Callable[[Any], torch.Tensor], device: torch.device) -> None:
        self.graph = graph
        modules = unpickle(graph.modules, held)
        self.calls: dict[int, StageCall] = {}
        for each in graph.stages:
            module = modules[each.stage].to(device).eval()
            self.calls[each.stage] = StageCall(each.call.name, module, each.call.template, (), each.call.seen)

    def run(self, stage: TokenStage, values: dict[str, Any]) -> None:
        """Compute a stage, and put what it gives among the values."""
        outputs = self.calls[stage.stage].run([values[name] for name in stage.takes])
        values.update(zip(stage.gives, [outputs] if len(stage.gives) == 1 else outputs, strict=True))


class Generation:
    """What a worker has of one driver to make tokens with. ``doing`` says what it does of a call that is under way."""

    def __init__(
        self,
        add: AddGeneration,
        index: int,
        transport: Transport,
        device: torch.device,
        held: Callable[[Any], torch.Tensor],
    ) -> None:
        self.index, self.transport, self.device = index, transport, device
        self.prompt, self.token = LoadedGraph(add.prompt, held, device), LoadedGraph(add.token, held, device)
        self.doing: str | None = None
        self.chunks = 1

    def run(self, number: int, generate: Generate, given_up: Callable[[], bool]) -> Generated | None:
        """Make the tokens of one call. The worker that chooses them gives them."""
        self.chunks = len(generate.rows)
        with torch.no_grad():
            generated = _Run(self, number, generate).run(given_up)
        self.doing = None
        return generated

    def named(self, value: int, turn: int) -> str:
        """What a message carries. The arguments are the last two parts of its key."""
        token, chunk = divmod(turn, self.chunks)
        what = f"token {token - 1}" if value == TOKEN else f"what stage {value} gives for token {token}"
        return f"{what} of micro-batch {chunk}"


class _Run:
    """One call on one worker: its chunks, and the noise that their tokens are drawn with."""

    def __init__(self, generation: Generation, number: int, generate: Generate) -> None:
        self.generation, self.number, self.generate = generation, number, generate
        self.chunks = [_Chunk(self, chunk) for chunk in range(len(generate.rows))]
        sampling = generate.sampling
        self.noise = None if sampling is None else Noise(sampling.state, sum(generate.rows))

    def run(self, given_up: Callable[[], bool]) -> Generated | None:
        """Make all tokens. Keys and values are freed, however it ends."""
        try:
            self._go_on(given_up)
        finally:
            for chunk in self.chunks:
                chunk.cache.layers.clear()
        if self.generation.index != self.generation.token.graph.choosing:
            return None
        tokens = tuple([torch.stack(chunk.chosen, dim=1).cpu() for chunk in self.chunks])
        return Generated(tokens, None if self.noise is None else self.noise.generator.get_state())

    def _go_on(self, given_up: Callable[[], bool]) -> None:
        """Go on with whatever chunk can go on, until all have ended."""
        transport = self.generation.transport
        going: deque[tuple[_Chunk, Wanted]] = deque((chunk, None) for chunk in self.chunks)
        while going:
            if given_up():
                raise Interrupted
            here = (at for at, (_, wanted) in enumerate(going) if wanted is None or transport.ready(wanted[0]))
            at = next(here, None)
            if at is None:
                transport.wait_any([wanted for _, wanted in going if wanted is not None])
                continue
            chunk, wanted = going[at]
            del going[at]
            self.generation.doing = f"token {chunk.token} of micro-batch {chunk.number}"
            with suppress(StopIteration):
                going.append((chunk, chunk.steps.send(wanted and transport.receive(*wanted))))

    def noise_of(self, token: int, chunk: int, words: int) -> torch.Tensor | None:
        """The noise of a chunk's rows. What no chunk needs any more is dropped."""
        if self.noise is None:
            return None
        self.noise.forget_before(min(each.token for each in self.chunks if not each.ended))
        return self.noise.of(token, words).split(self.generate.rows)[chunk]


class _Chunk:
    """One chunk of a call on one worker: its inputs, its keys and values, and the tokens that were chosen, if that is here.

    ``steps`` is the generator that goes through its tokens. ``ended`` says that no token is needed any more.
    """

    def __init__(self, run: _Run, number: int) -> None:
        self.run, self.number, self.generation = run, number, run.generation
        self.transport, self.length = run.generation.transport, run.generate.length
        device, rows = self.generation.device, run.generate.rows
        self.inputs = {name: each.split(rows)[number].to(device) for name, each in run.generate.inputs.items()}
        self.cache = KeyValueCache()
        self.finished = torch.zeros(rows[number], dtype=torch.bool, device=device)
        self.chosen: list[torch.Tensor] = []
        self.token, self.ended = 0, False
        self.own: Any = None  # what this worker tells itself of the token
        self.steps: Generator[Wanted, Any, None] = self._steps()

    def _steps(self) -> Generator[Wanted, Any, None]:
        of_token, of_prompt = self.generation.token, self.generation.prompt
        for token in range(self.length):
            self.token = token
            graph = of_token if self.token or self.run.generate.one_token else of_prompt
            if self.token:
                yield from self._hear(graph.graph)
            values = dict(self.inputs)
            for stage in graph.graph.stages:
                yield from self._receive(stage, values)
                if not self.ended:
                    with using_cache(self.cache):
                        graph.run(stage, values)
                self._send(stage, values)
                if not self.ended and graph.graph.logits in stage.gives:
                    self._choose(values[graph.graph.logits])
            if self.ended:
                break
            yield None
        self.ended = True
        self.cache.layers.clear()

    def _key(self, value: int, token: int) -> ValueKey:
        return self.run.number, value, token * len(self.run.generate.rows) + self.number

    def _hear(self, graph: TokenGraph) -> Generator[Wanted, Any, None]:
        """Make the inputs for one more token. A worker that is told of tokens waits for the one before it."""
        for name, given in self.inputs.items():
            if name == "attention_mask":
                self.inputs[name] = torch.cat((given, given.new_ones(len(given), 1)), dim=1)
            elif name == "position_ids":
                self.inputs[name] = given[:, -1:] + 1
        if self.generation.index not in graph.told:
            return
        if self.generation.index == graph.choosing:
            told = self.own
        else:
            told = yield self._key(TOKEN, self.token), graph.choosing
        self.ended = told is None
        self.inputs["input_ids"] = told

    def _receive(self, stage: TokenStage, values: dict[str, Any]) -> Generator[Wanted, Any, None]:
        for source, worker, names in stage.receives:
            received = yield self._key(source, self.token), worker
            if received is None:
                self.ended = True
            else:
                values.update(zip(names, received, strict=True))

    def _send(self, stage: TokenStage, values: dict[str, Any]) -> None:
        for worker, names in stage.sends:
            value = None if self.ended else tuple([values[name] for name in names])
            self.transport.send(worker, self._key(stage.stage, self.token), value)

    def _choose(self, logits: torch.Tensor) -> None:
        """Choose the token, and tell of it those who need it."""
        generate = self.run.generate
        noise = self.run.noise_of(self.token, self.number, logits.shape[-1])
        token = next_token(logits, generate.sampling, noise)
        if generate.ends:
            token = token.masked_fill(self.finished, generate.padding)
            self.finished |= torch.isin(token, torch.tensor(generate.ends, device=token.device))
        self.chosen.append(token)
        if self.token + 1 == self.length:
            return  # all know that it is the last
        self.own = None if self.finished.all() else token[:, None]
        for worker in self.generation.token.graph.told:
            if worker != self.generation.index:
                self.transport.send(worker, self._key(TOKEN, self.token + 1), self.own)
