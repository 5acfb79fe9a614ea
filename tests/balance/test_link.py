"""`link=`: the time in which stages take and send values counts beside their own."""

import re
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pippy import Pipe, pipeline
from pippy.balance import measured_link
from pippy.balance.balancer import Balancer
from pippy.balance.kept_bytes import UnitValue
from pippy.balance.partition import runs
from pippy.balance.transfer_times import TransferTimes, link_of
from pippy.drivers.base.errors import ClusterError
from pippy.drivers.plan import make_schedule
from pippy.drivers.plan.cost.simulate import simulate
from pippy.drivers.plan.language.instructions import Send
from pippy.drivers.plan.passes.communicate import add_communication
from pippy.ir.base.errors import BalanceError
from pippy.ir.trace.trace import trace
from tests.balance.test_profile import Tick
from tests.drivers.thread_cluster import thread_cluster

ROWS = 4
ONE_PER_BYTE = "8Gbit"  # a nanosecond for each byte


class Chain(nn.Module):
    """Layers of given widths that take given times; if it ``skips``, the last one also reads what the first one gives."""

    def __init__(self, widths, factors, skips=False):
        super().__init__()
        self.factors, self.skips = factors, skips
        self.layers = nn.ModuleList(nn.Linear(*each) for each in pairwise(widths))

    def forward(self, x):
        first = None
        for number, (layer, factor) in enumerate(zip(self.layers, self.factors)):
            if number == len(self.factors) - 1 and self.skips:
                x = torch.cat([x, first], 1)
            x = Tick.apply(layer(x), factor)
            first = x if first is None else first
        return x


def balanced(model, stages, link=None, width=2):
    balancer = Balancer("time", stages, example_args=(torch.randn(ROWS, width),), link=link, clock=lambda: Tick.clock)
    return balancer(trace(model))


@st.composite
def values_and_edges(draw):
    units = draw(st.integers(1, 8))
    values = []
    for _ in range(draw(st.integers(0, 5))):
        made = draw(st.integers(0, units - 1))
        users = draw(st.lists(st.integers(made + 1, units), min_size=1, max_size=3, unique=True))
        values.append(UnitValue(made, tuple(sorted(users)), draw(st.integers(1, 50))))
    inner = draw(st.lists(st.integers(1, units), unique=True))
    return units, tuple(values), sorted({0, *inner, units})


def moved(values, start, end):
    takes = sum(each.bytes for each in values if each.made < start and any(start <= use < end for use in each.users))
    return takes + sum(each.bytes for each in values if start <= each.made < end <= each.users[-1])


@given(values_and_edges())
def test_a_run_takes_and_sends_each_value_once(drawn):
    units, values, edges = drawn
    transfers = TransferTimes(units, values, link_of(ONE_PER_BYTE))
    for start, end in combinations(range(units + 1), 2):
        assert transfers.of(start, end) == transfers.table[start, end] == moved(values, start, end)
    merged = transfers.merged(edges)
    for one, other in combinations(range(len(edges)), 2):
        assert merged.of(one, other) == moved(values, edges[one], edges[other])


def cost(widths, factors, cut, link):
    """The greatest stage of a chain in nanoseconds, by hand: 8 for a layer, and the bytes of what it takes and sends."""
    stages = []
    for start, end in runs(cut, len(factors)):
        ends = [widths[each] for each in (start, end) if 0 < each < len(factors)]
        stages.append(8 * sum(factors[start:end]) + link.nanoseconds(ROWS * 4 * sum(ends)))
    return max(stages)


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_no_other_cuts_of_a_chain_take_less_time(data):
    count, stages = data.draw(st.integers(3, 7)), data.draw(st.integers(2, 3))
    widths = data.draw(st.lists(st.integers(1, 40), min_size=count + 1, max_size=count + 1))
    factors = data.draw(st.lists(st.integers(1, 60), min_size=count, max_size=count))
    link = link_of(data.draw(st.sampled_from(["100Gbit", "8Gbit", "4Gbit"])))
    report = balanced(Chain(widths, factors), stages, link.text, widths[0])
    best = min(cost(widths, factors, cut, link) for cut in combinations(range(1, count), stages - 1))
    assert report.greatest.cost <= best * 1.03 + 1
    assert sum(each.cost - each.transfers for each in report.stages) == 8 * sum(factors)
    forward_and_backward = [sum(each) for each in report.seconds()]
    assert forward_and_backward == pytest.approx([(each.cost - each.transfers) / 1e9 for each in report.stages])


