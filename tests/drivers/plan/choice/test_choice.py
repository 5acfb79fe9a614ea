"""What is said of what was chosen, and where nothing fits: what is advised fits."""

import re
from dataclasses import replace

import pytest

from pippy.drivers.plan import Costs, make_schedule
from pippy.drivers.plan.choice.problem import (
    LiveLimit,
    MemoryLimit,
    MicroBatch,
    Problem,
    byte_count,
    byte_text,
    limits_of,
)
from pippy.drivers.plan.choice.search import fits, search, unfit
from pippy.drivers.plan.cost.held_bytes import PipeBytes, StageBytes
from pippy.drivers.plan.language.errors import ArgumentError

ROWS = 16


def micro_batch(chunks):
    """Four stages: 100 bytes of parameters and gradients each, and 10 for each row."""
    rows = -(-ROWS // chunks)
    stage = StageBytes(parameters=50, gradients=50, kept=10 * rows)
    return MicroBatch(Costs([0.001 * rows + 0.0005] * 4, 0.001, 0.001), PipeBytes((stage,) * 4))


def problem(limit, chunks=(4,), workers=2):
    program = make_schedule("1f1b", workers=workers, chunks=1, stages_per_worker=4 // workers)
    return Problem(program, micro_batch, chunks, (MemoryLimit((limit,) * workers),))


def test_the_text_says_what_was_chosen_what_it_holds_and_what_it_costs():
    choice = search(problem(330), thorough=False)
    text = str(choice)
    assert f"{choice.schedule} with {choice.chunks} micro-batches: its step is predicted" in text
    assert re.search(r"worker 1, stages 2 3: \d+ B of 330 B", text) and text.count("<- chosen") == 1
    assert choice.checkpoint and f"{next(iter(choice.checkpoint))} {next(iter(choice.checkpoint.values()))}" in text
    assert re.search(r"the limit costs \d+%", text) and "left out: zb_v: " in text
    assert "guessed to take" in str(replace(choice, measured=False))
    free = search(problem(10**6), thorough=False)
    assert "none would take less" in free.why and free.checkpoint == {}


def test_what_a_worker_computes_and_waits_says_why():
    """More micro-batches compute longer, as each begins its computations, and wait less. The sums are made by hand."""
    choice = search(problem(10**6, chunks=(1, 2, 4, 8, 16)), thorough=False)
    (told,) = [line for line in str(choice).splitlines() if line.startswith("  why: ")]
    chosen, by_count = choice.chosen, {}
    for each in choice.candidates:
        if each.name == choice.schedule:
            by_count.setdefault(each.chunks, each)
    for count, each in by_count.items():
        costs = micro_batch(count).costs
        of_worker = 2 * costs.forward[0] + costs.backward_input + costs.backward_weight  # the last are of both stages
        assert each.computes == pytest.approx(count * of_worker) and each.waits + each.computes == each.seconds
    fewer, more = by_count[chosen.chunks // 2], by_count[chosen.chunks * 2]
    assert more.computes > chosen.computes and fewer.waits > chosen.waits > more.waits
    started = (
        f"  why: on average a worker computes {1e3 * chosen.computes:.1f} ms and waits {1e3 * chosen.waits:.1f} ms; in "
    )
    assert told.startswith(f"{started}{fewer.chunks} micro-batch")
    assert (
        f"it would compute {1e3 * fewer.computes:.1f} ms and wait {1e3 * fewer.waits:.1f} ms; in {more.chunks}" in told
    )
    assert (
        f"{1e3 * more.computes:.1f} ms, because each computation takes time to begin, and wait {1e3 * more.waits:.1f}"
        in told
    )


def test_the_text_says_why_each_schedule_is_left_out_and_what_all_limits_cost():
    """What breaks a limit with every number of micro-batches is told with the one that lacks least."""
    given = problem(330, chunks=(2, 4))
    tight = replace(given, limits=(LiveLimit((2, 2)), *given.limits), checkpoint="never")
    choice = search(tight, thorough=False)
    reasons = dict(choice.left_out)
    assert not choice.candidates and set(reasons) >= {"1f1b", "fill_drain", "zb_h1", "zb_v"}
    assert "V-shaped" in reasons["zb_v"]
    assert reasons["1f1b"] == "with 4 micro-batches it holds 4 stage-micro-batches on worker 0, and the limit is 2"
    assert f"  1f1b: {reasons['1f1b']}" in choice.refusal.splitlines()
    assert unfit(choice, "330").message == choice.refusal  # more memory alone would not help
    again = replace(given, limits=(LiveLimit((3, 3)), MemoryLimit((600, 600))))
    choice = search(again, thorough=False)
    slower, chosen = choice.chosen.seconds / choice.unlimited.seconds - 1, choice.chosen
    assert slower > 0.01 and f"so the limits cost {slower:.0%}" in choice.why
    assert f"{chosen.peak_live[0]} of 3 stage-micro-batches, {chosen.peak_bytes[0]} B of 600 B" in str(choice)
    assert all(again.refusal(each) == "" for each in choice.candidates)


@pytest.mark.parametrize(("limit", "chunks"), [(215, 16), (230, 6)])
def test_what_is_advised_fits(limit, chunks):
    tight = problem(limit)
    said = unfit(search(tight, thorough=False), repr(limit), more_chunks=(5, chunks))
    start = (
        rf"memory={limit} is too little: the nearest, \w+ with 4 micro-batches, with forwards of stages 0 1 2 computed "
    )
    assert re.match(
        start + r"again, holds 240 B on worker \d \(100 B parameters, 100 B gradients, 40 B kept\)", said.message
    )
    assert said.message.endswith(f"would fit: memory='240B', or {chunks} micro-batches, or 4 workers for these stages")
    assert (said.limits, said.chunks, said.workers) == ((240, 240), chunks, 4)
    assert fits(replace(tight, limits=(MemoryLimit(said.limits),)))
    assert fits(problem(limit, (chunks,))) and fits(problem(limit, workers=4))
    assert not fits(tight) and not fits(problem(limit, (5,)))


def test_where_parameters_alone_are_too_much_only_a_limit_or_another_cut_helps():
    tight = problem(90, workers=4)
    said = unfit(search(tight, thorough=False), "90", more_chunks=(8, 16))
    assert said.chunks is said.workers is None and said.message.endswith("or a cut into more stages on more workers")
    assert search(replace(tight, limits=(MemoryLimit(said.limits),)), thorough=False).candidates


def test_sizes_are_read_and_shown():
    assert [byte_count(text) for text in ("12GiB", " 1.5 kb ", ".5TiB", 12)] == [12 * 2**30, 1500, 2**39, 12]
    for count in (1, 999, 1024, 1025, 10**6, 3 * 2**30 + 1, 2**40 - 1, 7 * 2**45):
        assert count <= byte_count(byte_text(count)) <= count * 1.02
    assert limits_of("1KiB", 2) == (1024, 1024)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("12", r"memory='12': it has no unit; the units are B, KB"),
        ("12 Gi", r"memory='12 Gi': give bytes, as in \"12GiB\""),
        (0, "memory=0: give bytes"),
        (-5, "memory=-5: give bytes"),
        (True, "memory=True: give bytes"),
        (1.5, "memory=1.5: give bytes"),
        ("0GiB", "memory='0GiB': give bytes"),
        (b"1GiB", "memory=b'1GiB': give bytes"),
        (["1GiB"], r"memory=\['1GiB'\] has 1 sizes for 2 workers; give one, or one each"),
        (["1GiB", None], "memory=None: give bytes"),
        ({0: "1GiB"}, r"memory=\{0: '1GiB'\}: give a size for each worker, 0 to 1, or one for all"),
        ({0: 1, 1: 1, 2: 1}, "give a size for each worker"),
    ],
)
def test_what_is_no_size_is_refused(given, message):
    with pytest.raises(ArgumentError, match=message):
        limits_of(given, workers=2)
