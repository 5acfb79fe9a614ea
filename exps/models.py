"""Which models go through pipeline() in one call, and compute what the plain model computes?

Question: of models of Hugging Face, torchvision and timm, and of models written by hand: which are cut into four stages, and
          have the loss, every gradient and every buffer of the plain model?
Command:  python -m exps.models                               (from the root of the repository; --kinds, --only)
          python -m exps.models --found build/models.json --page exps/models.md
          keeps what is found in a file, and writes the table of all that is in it into the page.
          The models of torchvision and timm are tried if these packages can be imported. A wheel of torchvision that was
          built for CUDA will do; keep it out of the environment, since transformers would try to use it too:
          pip install --no-deps --target build/vision torchvision timm pillow
          PYTHONPATH=build/vision python -m exps.models --kinds torchvision timm
Method:   tiny sizes with random weights, in float64. Each model is tried in a process of its own, with a time limit. It is
          cut into four stages of like parameters (into fewer, if it has fewer places to cut). Two training steps and one in
          evaluation run on the reference, and one more on a batch of another size where the model allows that; gradients
          add up over the steps.
Finding:  exps/models.md
"""

import argparse
import copy
import importlib
import json
import multiprocessing
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from exps.tried_models import hugging_face as hugging_face_models
from exps.tried_models import (
    installed_vision,
    meta_llama,
    more_hugging_face,
    residual_streams,
    sequences,
    various,
    vision,
)
from exps.tried_models.candidate import Candidate, rows_of
from exps.tried_models.comparison import compare_step, cut, plain_step
from pippy import Pipe
from pippy.errors import BalanceError, PippyError
from pippy.ir.base.readable import first_listed

BEGIN, END = "<!-- what exps/models.py found -->", "<!-- end -->"


@dataclass
class Outcome:
    """What happened to a model. ``reason`` says why it does not work; it is empty if it does."""

    kind: str
    name: str
    stages: int = 0
    seconds: float = 0.0
    kept_whole: list[str] = field(default_factory=list)
    works: list[str] = field(default_factory=list)
    reason: str = ""


def hugging_face() -> dict[str, Candidate]:
    """The models of transformers."""
    hugging_face_models.transformers()
    return hugging_face_models.candidates() | more_hugging_face.candidates()


def written_by_hand() -> dict[str, Candidate]:
    """Our own."""
    kinds = sequences, meta_llama, vision, various, residual_streams
    return {name: each for kind in kinds for name, each in kind.candidates().items()}


def torchvision() -> dict[str, Candidate]:
    """Those of torchvision, where it can be imported."""
    installed_vision.declare_missing_operators()
    importlib.import_module("torchvision")
    return installed_vision.torchvision_candidates()


def timm() -> dict[str, Candidate]:
    """Those of timm, where it can be imported."""
    installed_vision.declare_missing_operators()
    importlib.import_module("timm")
    return installed_vision.timm_candidates()


KINDS: dict[str, Callable[[], dict[str, Candidate]]] = {
    "Hugging Face": hugging_face,
    "by hand": written_by_hand,
    "torchvision": torchvision,
    "timm": timm,
}


def cut_in_four(candidate: Candidate, model: torch.nn.Module, arguments: dict[str, Any]) -> Pipe:
    """A Pipe of four stages, or of as many as there are places."""
    for stages in (4, 3):
        try:
            return cut(candidate, model, stages, arguments)
        except BalanceError:
            continue
    return cut(candidate, model, 2, arguments)


def try_model(candidate: Candidate, outcome: Outcome) -> Outcome:
    """Fill ``outcome``, which is true at each moment."""
    arguments = candidate.arguments()
    plain = candidate.model()
    try:
        plain_step(candidate, plain, arguments)
    except Exception as error:
        return _failed(outcome, "the plain model fails: ", error)
    model, plain = candidate.model(), candidate.model()
    begin = time.perf_counter()
    try:
        pipe = cut_in_four(candidate, model, arguments)
        outcome.seconds = time.perf_counter() - begin
        outcome.stages, outcome.kept_whole = pipe.num_stages, list(pipe.kept_whole)
        for _ in range(2):
            compare_step(candidate, pipe, model, plain, arguments)
        outcome.works.append("training")
        pipe.eval(), plain.eval()
        compare_step(candidate, pipe, model, plain, arguments)
        outcome.works.append("evaluation")
    except Exception as error:
        return _failed(outcome, "", error)
    fewer = _fewer_rows(arguments)
    if candidate.fixed_batch or not _runs(candidate, plain, fewer):
        outcome.works.append("one batch")
        return outcome
    try:
        compare_step(candidate, pipe, model, plain, fewer)
        outcome.works.append("another batch")
    except PippyError:
        pass  # refused: it is in the table
    except Exception as error:
        return _failed(outcome, "another batch: ", error)
    return outcome


def _fewer_rows(arguments: dict[str, Any]) -> dict[str, Any]:
    rows = next(value.shape[0] for value in arguments.values() if isinstance(value, torch.Tensor))
    return rows_of(arguments, 0, max(rows - 1, 1))


def _runs(candidate: Candidate, plain: torch.nn.Module, arguments: dict[str, Any]) -> bool:
    """Whether the plain model does: one may keep in evaluation what its next backward cannot use."""
    try:
        plain_step(candidate, copy.deepcopy(plain), arguments)
    except Exception:
        return False
    return True