def period(report, sent):
    """How long a micro-batch takes under 1F1B, if ``sent[i]`` nanoseconds pass between stages i and i + 1, by simulation."""
    ends = []
    for chunks in (32, 64):
        program = add_communication(make_schedule("1f1b", workers=len(report.stages), chunks=chunks))
        size = {
            each.value: sent[min(worker, each.to)]
            for worker, order in enumerate(program.orders)
            for each in order
            if isinstance(each, Send)
        }
        forward, backward = zip(*report.seconds())
        ends.append(
            simulate(
                program,
                [each * 1e9 for each in forward],
                backward=[each * 1e9 for each in backward],
                size=size,
            ).makespan
        )
    return (ends[1] - ends[0]) / 32


def test_the_simulated_step_is_shorter_than_with_cuts_that_leave_the_link_out():
    """The even cut is where a wide value crosses."""
    widths, factors = [2, 40, 2, 40, 40, 2], [10, 10, 10, 16, 14]
    found = {}
    for link in (None, ONE_PER_BYTE):
        report = balanced(Chain(widths, factors), 2, link)
        cut = int(re.search(r"\d+", report.stages[1].first).group())
        found[cut] = period(report, [ROWS * 4 * widths[cut]])
    assert list(found) == [4, 2] and found[2] < 0.5 * found[4]
    assert report.link_note == (
        "link 8Gbit: the cuts that are best without transfers, from layers.4, would take 2.50 times as long"
    )


def test_the_greatest_cost_is_what_a_micro_batch_takes_under_1f1b():
    """The simulation may overlap a little: the cost is no less than its time, and at most a transfer more."""
    widths, factors = [2, 3, 3, 3, 2], [30, 30, 30, 30]
    report = balanced(Chain(widths, factors), 4, ONE_PER_BYTE)
    transfer = ROWS * 4 * 3
    found = period(report, [transfer] * 3)
    assert 8 * 30 + transfer <= found <= report.greatest.cost <= found + transfer / 2


def test_a_value_for_a_far_stage_is_taken_and_sent_once():
    report = balanced(Chain([2, 5, 3, 4, 2], [10, 10, 10, 10], skips=False), 4, ONE_PER_BYTE)
    assert [each.transfers for each in report.stages] == [16 * 5, 16 * 8, 16 * 7, 16 * 4]
    skipping = Chain([2, 5, 3, 4, 2], [10, 10, 10, 10], skips=True)
    skipping.layers[3] = nn.Linear(4 + 5, 2)
    report = balanced(skipping, 4, ONE_PER_BYTE)
    # The first sends one value, to two stages; what passes by the stages between is none of theirs.
    assert [each.transfers for each in report.stages] == [16 * 5, 16 * 8, 16 * 7, 16 * (4 + 5)]


def test_the_report_has_the_transfers():
    report = balanced(Chain([2, 2, 2, 2, 2], [1000] * 4), 2, "16Mbit")
    table, summary, link, _ = re.split(r"\n(?=by |link |memory)", str(report))
    assert [re.split(r"  +", each)[6] for each in table.splitlines()[2:]] == ["0.016 ms", "0.016 ms"]
    assert "transfers" in table.splitlines()[0]
    assert re.search(r"the bound is 0.50 \(the mean without transfers\)", summary)
    assert link == "link 16Mbit: the cuts are also the best ones without transfers"
    without = balanced(Chain([2, 2, 2], [1, 1]), 2)
    assert without.link_note is None and "transfers" not in str(without) and "link" not in str(without)


@pytest.mark.parametrize("text, speed", [("10Gbit", 1.25e9), ("10 gbit/s", 1.25e9), ("100Mbps", 12.5e6), ("1.5GB/s", 1.5e9),
                                         ("8b", 1.0), ("3B", 3.0), (5e8, 5e8), (".5Tbit/s", 62.5e9)])  # fmt: skip
def test_speeds(text, speed):
    assert link_of(text).bytes_per_second == pytest.approx(speed)


@pytest.mark.parametrize("given", ["fast", "10", "10Gx", "", 0, -1, True, float("inf"), float("nan"), None, "0Gbit"])
def test_what_is_no_speed_is_refused(given):
    with pytest.raises(BalanceError, match=r'is no speed.*as in link="10Gbit"'):
        link_of(given)


