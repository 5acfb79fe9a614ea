"""Makes tokens: the graphs that do so are made and sent once, and each call is one command.

driver.generate(ids, max_new_tokens=20)
    │ first call: the model is traced with a cache, and cut where the Pipe is cut
    │ first with so many micro-batches: the programs `prompt` and `token`                  AddGeneration ──▶ each worker
    ▼ each call: prompts, how long, how tokens are drawn                                   Generate ──▶ each worker
ids with the new tokens behind them      ◀── tokens, from the worker that has the last stage

The arguments are those of `generate` of transformers, checked, with the defaults that the model has.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pippy.drivers.lowering.lower import Lowered, TokenGraph
from pippy.drivers.placement.placed_pipe import PlacedPipe
from pippy.drivers.plan.language.placement import Placement
from pippy.drivers.plan.language.program import Program
from pippy.drivers.protocol.programs import AddGeneration, AddProgram, Generate, Generated, Sampling
from pippy.drivers.protocol.state import TensorLocation
from pippy.drivers.session.driver_commands import DriverCommands
from pippy.drivers.wire.pickling import Pickled, pickle_by_value
from pippy.ir.base.errors import GenerationError
from pippy.ir.base.interrupts import heard
from pippy.ir.base.names import stage_name
from pippy.ir.base.public_calls import check_count, check_flag, is_whole
from pippy.ir.base.readable import brief
from pippy.ir.base.trees import describe
from pippy.ir.compile import compile_traced
from pippy.ir.cut.params import MultiUseParameterConfig
from pippy.ir.cut.uses import copied_parameters, held_tensors, mark_alike
from pippy.ir.pipe import Pipe, model_of
from pippy.ir.request import Request
from pippy.ir.trace.language_models import check_can_generate, trace_generation

# Settings of a generation_config that change which tokens come, and the values with which they change nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "num_beams": (1,), "num_return_sequences": (1,), "repetition_penalty": (1.0,), "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,), "encoder_no_repeat_ngram_size": (0,), "min_length": (0,), "min_new_tokens": (0,),
    "min_p": (0.0,), "typical_p": (1.0,), "epsilon_cutoff": (0.0,), "eta_cutoff": (0.0,), "top_h": (1.0,),
    "guidance_scale": (1.0,),
    "bad_words_ids": (), "sequence_bias": (), "suppress_tokens": (), "begin_suppress_tokens": (), "forced_bos_token_id": (),
    "forced_eos_token_id": (), "exponential_decay_length_penalty": (), "penalty_alpha": (), "dola_layers": (),
    "stop_strings": (), "max_time": (), "watermarking_config": (), "token_healing": (),
    "prompt_lookup_num_tokens": (), "constraints": (),
    "force_words_ids": (), "renormalize_logits": (), "remove_invalid_values": (), "low_memory": (), "use_mtp": (),
}  # fmt: skip


@dataclass(frozen=True)
class Prompts:
    """Checked arguments of one call."""

    inputs: Mapping[str, torch.Tensor]
    rows: tuple[int, ...]
    length: int
    ends: tuple[int, ...]
    padding: int
    sampling: Sampling | None

    @property
    def one_token(self) -> bool:
        """Whether each prompt is one token."""
        return self.inputs["input_ids"].shape[1] == 1

    def message(self, takes: Collection[str]) -> Generate:
        """The message to a worker whose stages take the inputs ``takes``."""
        inputs = {name: value for name, value in self.inputs.items() if name in takes}
        return Generate(inputs, self.one_token, self.rows, self.length, self.ends, self.padding, self.sampling)

    def finished(self, generated: Generated) -> torch.Tensor:
        """The prompts with the new tokens behind them. A row that has ended before others is padded."""
        ids = self.inputs["input_ids"]
        longest = max(each.shape[1] for each in generated.tokens)
        padded = [
            nn.functional.pad(each, (0, longest - each.shape[1]), value=self.padding) for each in generated.tokens
        ]
        if generated.state is not None:
            torch.set_rng_state(generated.state)
        return torch.cat((ids, torch.cat(padded).to(ids.device)), dim=1)


def prompts_of(
    model: nn.Module,
    ids: Any,
    *,
    attention_mask: Any = None,
    max_new_tokens: Any = None,
    do_sample: Any = None,
    temperature: Any = None,
    top_k: Any = None,
    top_p: Any = None,
    eos_token_id: Any = None,
    pad_token_id: Any = None,
    chunks: Any = None,
    workers: int = 1,
    others: Mapping[str, Any],
) -> Prompts:
    """Check the arguments of a call. Raises for what `generate` cannot do."""
    config = getattr(model, "generation_config", None)
    _check_others(others)
    _check_config(config)

    def setting(name: str, given: Any, default: Any = None) -> Any:
        found = getattr(config, name, None) if given is None else given
        return default if found is None else found

    ids = _checked_ids(ids)
    length = setting("max_new_tokens", max_new_tokens)
    if not is_whole(length):
        raise GenerationError(
            f"max_new_tokens={describe(length)}: say how many tokens to make at most, as in "
            "driver.generate(ids, max_new_tokens=20)"
        )
    ends = _checked_tokens("eos_token_id", setting("eos_token_id", eos_token_id, ()))
    padding = _checked_tokens("pad_token_id", setting("pad_token_id", pad_token_id, ends[:1]))[:1]
    mask = _checked_mask(attention_mask, ids, padding, ends)
    sampling = None
    if _checked_flag(setting("do_sample", do_sample, False)):
        sampling = _checked_sampling(
            setting("temperature", temperature, 1.0), setting("top_k", top_k, 50), setting("top_p", top_p, 1.0)
        )
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    return Prompts(inputs, _rows(len(ids), chunks, workers), length, ends, (padding or (0,))[0], sampling)


def _check_others(others: Mapping[str, Any]) -> None:
    if others:
        raise GenerationError(
            f"generate() does not take {', '.join(others)}: it takes the most likely tokens, or draws with temperature, "
            "top_k and top_p. Leave them out; or call driver.copy_to(model), and then "
            "model.generate() in this process, which takes them"
        )


def _check_config(config: Any) -> None:
    for name, neutral in _NEUTRAL.items():
        value = getattr(config, name, None)
        if value is not None and value is not False and value not in neutral:
            raise GenerationError(
                f"the model's generation_config has {name}={brief(value)}, which generate() does not follow; set "
                f"model.generation_config.{name} = None if you can do without, or call driver.copy_to(model), and then "
                "model.generate() in this process"
            )


def _checked_ids(ids: Any) -> torch.Tensor:
    if (
        not isinstance(ids, torch.Tensor)
        or ids.dim() != 2
        or ids.dtype not in (torch.int64, torch.int32)
        or not ids.numel()
    ):
        raise GenerationError(
            f"generate() got {describe(ids)} for the prompts; give the ids of their tokens, an integer tensor of "
            "[rows, length], with shorter prompts padded on the left (a tokenizer with padding_side='left' does so)"
        )
    return ids


def _checked_mask(mask: Any, ids: torch.Tensor, padding: tuple[int, ...], ends: tuple[int, ...]) -> torch.Tensor:
    """The mask that was given. Without one, padding in the prompts is masked, unless it also ends a text."""
    if mask is None:
        unmasked = ids.new_ones(ids.shape, dtype=torch.long)
        return ids.ne(padding[0]).long() if padding and padding[0] not in ends else unmasked
    if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
        raise GenerationError(
            f"attention_mask is {describe(mask)}, and the prompts are {describe(ids)}; give a tensor of that shape, with 0 "
            "where a prompt is padded and 1 elsewhere"
        )
    return mask.long()


def _checked_tokens(name: str, given: Any) -> tuple[int, ...]:
    tokens = given.tolist() if isinstance(given, torch.Tensor) else given
    tokens = [tokens] if isinstance(tokens, int) else tokens
    if not isinstance(tokens, list | tuple) or not all(is_whole(token, 0) for token in tokens):
        raise GenerationError(f"{name}={brief(given)}: give the number of a token, or a list of such numbers")
    return tuple(tokens)


def _checked_flag(given: Any) -> bool:
    check_flag("do_sample", given, GenerationError, true="to draw tokens", false="to take the most likely ones")
    return bool(given)


def _checked_sampling(temperature: Any, top_k: Any, top_p: Any) -> Sampling:
    if not isinstance(temperature, int | float) or temperature <= 0:
        raise GenerationError(
            f"temperature={brief(temperature)}: give a number above 0; for the most likely tokens, give do_sample=False"
        )
    check_count("top_k", top_k, "how many tokens to draw from, where 0 stands for all", GenerationError, least=0)
    if not isinstance(top_p, int | float) or not 0 <= top_p <= 1:
        raise GenerationError(f"top_p={brief(top_p)}: give a probability from 0 to 1")
    return Sampling(float(temperature), int(top_k), float(top_p), torch.get_rng_state())


def _rows(rows: int, chunks: Any, workers: int) -> tuple[int, ...]:
    """How many rows each chunk has."""
    chunks = min(rows, workers) if chunks is None else chunks
    if not is_whole(chunks) or chunks > rows:
        raise GenerationError(
            f"chunks={describe(chunks)} for {rows} prompts; give the number of groups that the prompts are divided "
            f"into, 1 to {rows}. The groups run at the same time, on different stages"
        )
    return tuple(rows // chunks + (chunk < rows % chunks) for chunk in range(chunks))


class TokenGraphs:
    """The graphs of one driver's model that make tokens, and the programs for them. Nothing is sent before the first call."""

    def __init__(
        self, model: torch.nn.Module, placed: PlacedPipe, commands: DriverCommands, ranks: Sequence[int]
    ) -> None:
        self.prompt, self.token = (_Graph(model, placed, ranks, is_prompt) for is_prompt in (True, False))
        self.commands = commands
        if self.prompt.placed.workers != self.token.placed.workers:
            raise GenerationError(
                "the model cannot generate as it is cut: a prompt needs stages on workers "
                f"{', '.join(map(str, self.prompt.placed.workers))}, and a token behind it on "
                f"{', '.join(map(str, self.token.placed.workers))}; cut the Pipe between the layers of the model"
            )
        self.told = sorted(self.prompt.stages.told | self.token.stages.told)
        self.sent: dict[tuple[int, bool], dict[int, set[str]]] = {}  # for each worker, the inputs that it takes

    def lowered(self, chunks: int, one_token: bool = False) -> tuple[Lowered, Lowered]:
        """The programs `prompt` and `token` for so many micro-batches. A prompt of ``one_token`` runs the graph of a token."""
        first = self.token if one_token else self.prompt
        return (
            first.stages.lower("prompt", chunks, self.told, continues=False),
            self.token.stages.lower("token", chunks, self.told, continues=True),
        )

    def run(self, prompts: Prompts) -> torch.Tensor:
        """Generate, and return the prompts with the new tokens behind them."""
        takes = self._send(len(prompts.rows), prompts.one_token)
        made = self.commands.call({worker: prompts.message(names) for worker, names in takes.items()})
        return prompts.finished(next(each for each in made.values() if each is not None))

    def _send(self, chunks: int, one_token: bool) -> dict[int, set[str]]:
        """Send the programs, unless the workers have them. Returns the inputs that each worker takes."""
        if (chunks, one_token) in self.sent:
            return self.sent[chunks, one_token]
        lowered = self.lowered(chunks, one_token)
        graphs = (self.token if one_token else self.prompt, self.token)
        prompt, token = (graph.programs(each) for graph, each in zip(graphs, lowered))
        code = {worker: (self.prompt.code(worker), self.token.code(worker)) for worker in token if not self.sent}
        self.commands.call(
            {worker: AddGeneration(prompt[worker], token[worker], one_token, code.get(worker)) for worker in token}
        )
        ranks = next(iter(token.values())).ranks
        self.sent[chunks, one_token] = {
            rank: {name for each in lowered for name, workers in each.inputs.items() if worker in workers}
            for worker, rank in enumerate(ranks)
        }
        return self.sent[chunks, one_token]


