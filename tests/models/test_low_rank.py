"""LoRA by peft: frozen models with small parts that are trained, in all stages or in the last only."""

import pytest
import torch

from pippy import PipelineDriver, pipeline
from tests.comparisons import assert_same_gradient, twin
from tests.drivers.thread_cluster import thread_cluster
from tests.models.hugging_face import MODELS, WORDS

CASES = {
    "gpt2, last layer only": ("gpt2", ["c_attn"], [3], "1f1b", 2),
    "gpt2, directions and magnitudes": ("gpt2", ["c_attn"], None, "1f1b", 2),
    "llama": ("llama", ["q_proj", "v_proj"], None, "zb_h1", 3),
}


def low_rank(name, targets, layers, dora=False):
    peft = pytest.importorskip("peft", reason="peft is in the extra 'dev'")  # here, as its import takes a second
    model = MODELS[name].make()
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=targets, layers_to_transform=layers, init_lora_weights=False, use_dora=dora
    )
    return peft.get_peft_model(model, config).double()


@pytest.mark.parametrize("case", CASES)
def test_it_trains_as_the_plain_model(case):
    name, targets, layers, schedule, chunks = CASES[case]
    model, arguments = low_rank(name, targets, layers, dora="magnitudes" in case), MODELS[name].arguments()
    plain = twin(model)
    pipe = pipeline(model, num_stages=4, split="parameters", example_kwargs=arguments)
    assert pipe.num_stages == 4 and all("magnitude" in each for each in pipe.kept_whole)
    trained = [any(each.requires_grad for each in pipe.stage(index).parameters()) for index in range(4)]
    assert (trained == [False, False, False, True]) if layers else sum(trained) > 1

    torch.testing.assert_close(pipe(**arguments).loss, plain(**arguments).loss, rtol=1e-12, atol=0)
    plain(**arguments).loss.backward()
    for key, parameter in plain.named_parameters():
        assert_same_gradient(model.get_parameter(key).grad, parameter.grad, key)

    own = torch.optim.SGD([each for each in plain.parameters() if each.requires_grad], lr=0.1)
    with thread_cluster(4) as threads:
        driver = PipelineDriver(pipe, threads, schedule=schedule)
        optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
        for _ in range(2):
            optimizer.zero_grad(), own.zero_grad()
            expected = plain(**arguments).loss
            expected.backward()
            # These models compute their loss in float32, whatever they are in.
            found = driver.run(chunks, **arguments)["loss"]
            torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=0)
            for key, parameter in plain.named_parameters():
                gradient = driver.get_grad(key) if parameter.requires_grad else None
                assert (gradient is None) == (parameter.grad is None), key
                if gradient is not None:
                    torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5, atol=1e-8)
            optimizer.step(), own.step()
        if layers is None:
            ids = arguments["input_ids"]
            made = driver.generate(ids, max_new_tokens=4, eos_token_id=[])
            assert torch.equal(made, plain.eval().generate(input_ids=ids, max_new_tokens=4, eos_token_id=WORDS))
