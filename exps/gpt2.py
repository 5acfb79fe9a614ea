"""Trains a GPT-2 of Hugging Face on workers, as a whole script: bfloat16, clipping, a schedule of learning rates, evaluation,
a checkpoint, samples.

Question: what changes in a script of plain PyTorch, and does it train what plain PyTorch trains?
Command:  python exps/gpt2.py; with --compare beside plain PyTorch, with --tiny in seconds; --help has the sizes
Finding:  five lines change: `pipeline`, the cluster, the driver, the optimizer that the driver makes, and `driver.run` in the
          place of the model's call and of `backward`. exps/README.md has figures.
          In float32 the losses are those of plain PyTorch; in bfloat16 roundings differ, and grow.
"""

import argparse
import random
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup, logging

from pippy import PipelineDriver1F1B, cluster, pipeline

TINY = {
    "lines": 40, "layers": 4, "width": 32, "heads": 2, "length": 32, "batch": 8, "chunks": 2, "steps": 20, "lr": 1e-2
}  # fmt: skip
PEOPLE = "baker miller sailor weaver smith farmer painter doctor".split()
THINGS = "apples candles baskets letters ropes lamps stones coins".split()
NUMBERS = "no one two three four five six seven eight nine ten eleven twelve".split()
NEW_LINE = ord("\n")


def made_text(lines: int) -> bytes:
    """Lines of some 75 bytes, the same in each run. Each is a story, whose last number must be calculated."""
    chance = random.Random(0)
    text = ""
    for _ in range(lines):
        (giver, taker), thing = chance.sample(PEOPLE, 2), chance.choice(THINGS)
        had = chance.randint(1, 12)
        gives = chance.randint(1, had)
        text += f"The {giver} has {NUMBERS[had]} {thing}, gives {NUMBERS[gives]} to the {taker} "
        text += f"and keeps {NUMBERS[had - gives]}.\n"
    return text.encode()


