"""The setup of a check: model shape, random weights, sizes and device.  A rehearsal is the same, tiny."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slotwise.compose.engine_builder import Loaded, Warming
from slotwise.compute.kernels.interface import Kernels
from slotwise.compute.kernels.select import choose
from slotwise.compute.model.decoder import Decoder
from slotwise.compute.model.family_table import tensor_shapes
from slotwise.compute.model.layers.rope import Llama3Rope
from slotwise.compute.model.model_config import ModelConfig
from slotwise.compute.model.weights import Read
from slotwise.core.params import SamplingSpec
from slotwise.core.request import RequestSpec
from slotwise.engine.config import EngineConfig
from slotwise.engine.messages import Add

DEVIATION = 0.02  # of the weights, as models are initialized


@dataclass(frozen=True, slots=True)
class Setup:
    """Sizes of one check."""

    device: str
    model: ModelConfig
    rows: tuple[int, ...]  # of decode steps
    context: int  # tokens
    decode_steps: int  # that count, for each number of rows
    prefill_tokens: int  # of one step
    prefill_steps: int
    num_requests: int  # of the mixed trace
    trace: tuple[str, str]  # lengths of its prompts and outputs
    product: int  # rows and columns of the large product
    copied: int  # bytes

    @property
    def longest(self) -> int:
        """The longest sequence, in tokens."""
        return self.prefill_tokens + 256

    def engine_config(self) -> EngineConfig:
        """Returns the config of the engine, the same for all parts."""
        return EngineConfig.of(
            model=self._folder(), device=self.device, max_num_seqs=max(self.rows), enable_prefix_caching=False,
            max_num_batched_tokens=self.prefill_tokens, max_model_len=self.longest, overlap=1)

    def _folder(self) -> str:
        """Returns a folder with the description of a checkpoint of this shape, without weights."""
        folder = Path(tempfile.gettempdir()) / f"slotwise-gpu-check-{self.model.hidden_size}"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(f"{self.model}\n")
        return str(folder)

    def prompt(self, length: int, seed: int) -> list[int]:
        """Returns random token ids."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(10, self.model.vocab_size, (length,), generator=generator).tolist()

    def request(self, number: int, num_prompt: int, num_output: int, seed: int) -> Add:
        """Returns a greedy request with exactly `num_output` tokens."""
        params = SamplingSpec(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        return Add(number, RequestSpec(self.prompt(num_prompt, seed), params, seed))


def _shape(hidden: int, intermediate: int, layers: int, heads: tuple[int, int, int], vocabulary: int,
           dtype: torch.dtype) -> ModelConfig:
    num_heads, num_kv_heads, head_dim = heads
    return ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate,
        num_layers=layers, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, norm_eps=1e-5,
        ropes=(Llama3Rope(500_000.0, 8.0, 1.0, 4.0, 8192),) * layers, max_position_embeddings=131_072,
        windows=(0,) * layers,
        tie_word_embeddings=False, eos_token_ids=(), dtype=dtype)


FULL = Setup(
    device="cuda", model=_shape(4096, 14_336, 32, (32, 8, 128), 128_256, torch.bfloat16),  # Llama-3.1-8B's
    rows=(1, 16, 64, 256), context=1024, decode_steps=40, prefill_tokens=8192, prefill_steps=6, num_requests=256,
    trace=("lognormal:128:0.9:1024", "lognormal:64:0.9:512"), product=8192, copied=4 << 30)
REHEARSAL = Setup(
    device="reference", model=_shape(64, 96, 2, (4, 2, 16), 512, torch.float32),
    rows=(1, 3, 6), context=24, decode_steps=6, prefill_tokens=48, prefill_steps=3, num_requests=8,
    trace=("lognormal:8:0.5:20", "lognormal:4:0.5:8"), product=64, copied=1 << 16)


def asked(description: str) -> Setup:
    """Returns the setup that the command line of a part selects."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rehearse", action="store_true", help="everything tiny, on the CPU")
    return REHEARSAL if parser.parse_args().rehearse else FULL


def load(setup: Setup, wrap: Callable[[Kernels], Kernels] = lambda kernels: kernels) -> Loaded:
    """Returns the model with random weights, made on the device."""
    kernels = wrap(choose(setup.device))
    ready = Warming(kernels, setup.model.dtype)
    decoder = Decoder(setup.model, random_weights(setup.model, kernels.device), kernels, setup.longest)
    return Loaded("random weights", setup.device, decoder, ready)


def random_weights(config: ModelConfig, device: torch.device) -> Read:
    """Returns a reader of random weights: normal, norms about one."""
    shapes = tensor_shapes(config)
    generator = torch.Generator(device).manual_seed(0)

    def read(*names: str) -> Tensor:
        size = list(shapes[names[0]])
        size[0] = sum(shapes[name][0] for name in names)
        mean = 1.0 if len(size) == 1 else 0.0
        return torch.empty(size, dtype=config.dtype, device=device).normal_(mean, DEVIATION, generator=generator)

    return read