class _Graph:
    """One of the graphs, cut as the Pipe is, and its ``stages`` on workers. ``of_pipe`` has the Pipe's stage for each."""

    def __init__(self, model: torch.nn.Module, placed: PlacedPipe, ranks: Sequence[int], is_prompt: bool) -> None:
        traced = trace_generation(model, is_prompt)
        self.of_pipe = mark_alike(traced, placed.compiled)
        copies = dict.fromkeys(copied_parameters(placed.compiled), MultiUseParameterConfig.REPLICATE)
        request = Request(multi_use_param_spec=copies, output_loss_value_spec=False)
        self.cut = compile_traced(traced, request)
        self.held = held_tensors(self.cut, self.of_pipe, placed.compiled)
        self.placed = PlacedPipe(self.cut, [placed.ranks[stage] for stage in self.of_pipe])
        workers = [rank for rank in ranks if rank in self.placed.workers]
        self.stages = TokenGraph(self.cut, Placement(tuple(map(workers.index, self.placed.ranks))))

    def programs(self, lowered: Lowered) -> dict[int, AddProgram]:
        """Each worker's part of a program. Stages are called as those of the Pipe."""
        names = {f"submod_{at}": stage_name(stage) for at, stage in enumerate(self.of_pipe)}
        return {
            worker: replace(
                each,
                calls={key: replace(call, name=names.get(key, key)) for key, call in each.calls.items()},
                slices=0,  # a call has caches of its own, for all of its tokens
            )
            for worker, each in self.placed.programs(0, lowered, single_loss=False).items()
        }

    def code(self, worker: int) -> Pickled:
        """The code of a worker's stages, with the places of the tensors that the worker has."""
        held = {key: TensorLocation(call, name) for key, (call, name) in self.held.items()}
        return pickle_by_value({call: self.cut.stage(call) for call in self.placed.calls_on(worker)}, held)