def test_a_link_needs_measured_times_and_the_advice_works():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.randn(3, 4)
    with pytest.raises(
        BalanceError, match=r"link='1Gbit' is counted beside the measured time.*split='parameters'.*give split='time'"
    ):
        pipeline(model, split="parameters", num_stages=2, link="1Gbit")
    with pytest.raises(BalanceError, match="link: the model is only cut evenly if num_stages is given"):
        pipeline(model, link="1Gbit")
    with pytest.raises(BalanceError, match="is no speed"):
        pipeline(model, num_stages=2, example_args=(x,), link="quick")
    pipe = pipeline(model, split="time", num_stages=2, example_args=(x,), link="1Gbit")
    assert [each.transfers for each in pipe.balance.stages] == [8 * 48, 8 * 48]
    assert torch.equal(pipe(x), model(x))
    made = Pipe.from_sequential(model, cut=Balancer("time", 2, example_args=(x,), link="1Gbit"))
    assert made.balance.link_note.startswith("link 1Gbit")


# link="measured"


def test_the_slowest_measured_link_counts_as_if_it_was_given(monkeypatch):
    """The time of a value there and back is made up: what all take, and the bytes over a speed of the pair's own."""
    speeds, asked = {(0, 1): 4e9, (1, 2): 1e9}, []

    def seconds(driver, size):
        asked.append((tuple(driver.ranks), size))
        return 0.003 + size / speeds[tuple(driver.ranks)]

    monkeypatch.setattr(measured_link, "there_and_back", seconds)
    widths, factors = [2, 40, 2, 40, 40, 2], [10, 10, 10, 16, 14]
    with thread_cluster(4):
        found = balanced(Chain(widths, factors), 3, "measured")
    given = balanced(Chain(widths, factors), 3, ONE_PER_BYTE)
    assert [(each.first, each.transfers) for each in found.stages] == [
        (each.first, each.transfers) for each in given.stages
    ]
    assert found.link_note == given.link_note.replace(
        "8Gbit", "measured, 1 GB/s from worker1 to worker2, the slowest of 2"
    )
    assert {pair for pair, _ in asked} == {(0, 1), (1, 2)}, "three stages need two links of the four workers"
    most = max(size for _, size in asked)
    assert most / 4e9 < 0.02 <= 0.003 + most / 1e9 and most <= measured_link.LARGEST


def test_a_link_that_is_as_quick_with_more_bytes_has_the_speed_of_the_large_value(monkeypatch):
    monkeypatch.setattr(
        measured_link, "there_and_back", lambda driver, size: 0.002 if size > measured_link.SMALL else 0.003
    )
    with thread_cluster(2):
        assert measured_link.measured_link(2).bytes_per_second == measured_link.LARGEST / 0.002


def test_workers_pass_values_to_measure_their_link(monkeypatch):
    """So many bytes go to the next worker, and one number comes back; no driver is left."""
    monkeypatch.setattr(measured_link, "LARGEST", 1 << 20)
    with thread_cluster(3) as workers:
        transports = [each.context.transport for each in workers.engine.workers]
        before = torch.get_rng_state()
        found = measured_link.measured_link(2)
        assert torch.equal(torch.get_rng_state(), before)
        assert found.bytes_per_second > 0 and found.text.endswith(" from worker0 to worker1")
        there, back = transports[0].sent[1], transports[1].sent[0]
        sizes = (measured_link.SMALL, measured_link.FIRST)
        assert there.bytes == (measured_link.TIMES + 1) * sum(sizes) and there.values == 2 * (measured_link.TIMES + 1)
        assert back.bytes == 4 * there.values and not transports[2].sent
        assert not workers.open_drivers


def test_a_link_that_cannot_be_measured_is_refused(monkeypatch):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(3, 4)

    def none():
        raise ClusterError("no cluster is open; open one: with cluster(2) as workers: ...")

    with thread_cluster(1), pytest.raises(BalanceError, match="the current cluster is on one; leave link out"):
        pipeline(model, num_stages=2, example_args=(x,), link="measured")
    with thread_cluster(2), pytest.raises(BalanceError, match="the stages are on one; leave link out"):
        pipeline(model, num_stages=1, example_args=(x,), link="measured")
    with pytest.raises(BalanceError, match=r"link='measured' is counted beside the measured time.*give split='time'"):
        pipeline(model, split="parameters", num_stages=2, link="measured")
    monkeypatch.setattr(measured_link, "current_cluster", none)
    with pytest.raises(BalanceError, match=r'but no cluster is open.*or say how fast the link is, as in link="10Gbit"'):
        pipeline(model, num_stages=2, example_args=(x,), link="measured")
