"""The models of the torchgpipe paper have its numbers of parameters, and U-Net's skips go straight to their stage."""

from collections import Counter

import pytest
import torch
from torch import nn

from exps import amoebanet, unet
from exps.seeds import layers
from exps.seeds.amoebanet_model import AmoebaNet
from exps.seeds.unet_model import UNet
from exps.seeds.wires import sent_bytes, value_bytes
from pippy import PipelineDriverFillDrain
from pippy.drivers.lowering.lower import lower
from pippy.drivers.schedules import make_schedule
from tests.drivers.thread_cluster import thread_cluster

BALANCE, CHUNKS = [13, 20, 20, 16], 2


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
    sent = {}
    with thread_cluster(4) as cluster:
        for threaded in (False, True):
            model.threaded = threaded
            pipe = layers.cut_into(model, BALANCE, unet.LOSS)
            driver = PipelineDriverFillDrain(pipe, cluster, checkpoint="except_last")
            before = bytes_sent(cluster)
            loss = driver.run(CHUNKS, x, target)
            torch.testing.assert_close((loss, driver.gradients()), expected)
            sent[threaded] = bytes_sent(cluster) - before
            program = lower(pipe, make_schedule("fill_drain", workers=4, chunks=CHUNKS)).program
            counted = sent_bytes(program, value_bytes(pipe, x[: len(x) // CHUNKS]))
            assert {wire: CHUNKS * count for wire, count in counted.items()} == sent[threaded]
            driver.close()
    assert sent[False][0, 3] and not sent[True][0, 3]
    assert sum(sent[False].values()) < sum(sent[True].values())


def bytes_sent(cluster):
    """What each worker has sent to each other."""
    threads = cluster.control.threads
    return Counter(
        {
            (source, to): count.bytes
            for source, worker in enumerate(threads)
            for to, count in worker.context.transport.sent.items()
        }
    )


def test_the_experiments_print_their_tables(capsys):
    unet.main(["--tiny", "wires", "speed", "links"])
    amoebanet.main(["--tiny", "speed"])
    printed = capsys.readouterr().out
    assert "times less: 1.97 (paper 1.97), of skips 2.29 (paper 2.29)" in printed
    assert all(name in printed for name in [*unet.SETTINGS, "n=8 m=32", "Table 1, 12 GB/s"])


def test_a_balance_of_another_number_of_layers_is_refused():
    with pytest.raises(ValueError, match=r"balance=\[1, 1\] has 2 layers, and the model 3"):
        layers.Layers([nn.ReLU()] * 3).cut([1, 1])