def _failed(outcome: Outcome, what: str, error: Exception) -> Outcome:
    text = re.sub(r"\S*/site-packages/", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    outcome.reason = f"{what}{type(error).__name__}: {' '.join(lines[:2])[:300]}"
    return outcome


def _in_child(candidate: Candidate, outcome: Outcome, answer: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        found = try_model(candidate, outcome)
    except BaseException:
        found = outcome
        found.reason = traceback.format_exc().splitlines()[-1]
    answer.send(asdict(found))


def try_in_a_process(kind: str, name: str, candidate: Candidate, limit: float) -> Outcome:
    """The outcome of a trial in a fork of this process, which is ended after ``limit`` seconds."""
    context, outcome = multiprocessing.get_context("fork"), Outcome(kind, name)
    mine, its = context.Pipe(duplex=False)
    child = context.Process(target=_in_child, args=(candidate, outcome, its))
    child.start()
    its.close()
    try:
        if not mine.poll(limit):
            outcome.reason = f"not done after {limit:.0f} s"
            return outcome
        return Outcome(**mine.recv())
    except EOFError:
        outcome.reason = "its process died"
        return outcome
    finally:
        child.kill()
        child.join()


def table(outcomes: list[Outcome]) -> str:
    """The page's part: a line of numbers for each kind, and a row for each model."""
    kinds = list(dict.fromkeys(each.kind for each in outcomes))
    lines = [
        "| kind | models | work | seconds of `pipeline()`: median, most |",
        "|---|---:|---:|---:|",
    ]
    for kind in kinds:
        lines.append(_numbers(kind, [each for each in outcomes if each.kind == kind]))
    lines += [_numbers("all", outcomes), ""]
    for kind in kinds:
        lines += [f"## {kind[0].upper()}{kind[1:]}", "", "| model | stages | seconds | another batch | |"]
        lines.append("|---|---:|---:|---|---|")
        lines += [_row(each) for each in outcomes if each.kind == kind] + [""]
    return "\n".join(lines)


def _numbers(kind: str, outcomes: list[Outcome]) -> str:
    working = [each for each in outcomes if not each.reason]
    seconds = sorted(each.seconds for each in working) or [0.0]
    share = f" ({len(working) / len(outcomes):.0%})" if kind == "all" else ""
    return f"| {kind} | {len(outcomes)} | {len(working)}{share} | {seconds[len(seconds) // 2]:.1f}, {seconds[-1]:.1f} |"


_FREE = {"another batch": "yes", "one batch": "not tried", "refused": "refused"}


def _row(outcome: Outcome) -> str:
    whole = first_listed((f"`{each}`" for each in outcome.kept_whole), most=2)
    kept = f"kept whole: {whole}" if whole else ""
    remark = outcome.reason.replace("|", "\\|") or kept
    if outcome.reason:
        return f"| {outcome.name} | | | | {', '.join(outcome.works)} {remark} |"
    free = next((each for each in ("another batch", "one batch") if each in outcome.works), "refused")
    return f"| {outcome.name} | {outcome.stages} | {outcome.seconds:.1f} | {_FREE[free]} | {remark} |"


def write_page(page: Path, outcomes: list[Outcome]) -> None:
    """Put the table between the two marks in the page."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{table(outcomes)}\n{END}{after}")


def warm_up() -> None:
    """Trace a model in this process, and run none: what torch imports for that is there in the forks."""
    candidate = sequences.candidates()["nn.TransformerEncoder"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing cuts it
        Pipe.from_tracing(candidate.model(), example_kwargs=candidate.arguments())


def candidates_of(kind: str) -> dict[str, Candidate]:
    """The models of a kind; none where its package cannot be imported."""
    try:
        return KINDS[kind]()
    except ImportError as error:
        print(f"{kind}: skipped, {error}", file=sys.stderr)
        return {}


def main(arguments: list[str] | None = None) -> list[Outcome]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--only", nargs="+", help="names of models")
    parser.add_argument("--limit", type=float, default=300, help="seconds for a model")
    parser.add_argument("--found", type=Path, help="a file that keeps what is found")
    parser.add_argument("--page", type=Path, help="a page that has the two marks")
    options = parser.parse_args(arguments)
    found = read_found(options.found)
    warm_up()
    for kind in options.kinds:
        for name, candidate in candidates_of(kind).items():
            if options.only and name not in options.only:
                continue
            found[kind, name] = try_in_a_process(kind, name, candidate, options.limit)
            print(_row(found[kind, name]), flush=True)
            if options.found:
                options.found.parent.mkdir(exist_ok=True)
                options.found.write_text(json.dumps([asdict(each) for each in found.values()], indent=1))
    outcomes = sorted(found.values(), key=lambda each: list(KINDS).index(each.kind))
    if options.page:
        write_page(options.page, outcomes)
    return outcomes


def read_found(file: Path | None) -> dict[tuple[str, str], Outcome]:
    """What was found before."""
    if file is None or not file.exists():
        return {}
    return {(each["kind"], each["name"]): Outcome(**each) for each in json.loads(file.read_text())}


if __name__ == "__main__":
    main()
