"""The script that trains a GPT-2 runs, its loss falls, and is that of plain PyTorch."""

import re
from contextlib import nullcontext

import pytest
import torch

from tests.drivers.thread_cluster import thread_cluster
from tests.models.hugging_face import transformers


def test_the_loss_falls_and_is_that_of_plain_pytorch(monkeypatch, capsys, tmp_path):
    library = transformers()
    from exps import gpt2

    with thread_cluster(2) as threads:
        monkeypatch.setattr(gpt2, "cluster", lambda workers, **options: nullcontext(threads))
        words = f"--tiny --workers 2 --layers 2 --compare --steps 9 --every 4 --save {tmp_path}"
        gpt2.main(gpt2.options(words.split()))
    printed = capsys.readouterr().out
    losses = [(float(ours), float(plain)) for ours, plain in re.findall(r"loss (\S+), plain PyTorch (\S+)", printed)]
    assert len(losses) == 3 and losses[-1][0] < losses[0][0] - 1
    for ours, plain in losses:
        assert ours == pytest.approx(plain, abs=0.005)  # roundings of bfloat16
    assert float(re.search(r"held out: loss ([\d.]+)", printed)[1]) < losses[0][0] - 1
    assert printed.count("sample: The baker has") == 3
    assert library.GPT2LMHeadModel.from_pretrained(tmp_path).dtype == torch.bfloat16
