"""Judges an example: are the numbers of three steps on workers those of the plain model, or is the step refused?

What the driver accepts must be equal; a warning beside wrong numbers does not make them right. What it refuses must be unequal
on some batch: of the same rows, of rows with other padding, of rows whose targets alone are padded, or of rows that are further
apart, by which experts are chosen otherwise. To see that, the steps are run with the driver's check switched off. Dropout draws
other numbers than in the plain model: numbers are compared without it.
"""

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from exps.habits import reaching
from exps.habits.changes import CHANGES, OPTIMIZERS
from exps.habits.example import Example, Model
from pippy import Pipe, PippyWarning, errors
from pippy.drivers.driver.drivers import PipelineDriver
from pippy.ir.base.errors import PippyError

RATE = 0.01
FAULTS = ("silently wrong", "false alarm", "changed by the check", "crash", "raw error")
Rows = tuple[
    tuple[str, ...], bool, float
]  # padding of each step, whether inputs have it, too, and how far they are apart
OTHERS: tuple[Rows, ...] = tuple(  # to judge a refusal by
    (padding, of_inputs, apart)
    for of_inputs, apart in ((True, 1.0), (False, 1.0), (True, 100.0))
    for padding in (("some", "much", "none"), ("much", "none", "some"))
)


@dataclass
class Numbers:
    """What three steps gave, until one was refused or failed."""

    steps: list[dict[str, Tensor | None]] = field(default_factory=list)
    error: BaseException | None = None


@dataclass(frozen=True)
class Verdict:
    """``kind`` is equal, refused, cannot run (a refusal whatever the check says), not run (nor by the plain model), or a fault:
    false alarm, silently wrong, changed by the check, crash (an error that is not pippy's), raw error (one that a worker met in
    the user's code, where the plain model has none).
    """

    kind: str
    what: str = ""

    @property
    def is_fault(self) -> bool:
        return self.kind in FAULTS

    @property
    def reason(self) -> str:
        """What verdicts are counted by: an error's class and its first words, without its numbers."""
        return "" if self.is_fault else " ".join(re.sub(r"in step \d|[\d.]+|'.*?'", "", self.what).split()[:14])

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}" if self.what else self.kind


def judge(example: Example, workers: Any) -> Verdict:
    """Run an example on a cluster, beside the plain model."""
    expected = plain_numbers(example)
    if expected.error is not None or not all(map(is_finite, expected.steps)):
        return Verdict("not run", f"the plain model: {first_line(expected.error or 'nan')}")
    on_workers = OnWorkers(example, workers)
    found = on_workers.numbers(dropout=True)
    if found.error is not None:
        return judge_refusal(on_workers, found.error, found.steps, expected)
    if not example.draws:
        wrong = first_difference(found, expected)
        return Verdict("silently wrong", wrong + warned(on_workers)) if wrong else Verdict("equal")
    return judge_with_dropout(on_workers, found, expected)


def warned(on_workers: "OnWorkers") -> str:
    """A warning does not make wrong numbers right: it is said beside them."""
    return "".join(f"; a warning said: {text}" for text in dict.fromkeys(on_workers.warned))


def judge_with_dropout(on_workers: "OnWorkers", found: Numbers, expected: Numbers) -> Verdict:
    """Whether the numbers of an accepted model are right: without dropout those of the plain model, with it those of a driver
    that does not check.
    """
    wrong = first_difference(on_workers.numbers(dropout=False), expected)
    if wrong:
        return Verdict("silently wrong", f"accepted with random numbers, but without: {wrong}{warned(on_workers)}")
    if not first_difference(on_workers.numbers(dropout=False, check=False), expected):
        changed = first_difference(found, on_workers.numbers(dropout=True, check=False), exactly=True)
        if changed:
            return Verdict("changed by the check", changed)
    return Verdict("equal")


def judge_refusal(
    on_workers: "OnWorkers", error: BaseException, steps: list[dict[str, Tensor | None]], expected: Numbers
) -> Verdict:
    """Whether a step was refused that would have been right, whatever its padding."""
    example = on_workers.example
    what = f"{type(error).__name__} in step {len(steps)}: {first_line(error)}"
    if not isinstance(error, PippyError):
        return Verdict("crash", what)
    if raw := raw_error(error):
        return Verdict("raw error", f"in step {len(steps)}: {raw}")
    before = first_difference(Numbers(steps), Numbers(expected.steps[: len(steps)]))
    if before and not example.draws:
        return Verdict("silently wrong", f"before the refusal ({first_line(error)}): {before}")
    found = on_workers.numbers(dropout=False, check=False)
    if found.error is not None:
        return Verdict("cannot run", what)
    if first_difference(found, expected):
        return Verdict("refused", what)
    for rows in OTHERS:
        other = plain_numbers(example, rows)
        if other.error is None and first_difference(on_workers.numbers(dropout=False, rows=rows, check=False), other):
            return Verdict("refused", what)
    return Verdict("false alarm", what)


def raw_error(error: PippyError) -> str:
    """What a worker met in the user's code; "" if that is a refusal of pippy's, as a guard's is, or
    if the error says what to do."""
    found = re.search(r"StageError: \w+ of \w+ failed: (\w+): .*", str(error))
    refused = found is None or "What to do:" in str(error) or (found[1] != "StageError" and hasattr(errors, found[1]))
    return "" if found is None or refused else found[0]


def plain_numbers(example: Example, rows: Rows | None = None) -> Numbers:
    """Three steps of the plain model, without dropout."""
    model, numbers = example.model(dropout=False), Numbers()
    if example.late_hooks:
        model.put_on_hooks()
    optimizer = made_optimizer(example, lambda cls, **options: cls(model.parameters(), **options))
    run_steps(example, Script(model, optimizer), rows, numbers)
    return numbers


