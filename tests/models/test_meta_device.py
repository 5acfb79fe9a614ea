"""Models of Hugging Face on the meta device: the workers initialize them as transformers does."""

import pytest
import torch

from pippy import PipelineDriver1F1B, pipeline
from tests.drivers.thread_cluster import thread_cluster

IDS = torch.arange(32).reshape(4, 8)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel  # a second, which only the process that runs it waits

    sizes = {"vocab_size": 32, "n_embd": 32, "n_head": 2, "n_layer": 3, "n_positions": 16, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "use_cache": False}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))


@pytest.mark.parametrize("make", [gpt2, llama])
def test_workers_initialize_a_model_of_hugging_face(make):
    with torch.device("meta"):
        model = make().double().eval()
    example = {"input_ids": IDS[:2].to("meta"), "labels": IDS[:2].to("meta")}
    plain, states = make().double().eval(), []
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    for stages in (1, 3):
        pipe = pipeline(model, split="parameters", num_stages=stages, example_kwargs=example)
        with thread_cluster(stages) as cluster:
            driver = PipelineDriver1F1B(pipe, cluster)
            driver.initialize(seed=0)
            states.append(driver.state_dict())
            driver.copy_to(plain)
            with torch.no_grad():
                loss = driver.run(2, input_ids=IDS, labels=IDS, outputs=False)
                torch.testing.assert_close(loss, plain(input_ids=IDS, labels=IDS).loss)
    assert [name for name, value in states[1].items() if not torch.equal(value, states[0][name])] == []
    for name, value in before.items():  # scaled where transformers scales: the projections of GPT-2 onto its residuals
        assert states[0][name].std().item() == pytest.approx(value.std().item(), rel=0.2, abs=1e-12), name
