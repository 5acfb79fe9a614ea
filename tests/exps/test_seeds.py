"""The models of the torchgpipe paper have its numbers of parameters, and U-Net's skips go straight to their stage."""

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from exps import amoebanet, unet
from exps.seeds import layers, steps
from exps.seeds.amoebanet_model import AmoebaNet
from exps.seeds.layer_costs import LayerCosts
from exps.seeds.memory import held
from exps.seeds.settings import Setting
from exps.seeds.unet_model import UNet
from exps.seeds.wires import recorded_bytes, sent_bytes, value_bytes
from pippy import PipelineDriver
from pippy.drivers.lowering.lower import lower
from tests.drivers.thread_cluster import thread_cluster


@pytest.mark.parametrize(
    ("model", "size", "count"),
    [
        (UNet, (6, 72), 362_157_516),
        (UNet, (11, 128), 2_213_834_176),
        (UNet, (24, 128), 4_993_859_008),
        (UNet, (24, 160), 7_802_903_600),
        (UNet, (48, 160), 15_822_206_000),
        (AmoebaNet, (18, 208), 81_505_540),
    ],
)
def test_the_published_numbers_of_parameters_come_out(model, size, count):
    published = (unet if model is UNet else amoebanet).PARAMETERS[size]
    found = layers.parameters(model(*size, device="meta"))
    assert (found, layers.printed(found)) == (count, published)


def test_straight_skips_save_what_portals_save_in_the_paper():
    straight, threaded = unet.portals(False), unet.portals(True)
    assert sum(sent_bytes(*threaded).values()) / sum(sent_bytes(*straight).values()) == pytest.approx(1.97, abs=0.005)
    assert unet.of_skips(*threaded) / unet.of_skips(*straight) == pytest.approx(2.29, abs=0.005)


def test_skips_across_four_stages_leave_the_numbers_as_they_are_and_send_the_bytes_that_were_counted(
    in_float64, seeded
):
    """Each level of the way down is in the first two stages, and what is joined to it is in the last two."""
    model = UNet(2, 4, levels=3, dropout=0.0)
    x, target = layers.pictures(4, 16), torch.rand(4, 1, 16, 16)
    loss = unet.LOSS(model(x), target)
    loss.backward()
    expected = loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}
    setting = Setting([13, 20, 20, 16], 2, "except_last")
    sent = {}
    with thread_cluster(4) as cluster:
        for threaded in (False, True):
            model.threaded = threaded
            pipe = layers.cut_into(model, setting.balance, unet.LOSS)
            driver = PipelineDriver(pipe, cluster, schedule=setting.program(), check=False)
            before = bytes_sent(cluster)
            with driver.record() as recording:
                loss = driver.run(setting.chunks, x, target)
            sent[threaded] = bytes_sent(cluster) - before
            torch.testing.assert_close((loss, driver.gradients()), expected)
            counted = sent_bytes(lower(pipe, setting.program()).program, value_bytes(pipe, x[:2]))
            assert {wire: setting.chunks * count for wire, count in counted.items()} == sent[threaded]
            assert recorded_bytes(recording.steps[-1]) == sent[threaded]
            driver.close()
    assert sent[False][0, 3] and not sent[True][0, 3]
    assert sum(sent[False].values()) < sum(sent[True].values())


def bytes_sent(cluster):
    """What each worker has sent to each other."""
    wires = enumerate(worker.context.transport.sent for worker in cluster.engine.workers)
    return Counter({(source, to): count.bytes for source, sent in wires for to, count in sent.items()})


def test_what_workers_hold_is_counted_of_a_model_without_data():
    batch = layers.pictures(4, 32), torch.rand(4, 1, 32, 32)
    model = UNet(2, 8, levels=3, device="meta")
    found = {mode: held(model, Setting([69], 4, mode), unet.LOSS, *batch)[0].peak for mode in ("never", "except_last")}
    assert {peak.parameters for peak in found.values()} == {4 * layers.parameters(model)}
    assert found["never"].kept == pytest.approx(4 * found["except_last"].kept, rel=1e-3)


def test_steps_that_really_run_are_printed_beside_the_simulated_ones(monkeypatch):
    batch = layers.pictures(4, 16), torch.rand(4, 1, 16, 16)
    settings = {"one": Setting([69], 1), "two": Setting([33, 36], 2, "except_last")}
    small = steps.Steps(lambda: UNet(2, 4, levels=3, dropout=0.0), unet.LOSS, batch)  # threads share random numbers
    monkeypatch.setattr(steps.Steps, "megabytes", lambda self, setting: [7.0] * setting.workers)
    with thread_cluster(2) as threads:
        monkeypatch.setattr(steps, "cluster", lambda workers, **options: nullcontext(threads))
        head, one, two = steps.steps_table(small, settings, LayerCosts([1.0] * 69, [2.0] * 69), rounds=2)
    assert one.split()[3:6] == ["1.000", "1.000", "1.00"] and one.split()[7:9] == ["0.0", "7"]
    assert float(two.split()[4]) == pytest.approx(2 * 207 / (36 * 4 + 36 * 6), abs=0.2)
    assert all(0 < float(each.split()[6]) <= 1.001 for each in (one, two)), (
        "a step takes as long as its passes, or longer"
    )
    assert float(two.split()[5]) > 1, "its forwards run twice"
    assert float(two.split()[7]) > 0 and two.split()[8:10] == ["7", "7"]
    assert len(one.split()) == 10 and len(two.split()) == 12


def test_the_experiments_print_their_tables(capsys):
    unet.main(["--tiny", "wires", "speed", "links"])
    amoebanet.main(["--tiny", "speed"])
    printed = capsys.readouterr().out
    assert "times less: 1.97 (paper 1.97), of skips 2.29 (paper 2.29)" in printed
    assert all(name in printed for name in [*unet.SETTINGS, "n=8 m=32", "Table 1, 12 GB/s"])


def test_a_balance_of_another_number_of_layers_is_refused():
    with pytest.raises(ValueError, match=r"balance=\[1, 1\] has 2 layers, and the model 3"):
        layers.Layers([nn.ReLU()] * 3).cut([1, 1])
