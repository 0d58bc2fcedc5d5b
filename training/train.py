"""Trains the built-in model: a small Llama on one function of the standard library per document.

Documents of like length share a batch, so that each starts at position 0 and sees nothing but itself, as when it is
served. Hidden matrices are trained with Muon (Jordan et al. 2024), embeddings and norms with AdamW. The learning rate
warms up, stays, and falls linearly to zero over the last part of the run ("warmup-stable-decay", Hu et al. 2024,
MiniCPM): a run may be stopped before the decay and resumed with fewer `--steps`, and is then the run it would have
been with that number from the start. The decay sees only short, varied functions: a model this small falls into
repeating itself at low temperature, and is best weaned of it last.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from corpus import BEGIN, END, VOCABULARY, Document, read_documents, split, standard_library, train_tokenizer
from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

POOL = 2048  # documents sorted by length together
IGNORED = -100  # the target of padding
CHECKPOINT = "checkpoint.pt"
CHAT_TEMPLATE = (  # one Python file: system messages are comments, an answer continues what stands before it
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{%- if not loop.first and message['role'] != 'assistant' -%}{{- '\\n\\n\\n' -}}{%- endif -%}"
    "{%- if message['role'] == 'system' -%}{{- '# ' + message['content'] | trim | replace('\\n', '\\n# ') -}}"
    "{%- elif message['role'] == 'assistant' -%}{{- message['content'] -}}"
    "{%- else -%}{{- message['content'] | trim -}}{%- endif -%}"
    "{%- endfor -%}"
)


@dataclass(frozen=True)
class Recipe:
    """What decides the run; `microbatch` counts padded tokens."""

    steps: int = 800
    microbatch: int = 4096
    microbatches: int = 2
    library_repeats: int = 3
    learning_rate: float = 4e-3
    warmup: int = 40
    decay_part: float = 0.4
    weight_decay: float = 0.1
    short: int = 160  # tokens of the longest document of the decay
    seed: int = 20240607

    @property
    def decay_start(self) -> int:
        return round(self.steps * (1 - self.decay_part))

    def learning_rate_at(self, step: int) -> float:
        decay = (self.steps - step) / (self.steps - self.decay_start)
        return self.learning_rate * min(1.0, (step + 1) / self.warmup, decay)


def model_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )


def encode(tokenizer: Tokenizer, documents: list[Document]) -> list[list[int]]:
    """Token ids of each document, from its begin token to its end token."""
    end = tokenizer.token_to_id(END)
    return [[*encoding.ids, end] for encoding in tokenizer.encode_batch([document.text for document in documents])]


def weighted(documents: list[Document], recipe: Recipe) -> list[Document]:
    """The library proper several times, then its tests once."""
    library = [document for document in documents if not document.is_test]
    return library * recipe.library_repeats + [document for document in documents if document.is_test]


def microbatches(rows: list[list[int]], size: int, shuffle: random.Random) -> Iterator[torch.Tensor]:
    """Batches `[rows, tokens]` of at most `size` tokens, padded with IGNORED, each of rows of like length."""
    rows = shuffle.sample(rows, len(rows))
    for start in range(0, len(rows), POOL):
        pool = sorted(rows[start : start + POOL], key=len)
        batches: list[list[list[int]]] = [[]]
        for row in pool:
            if (len(batches[-1]) + 1) * len(row) > size:
                batches.append([])
            batches[-1].append(row)
        shuffle.shuffle(batches)
        for batch in batches:
            width = len(max(batch, key=len))
            yield torch.tensor([row + [IGNORED] * (width - len(row)) for row in batch])


def steps_over(rows: list[list[int]], recipe: Recipe, shuffle: random.Random) -> Iterator[list[torch.Tensor]]:
    """The microbatches of one step after another, for ever."""
    step: list[torch.Tensor] = []
    while True:
        for batch in microbatches(rows, recipe.microbatch, shuffle):
            step.append(batch)
            if len(step) == recipe.microbatches:
                yield step
                step = []


def training_stream(
    tokenizer: Tokenizer, documents: list[Document], recipe: Recipe
) -> Iterator[list[torch.Tensor]]:
    """The microbatches of each step: everything before the decay, short and varied functions in it."""
    shuffle = random.Random(recipe.seed)
    everything = encode(tokenizer, weighted(documents, recipe))
    yield from itertools.islice(steps_over(everything, recipe, shuffle), recipe.decay_start)
    varied = encode(tokenizer, weighted([document for document in documents if not document.is_repetitive], recipe))
    yield from steps_over([row for row in varied if len(row) <= recipe.short], recipe, shuffle)


def summed_loss(model: LlamaForCausalLM, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Cross-entropy in nats summed over the predicted tokens of `batch` [rows, tokens], and their number.

    Padding is on the right, where causal attention keeps it from every real token.
    """
    targets = batch[:, 1:]
    real = targets != IGNORED
    hidden = model.model(input_ids=batch[:, :-1].clamp(min=0)).last_hidden_state
    logits = model.lm_head(hidden[real])
    return torch.nn.functional.cross_entropy(logits, targets[real], reduction="sum"), int(real.sum())


@torch.inference_mode()
def held_out_loss(model: LlamaForCausalLM, rows: list[list[int]]) -> float:
    """Nats per token over `rows`."""
    results = [summed_loss(model, batch) for batch in microbatches(rows, 4096, random.Random(0))]
    return sum(float(loss) for loss, _ in results) / sum(count for _, count in results)


