"""The benchmark against torch compares what is comparable, ends what it started, and notices what is wrong."""

import json
import os

import pytest
import torch

from exps import compiled, control, versus_torch
from exps.peers import gpt, pippy_peer, torch_peer
from exps.peers.empty import torch_control
from exps.peers.process import Child, ChildFailed
from exps.peers.rounds import Disagreement, check, ratio, started, take_turns
from exps.peers.single import single
from exps.peers.torch_peer import CompiledParts
from pippy import SplitPoint, annotate_split_points, pipeline
from tests.drivers.processes import close_open_cluster, within
from tests.exps.answers import Answers, refuse

TINY = gpt.SIZES["tiny"]


class Fake:
    """A contestant whose results are made up."""

    def __init__(self, loss=1.0, seconds=1.0, **gradients):
        self._loss, self._seconds = loss, seconds
        self._gradients = {name: torch.tensor(value) for name, value in gradients.items()}
        self.closed, self.started, self.log = 0, 0, []

    def start(self):
        self.started += 1

    def step(self):
        self.log.append(len(self.log))
        return self._seconds * len(self.log)

    def loss(self):
        return self._loss

    def gradients(self):
        return self._gradients

    def close(self):
        self.closed += 1


@pytest.fixture
def child():
    child = Child(min(os.sched_getaffinity(0)), Answers)
    yield child
    child.close()


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_two_contestants_agree_and_are_timed(tmp_path, capsys):
    file = tmp_path / "times.json"
    versus_torch.main(["--size", "tiny", "--rounds", "2", "--only", "torch 1F1B", "--json", str(file)])
    (result,) = json.loads(file.read_text())["results"]
    assert {name: len(times) for name, times in result["seconds"].items()} == {"1b": 2, "torch 1F1B": 2}
    assert result["wrong"] == {}
    assert result["agreed"]["torch 1F1B"] < 1e-5
    assert all(0 < second < 10 for times in result["seconds"].values() for second in times)
    printed = capsys.readouterr().out
    assert "torch 1F1B" in printed and "agree with 1b" in printed


def test_the_reference_is_plain_training():
    peer = single(TINY)
    with started({"1b": peer}):
        peer.step()
        peer.step()
        loss, gradients = peer.loss(), peer.gradients()
    model, (x, target) = gpt.model(TINY), gpt.batch(TINY)
    expected = gpt.loss_fn(model(x), target)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert gradients.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("size", ["tiny", "small"])
def test_parts_pipe_and_model_are_one_model(size, stages):
    size = gpt.SIZES[size]
    model, (x, target) = gpt.model(size), gpt.batch(size)
    whole = model(x)
    y = x
    names = []
    for stage in range(stages):
        part = gpt.part(size, stage, stages)
        y = part(y)
        names += [name for name, _ in part.named_parameters()]
    torch.testing.assert_close(y, whole, rtol=0, atol=0)
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    annotate_split_points(model, dict.fromkeys(gpt.cuts(size, stages), SplitPoint.BEGINNING))
    pipe = pipeline(model, gpt.loss_fn)
    assert pipe.num_stages == stages
    torch.testing.assert_close(pipe(x, target), gpt.loss_fn(whole, target))
    # pippy's stages hold what torch's parts hold
    held = [sum(p.numel() for p in getattr(pipe.split_gm, f"submod_{i}").parameters()) for i in range(stages)]
    assert held == [sum(p.numel() for p in gpt.part(size, i, stages).parameters()) for i in range(stages)]


def test_every_stage_has_one_worker():
    for name, peer in torch_peer.SCHEDULES.items():
        placed = sorted(stage for rank in range(2) for stage in peer.stages_of(rank))
        assert placed == list(range(2 * peer.stages_per_worker)), name


def test_pippys_contestants_are_schedules():
    from pippy.drivers.plan import make_schedule

    for name, stages in pippy_peer.SCHEDULES.items():
        program = make_schedule(name, workers=2, chunks=gpt.CHUNKS, stages_per_worker=stages)
        assert program.stages == 2 * stages


def test_a_wrong_gradient_is_noticed():
    right = Fake(a=[1.0, 2.0], b=[3.0])
    assert check("x", Fake(a=[1.0, 2.00001], b=[3.0]), right) < 1e-4
    for wrong, word in [
        (Fake(a=[2.0, 4.0], b=[3.0]), "a: 1.0e"),
        (Fake(a=[1.0, 2.0]), "b: inf"),
        (Fake(a=[1.0, 2.0], b=[3.0], c=[1.0]), "c: inf"),
        (Fake(a=[1.0, float("nan")], b=[3.0]), "a: nan"),
        (Fake(loss=2.0, a=[1.0, 2.0], b=[3.0]), "loss: 1.0e"),
    ]:
        with pytest.raises(Disagreement, match=word):
            check("x", wrong, right)


def test_who_disagrees_is_not_timed(capsys):
    fakes = {"1b": Fake(a=[1.0]), "torch 1F1B": Fake(a=[1.0]), "liar": Fake(a=[2.0])}
    result = versus_torch.measure("tiny", 3, {name: lambda size, name=name: fakes[name] for name in fakes})
    assert list(result["wrong"]) == ["liar"] and list(result["seconds"]) == ["1b", "torch 1F1B"]
    assert "liar does not compute" in capsys.readouterr().out
    assert [fake.closed for fake in fakes.values()] == [1, 1, 1]