def made_optimizer(example: Example, make: Callable[..., Any]) -> Any:
    cls, options = OPTIMIZERS[example.optimizer]
    return make(cls, lr=RATE, **options)


@dataclass
class Script:
    """What a script holds, which trains the plain model."""

    model: Model
    optimizer: Any

    @property
    def loss(self) -> Any:
        return self.model.loss

    def step(self, example: Example, x: Tensor, target: Tensor) -> Tensor:
        """The loss of a forward and a backward."""
        result = self.model(x) if example.returns is None else self.model(x, target)
        loss = self.model.loss_fn()(result, target) if example.returns is None else loss_in(example, result)
        loss.backward()
        return loss

    def gradients(self) -> Mapping[str, Tensor | None]:
        return {name: parameter.grad for name, parameter in self.model.named_parameters()}

    def state(self) -> Mapping[str, Tensor]:
        return self.model.state_dict()


@dataclass
class ScriptWithDriver(Script):
    """What a script holds, which trains the model on workers."""

    driver: PipelineDriver

    def step(self, example: Example, x: Tensor, target: Tensor) -> Tensor:
        result = self.driver.run(example.chunks, x, target)
        return result if example.returns is None else loss_in(example, result)

    def gradients(self) -> Mapping[str, Tensor | None]:
        return self.driver.gradients()

    def state(self) -> Mapping[str, Tensor]:
        return self.driver.state_dict()


class OnWorkers:
    """An example on a cluster; its model is cut once, with dropout and without, unless the script changes the model."""

    def __init__(self, example: Example, workers: Any) -> None:
        self.example, self.workers = example, workers
        self.models: dict[bool, Model] = {}
        self.pipes: dict[bool, Pipe] = {}
        self.warned: list[str] = []

    def numbers(self, dropout: bool, rows: Rows | None = None, **options: Any) -> Numbers:
        """Three steps of a driver."""
        numbers, driver = Numbers(), None
        dropout = dropout and self.example.draws
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", PippyWarning)
            try:
                self.cut(dropout)
                driver = self.example.driver(self.pipes[dropout], self.workers, **options)
                if self.example.late_hooks:
                    self.models[dropout].put_on_hooks()
                optimizer = made_optimizer(self.example, driver.instantiate_optimizer)
                run_steps(self.example, ScriptWithDriver(self.models[dropout], optimizer, driver), rows, numbers)
            except Exception as error:
                numbers.error = error
            finally:
                if driver is not None:
                    driver.close()
        self.warned += [first_line(each.message) for each in warned if issubclass(each.category, PippyWarning)]
        return numbers

    def cut(self, dropout: bool) -> None:
        if dropout not in self.pipes or self.example.change is not None:
            self.models[dropout] = self.example.model(dropout)
            self.pipes[dropout] = self.example.pipe(self.models[dropout])
        elif self.example.late_hooks:
            self.models[dropout].take_off_hooks()
        reaching.ROOTS["model"] = self.models[dropout]  # another model was made since


def run_steps(example: Example, script: Script, rows: Rows | None, numbers: Numbers) -> None:
    """Three steps, and what the script changes in between; what a step raises ends them."""
    change = CHANGES[example.change] if example.change else None
    try:
        for number, (x, target) in enumerate(example.batches(*(rows or ()))):
            if change and number == 1 and not change.after_backward:
                change.act(script)
            loss = script.step(example, x, target)
            if change and number == 1 and change.after_backward:
                change.act(script)
            numbers.steps.append(copied(loss, script.gradients(), script.state()))
            script.optimizer.step()
            script.optimizer.zero_grad()
    except Exception as error:
        numbers.error = error


def loss_in(example: Example, result: Any) -> Any:
    return {"loss": lambda: result, "dict": lambda: result["loss"], "tuple": lambda: result[0]}[example.returns or ""]()


def copied(
    loss: Tensor, gradients: Mapping[str, Tensor | None], state: Mapping[str, Tensor]
) -> dict[str, Tensor | None]:
    """Copies of all numbers of a step, by what they are."""
    found: dict[str, Tensor | None] = {"the loss": loss}
    found |= {f"the gradient of {name}": each for name, each in gradients.items()}
    found |= state
    return {name: each if each is None else each.detach().clone() for name, each in found.items()}


def is_finite(step: dict[str, Tensor | None]) -> bool:
    return all(each is None or bool(each.isfinite().all()) for each in step.values())


def first_difference(found: Numbers, expected: Numbers, exactly: bool = False) -> str:
    """What differs in the first step that differs; "" if nothing does."""
    if found.error is not None:
        return f"{type(found.error).__name__}: {first_line(found.error)}"
    for number, (mine, theirs) in enumerate(zip(found.steps, expected.steps, strict=True)):
        largest = max(float(each.abs().max()) for each in theirs.values() if each is not None)
        said = [text for name in theirs if (text := difference(name, mine.get(name), theirs[name], largest, exactly))]
        if said:
            return f"step {number}: " + "; ".join(said[:4])
    return ""


def difference(name: str, mine: Tensor | None, theirs: Tensor | None, largest: float, exactly: bool) -> str:
    """In which way the two differ beyond rounding, which is relative to the tensor's size and the largest number around."""
    if mine is None or theirs is None:
        return "" if mine is theirs else f"{name} is {'None' if mine is None else 'not None'}"
    size = float(theirs.abs().max())
    off = float((mine.double() - theirs.double()).abs().max())
    if off == 0 or (not exactly and off <= 1e-9 * size + 1e-13 * largest):
        return ""
    return f"{name} is off by {off / size if size else off:.2g} of its size"


def first_line(error: Any) -> str:
    return str(error).strip().splitlines()[0][:160] if str(error).strip() else ""