def in_rows(text: bytes, length: int) -> torch.Tensor:
    """The text as rows of so many tokens, without the rest at its end. A token is a byte."""
    return torch.tensor(list(text[: len(text) // length * length])).view(-1, length)


def made_model(given: argparse.Namespace) -> GPT2LMHeadModel:
    """A GPT-2 for bytes. Without dropout, plain PyTorch trains the same: random numbers are drawn on the workers."""
    config = GPT2Config(
        vocab_size=256, n_layer=given.layers, n_embd=given.width, n_head=given.heads, n_positions=given.length,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        bos_token_id=NEW_LINE, eos_token_id=NEW_LINE, pad_token_id=NEW_LINE,
    )  # fmt: skip
    return GPT2LMHeadModel(config).to(getattr(torch, given.dtype))


def evaluate(driver: PipelineDriver1F1B, rows: torch.Tensor, given: argparse.Namespace) -> str:
    """The loss of held-out text, and the share of its bytes that the model guesses right."""
    driver.eval()
    losses, right = [], []
    with torch.no_grad():
        for ids in rows[: len(rows) // given.batch * given.batch].split(given.batch):
            result = driver.run(given.chunks, input_ids=ids, labels=ids)  # all that the model returns
            losses.append(result.loss)
            right.append((result.logits[:, :-1].argmax(-1) == ids[:, 1:]).float().mean())
    driver.train()
    return f"loss {torch.stack(losses).mean():.4f}, {torch.stack(right).mean():.0%} of the bytes guessed right"


def train(
    driver: PipelineDriver1F1B, training: torch.Tensor, held_out: torch.Tensor, given: argparse.Namespace
) -> None:
    """Train on random rows, and print losses; with --compare, those of plain PyTorch too."""
    optimizer = driver.instantiate_optimizer(torch.optim.AdamW, lr=given.lr, master_dtype=torch.float32)
    rates = get_cosine_schedule_with_warmup(optimizer, given.steps // 10, given.steps)
    plain = Plain(given) if given.compare else None
    began = time.perf_counter()
    for step in range(given.steps):
        ids = training[torch.randint(len(training), (given.batch,))]
        loss = driver.run(
            given.chunks, input_ids=ids, labels=ids, outputs=False
        )  # the loss alone: logits stay where they are
        driver.clip_grad_norm_(1.0)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        expected = "" if plain is None else f", plain PyTorch {plain.step(ids):.4f}"
        if step % given.every == 0 or step == given.steps - 1:
            print(f"step {step}: loss {loss:.4f}{expected}", flush=True)
    print(f"{(time.perf_counter() - began) / given.steps:.2f} s a step\nheld out: {evaluate(driver, held_out, given)}")


class Plain:
    """The same training in plain PyTorch: micro-batches one by one, and an optimizer that updates float32 copies."""

    def __init__(self, given: argparse.Namespace) -> None:
        torch.manual_seed(0)  # the same parameters
        self.model, self.chunks = made_model(given), given.chunks
        self.copies = [parameter.detach().clone().float() for parameter in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.copies, lr=given.lr)
        self.rates = get_cosine_schedule_with_warmup(self.optimizer, given.steps // 10, given.steps)

    def step(self, ids: torch.Tensor) -> float:
        """One step; gives the loss."""
        total = 0.0
        for part in ids.tensor_split(self.chunks):
            loss = self.model(input_ids=part, labels=part).loss * (len(part) / len(ids))
            loss.backward()
            total += loss.item()
        for copy, parameter in zip(self.copies, self.model.parameters()):
            assert parameter.grad is not None
            copy.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.copies, 1.0)
        self.optimizer.step()
        self.rates.step()
        with torch.no_grad():
            for copy, parameter in zip(self.copies, self.model.parameters()):
                parameter.copy_(copy)
        return total


def print_samples(driver: PipelineDriver1F1B, length: int) -> None:
    """Lines as the model goes on, with the most likely byte at each place, and by chance."""
    prompt = torch.tensor([list(b"The baker has ")])
    for by_chance in (False, True):
        made = driver.generate(prompt.repeat(2, 1), max_new_tokens=length - prompt.size(1), do_sample=by_chance)
        for line in made[: 1 + by_chance]:
            print(f"sample: {bytes(line.tolist()).decode(errors='replace').strip()}")


def main(given: argparse.Namespace) -> None:
    """Cut the model, train it, save it, and print what it writes."""
    logging.set_verbosity_error()
    torch.manual_seed(0)
    model = made_model(given)
    text = made_text(given.lines)
    border = len(text) * 9 // 10
    training, held_out = in_rows(text[:border], given.length), in_rows(text[border:], given.length)
    example = training[: given.batch // given.chunks]  # one micro-batch
    pipe = pipeline(model, num_stages=given.workers, example_kwargs={"input_ids": example, "labels": example})
    print(pipe.balance)
    with cluster(given.workers, threads=given.threads) as workers:
        driver = PipelineDriver1F1B(pipe, workers)
        train(driver, training, held_out, given)
        print_samples(driver, given.length)
        driver.copy_to(model)
    if given.save:
        model.save_pretrained(given.save)


def options(words: list[str] | None = None) -> argparse.Namespace:
    """The sizes, from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4, help="as many stages, too")
    parser.add_argument("--threads", type=int, help="of each worker; by default the cores are divided")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--compare", action="store_true", help="train in plain PyTorch, too")
    parser.add_argument("--save", metavar="FOLDER", help="for GPT2LMHeadModel.from_pretrained")
    parser.add_argument("--tiny", action="store_true", help="a small model and few steps")
    sizes = {
        "lines": 4000, "layers": 8, "width": 64, "heads": 4, "length": 128, "batch": 16, "chunks": 4, "steps": 300, "every": 20
    }  # fmt: skip
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--lr", type=float, default=3e-3)
    if parser.parse_args(words).tiny:
        parser.set_defaults(**TINY)
    return parser.parse_args(words)


if __name__ == "__main__":
    main(options())