class Optimizers:
    """Muon for the hidden matrices, AdamW for everything else, at one learning rate."""

    def __init__(self, model: LlamaForCausalLM, recipe: Recipe) -> None:
        hidden = {name for name, tensor in model.named_parameters() if tensor.ndim == 2 and "embed" not in name}
        matrices = [tensor for name, tensor in model.named_parameters() if name in hidden]
        others = [tensor for name, tensor in model.named_parameters() if name not in hidden]
        self.both: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(matrices, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0),
        )

    def step(self, learning_rate: float) -> None:
        for optimizer in self.both:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.step()
            optimizer.zero_grad()

    def state_dict(self) -> list[dict]:
        return [optimizer.state_dict() for optimizer in self.both]

    def load_state_dict(self, states: list[dict]) -> None:
        for optimizer, state in zip(self.both, states, strict=True):
            optimizer.load_state_dict(state)


def save_model(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """A Hugging Face checkpoint in bfloat16, with tokenizer and chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = GenerationConfig(
        bos_token_id=0, eos_token_id=1, pad_token_id=1, do_sample=True, temperature=0.2, max_new_tokens=384
    )
    copy.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": END,
        "model_max_length": model.config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


@dataclass
class Progress:
    """What a resumed run has to remember besides the weights; `seconds` of stepping, evaluations included."""

    step: int
    tokens: int
    seconds: float
    curve: list[dict[str, float]]


def save_checkpoint(path: Path, model: LlamaForCausalLM, optimizers: Optimizers, progress: Progress) -> None:
    state = {"model": model.state_dict(), "optimizers": optimizers.state_dict(), "progress": asdict(progress)}
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def load_checkpoint(path: Path, model: LlamaForCausalLM, optimizers: Optimizers) -> Progress:
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizers.load_state_dict(state["optimizers"])
    return Progress(**state["progress"])


def write_record(folder: Path, recipe: Recipe, progress: Progress) -> None:
    record = {
        "recipe": asdict(recipe),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "tokens": progress.tokens,
        "seconds": round(progress.seconds),
        "curve": progress.curve,
    }
    (folder / "run.json").write_text(json.dumps(record, indent=1) + "\n")


def train_step(
    model: LlamaForCausalLM, optimizers: Optimizers, batches: list[torch.Tensor], learning_rate: float
) -> tuple[float, int]:
    """One update on the mean loss over `batches`; their summed loss in nats and their number of predicted tokens."""
    count = sum(int((batch[:, 1:] != IGNORED).sum()) for batch in batches)
    total = 0.0
    for batch in batches:
        loss, _ = summed_loss(model, batch)
        (loss / count).backward()
        total += float(loss.detach())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizers.step(learning_rate)
    return total, count


def train(
    model: LlamaForCausalLM, tokenizer: Tokenizer, recipe: Recipe, arguments: argparse.Namespace,
    training: list[Document], held_out: list[Document],
) -> None:
    """Steps to the end of the recipe; every `--every` steps writes a checkpoint, the model and the curve so far."""
    held_rows = encode(tokenizer, [document for document in held_out if not document.is_test])
    optimizers, progress = Optimizers(model, recipe), Progress(0, 0, 0.0, [])
    if arguments.resume:
        progress = load_checkpoint(arguments.out / CHECKPOINT, model, optimizers)
    stream = itertools.islice(training_stream(tokenizer, training, recipe), progress.step, None)
    bar = tqdm(range(progress.step, recipe.steps), initial=progress.step, total=recipe.steps, mininterval=10)
    recent_loss, recent_tokens, started = 0.0, 0, time.monotonic()
    for step, batches in zip(bar, stream, strict=False):
        loss, count = train_step(model, optimizers, batches, recipe.learning_rate_at(step))
        recent_loss, recent_tokens = recent_loss + loss, recent_tokens + count
        progress.step, progress.tokens = step + 1, progress.tokens + count
        bar.set_postfix(loss=recent_loss / recent_tokens, refresh=False)
        if progress.step % arguments.every == 0 or progress.step == recipe.steps:
            losses = {"training": recent_loss / recent_tokens, "held_out": held_out_loss(model, held_rows)}
            progress.curve.append({"step": progress.step, "tokens": progress.tokens, **losses})
            progress.seconds, started = progress.seconds + time.monotonic() - started, time.monotonic()
            recent_loss, recent_tokens = 0.0, 0
            bar.write(json.dumps(progress.curve[-1]))
            save_checkpoint(arguments.out / CHECKPOINT, model, optimizers, progress)
            save_model(model, tokenizer, arguments.out / "model")
            write_record(arguments.out, recipe, progress)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoint, curve and model")
    parser.add_argument("--stdlib", type=Path, default=standard_library(), help="folder of the standard library")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    arguments = parser.parse_args()
    recipe = Recipe(steps=arguments.steps)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(recipe.seed)
    training, held_out = split(read_documents(arguments.stdlib))
    arguments.out.mkdir(parents=True, exist_ok=True)
    train(LlamaForCausalLM(model_config()), train_tokenizer(training), recipe, arguments, training, held_out)


if __name__ == "__main__":
    main()
