"""`--memory` of `pippy show` and `pippy compare`: what stages and workers hold, counted and not run."""

MODEL = """
from torch import nn

chain = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
"""
TARGET = "--loss torch.nn:MSELoss"


def test_what_stages_hold(pippy, tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    done = pippy(f"show model.py:chain --memory --num-stages 2 {TARGET} --input [16,64] --input [16,64]")
    rows = [line.split() for line in done.splitlines()]
    assert rows[0] == ["stage", "parameters", "gradients", "kept", "forward", "backward"]
    assert rows[2][:5] == ["submod_0", "32.5", "KiB", "32.5", "KiB"] and rows[-1][0] == "total"
    refused = pippy(f"show model.py:chain --memory --num-stages 2 {TARGET}", status=2)
    assert "give them, as in --input" in refused


def test_schedules_are_compared_by_memory(pippy, tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    done = pippy(f"compare -p 2 -m 4 --memory model.py:chain {TARGET} --example [64,64] --example [64,64]")
    rows = [line.split() for line in done.splitlines()]
    held = {row[0]: float(row[-2]) for row in rows if row and row[-1] == "KiB"}
    assert rows[0][-1] == "memory" and held["1f1b"] < held["fill_drain"]
    assert "target included: --example" in pippy(f"compare -p 2 -m 4 --memory model.py:chain {TARGET}", status=2)


def test_a_model_on_the_meta_device_is_shown_like_another(pippy, tmp_path):
    made = (
        "import torch\n"
        + MODEL
        + "\nwith torch.device('meta'):\n    meta = nn.Sequential(*map(type(chain[0]), [64] * 4, [64] * 4))\n"
    )
    (tmp_path / "model.py").write_text(made)
    inputs = f"--num-stages 2 {TARGET} --input [16,64] --input [16,64]"
    for options in ("--memory", "--format text"):
        shown = [pippy(f"show model.py:{name} {options} {inputs}") for name in ("chain", "meta")]
        assert shown[0] == shown[1] and "unknown" not in shown[0]