def test_every_round_gives_everyone_a_turn():
    fakes = {"a": Fake(), "b": Fake()}
    seconds = take_turns(fakes, rounds=4, warm=1, steps=3)
    # each turn: one untimed step, then the median of three
    assert seconds == {name: [3.0, 7.0, 11.0, 15.0] for name in fakes}


def test_the_interval_keeps_rounds_together():
    slow_rounds = [1.0, 5.0, 2.0, 9.0, 3.0]
    assert ratio([2 * second for second in slow_rounds], slow_rounds) == pytest.approx((2.0, 2.0, 2.0))
    middle, low, high = ratio([3.0, 1.0, 2.0], [1.0, 2.0, 3.0])
    assert low < middle == 1.0 < high


def test_the_numbers_of_a_row():
    found = versus_torch.row("x", {"x": [0.010], "1b": [0.016], "torch 1F1B": [0.020]})
    assert found["normal"] == pytest.approx(10 / 9)  # 16 ms by two workers, and an eighth of it for the bubble
    assert found["overhead"] == pytest.approx(125)
    assert found["ratio"][0] == pytest.approx(0.5)


def test_an_unknown_name_is_refused():
    with pytest.raises(SystemExit, match=r"no contestant's name begins with .'troch'."):
        versus_torch.main(["--only", "troch"])


def test_what_was_started_is_closed_when_another_fails_to_start():
    class Broken(Fake):
        def start(self):
            raise ChildFailed("no")

    fakes = {"good": Fake(), "broken": Broken()}
    with pytest.raises(ChildFailed), started(fakes):
        pass
    assert [fake.closed for fake in fakes.values()] == [1, 1]


def test_a_child_is_pinned_and_tells_its_errors_and_ends_when_it_is_closed(child):
    child.ask("pinned")
    assert child.answer() == ([min(os.sched_getaffinity(0))], 1)
    child.ask("fail")
    with pytest.raises(ChildFailed, match=r"(?s)Answers failed.*ValueError: this is why"):
        child.answer()
    child.ask("pid")
    pid = child.answer()
    assert is_running(pid)  # and it is as good as before
    with within(4):
        child.close()
        assert not is_running(pid)


def test_a_child_that_dies_is_noticed_at_once(child):
    child.ask("pid")
    child.answer()
    with within(4), pytest.raises(ChildFailed, match="Answers died; its exit status is -9"):
        child.ask("die")
        child.answer()


def test_a_child_that_cannot_make_its_object_says_why():
    child = Child(min(os.sched_getaffinity(0)), refuse)
    try:
        with pytest.raises(ChildFailed, match="ValueError: not made"):
            child.ask("pid")
        child.ask("close")  # as who ends all contestants does, whatever has failed
        with within(5), pytest.raises(ChildFailed, match="'NoneType' object has no attribute 'close'"):
            child.answer()
    finally:
        child.close()


def test_the_command_on_empty_stages_runs(capsys):
    close_open_cluster()
    control.main(["--chunks", "4", "--rounds", "1", "--workers", "3", "--only", "torch GPipe", "pippy 1f1b"])
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("3 workers on ")
    assert [line.split()[:3] for line in lines] == [["torch", "GPipe", "4"], ["pippy", "1f1b", "4"]]
    cores = int(head.removeprefix("3 workers on ").split()[0])
    for line in lines:
        step, clock, _, of_all, processor = line.split()[3:]
        assert float(processor) > 0
        assert float(of_all) == pytest.approx(float(clock) / cores, abs=0.1)
        assert float(of_all) == pytest.approx(float(step) * 1e3 / (3 * 2 * 4), rel=0.01)


@pytest.mark.parametrize("name", ["1F1B", "ZBVZeroBubble"])
def test_empty_stages_are_trained(name):
    peer = torch_control(name, 4)
    with started({name: peer}):
        assert 0 < peer.step() < 10
        assert peer.loss() == -1.0
        # names repeat between stages: one of them is left
        assert [gradient.tolist() for gradient in peer.gradients().values()] == [[1.0]]


@pytest.mark.parametrize("again", [False, True])
def test_blocks_in_checkpoints_compute_their_forward_twice_and_the_same_gradients(again):
    part, (x, target) = gpt.part(TINY, 0, 1, again), gpt.batch(TINY)
    calls = []
    for block in part.blocks.values():
        block.norm1.register_forward_hook(lambda *_: calls.append(1))
    gpt.loss_fn(part(x), target).backward()
    assert len(calls) == TINY.layers * (2 if again else 1)
    plain = gpt.model(TINY)
    gpt.loss_fn(plain(x), target).backward()
    assert all(torch.equal(mine.grad, theirs.grad) for mine, theirs in zip(part.parameters(), plain.parameters()))


@pytest.mark.parametrize("name", ["tiny", "gpt2"])
def test_what_torch_compiles_and_what_pippy_compiles_stand_beside_each_other(name):
    names = list(compiled.entries(name))
    assert names[:3] == ["1b", "compiled 1b", versus_torch.RIVAL]
    assert names[3:5] == ["compiled torch 1F1B", "compiled torch ZBVZeroBubble"]
    assert {f"{word}pippy {each}" for word in ("", "graphs ", "compiled ") for each in compiled.SCHEDULES} == {
        *names[5:]
    }


def test_stages_that_torch_compiles_have_their_parameters_names(monkeypatch):
    monkeypatch.setattr("torch._functorch.config.donated_buffer", True)
    part = CompiledParts(torch_peer.GptParts(TINY))(0, 2)
    assert part._compiled_call_impl is not None and not torch._functorch.config.donated_buffer
    assert [*part.state_dict()] == [*gpt.part(TINY, 0, 2).state_dict()]