class TokenGeneration:
    """Generates with the model of one driver. Nothing is traced or sent before the first call.

    ``ranks`` has the worker of the cluster for each worker of a program.
    """

    def __init__(self, pipe: Pipe, placed: PlacedPipe, commands: DriverCommands, ranks: Sequence[int]) -> None:
        self._pipe, self._placed, self._commands, self._ranks = pipe, placed, commands, ranks
        self._graphs: TokenGraphs | None = None
        self._settings = placed.settings

    def forget(self) -> None:
        """Note that the workers have lost the graphs that make tokens: the next call makes and sends them again."""
        self._graphs = None

    def run(self, ids: Any, others: Mapping[str, Any], **arguments: Any) -> torch.Tensor:
        """Check the arguments of a call, those of `prompts_of`, and return the prompts with the new tokens behind them."""
        model = self._language_model()
        prompts = prompts_of(model, ids, workers=len(self._ranks), others=others, **arguments)
        return self._graphs_of(model).run(prompts)

    def programs(self, chunks: int) -> tuple[Program, Program]:
        """The programs `prompt` and `token` for so many micro-batches."""
        prompt, token = self._graphs_of(self._language_model()).lowered(chunks)
        return prompt.program, token.program

    def _graphs_of(self, model: torch.nn.Module) -> TokenGraphs:
        if self._graphs is None or self._settings is not self._placed.settings:  # or else the model was changed since
            self._settings = self._placed.settings
            with heard():
                self._graphs = TokenGraphs(model, self._placed, self._commands, self._ranks)
        return self._graphs

    def _language_model(self) -> torch.nn.Module:
        model = model_of(self._pipe)
        if model is None:
            raise GenerationError(
                "generate() needs the model that the Pipe was made from, which this Pipe, a copy, does not hold; "
                "make the driver from the Pipe that pipeline() returned"
            )
        check_can_generate(model)
        return model
