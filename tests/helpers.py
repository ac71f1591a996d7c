"""Tiny seeded targets and drafts, and prompts for them: what the tests decode with.

Shapes: B batch, S context, V vocabulary, N new tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from dflash_hf.generation import tree, verification

ROOT = Path(__file__).resolve().parent.parent
# Test data beside the repository; continuous integration has it, a clone may not.
SHARED = ROOT.parent / "shared"
SHARED_DRAFT = SHARED / "data" / "smollm2-dflash-b8"
requires_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=f"needs the test data in {SHARED}")

VOCABULARY = 64
PAD = 0

_LLAMA_LIKE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MIXED_WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2}
_PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}

# Family -> model class, and the configuration that makes it tiny. A window of 6 is shorter than most test prompts, and
# longer than the default block; tests that need another one override it.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", _LLAMA_LIKE),
    "llama": ("Llama", _LLAMA_LIKE),
    "mistral": ("Mistral", _LLAMA_LIKE | {"sliding_window": 6}),
    "gemma3": ("Gemma3", _LLAMA_LIKE | _MIXED_WINDOWS | {"query_pre_attn_scalar": 8}),
    "gpt2": (
        "GPT2",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 32,
            "n_layer": 4,
            "n_head": 4,
            "n_positions": 1024,
            "tie_word_embeddings": False,
            "pad_token_id": PAD,
            "bos_token_id": 1,
            "eos_token_id": None,
        },
    ),
    "mixtral": ("Mixtral", _LLAMA_LIKE | _EXPERTS),
    "gpt_oss": ("GptOss", _LLAMA_LIKE | _EXPERTS | _MIXED_WINDOWS | _PLAIN_ROPE),
}
_CLASSES = {
    "GPT2": ("GPT2Config", "GPT2LMHeadModel"),
    "Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
}


def tiny_target(family: str = "qwen3", *, seed: int = 0, dtype: torch.dtype = torch.float64, **overrides: Any) -> Any:
    """A causal language model of a family with random weights whose greedy text depends on all of its context."""
    name, fields = FAMILIES[family]
    config_name, model_name = _CLASSES.get(name, (f"{name}Config", f"{name}ForCausalLM"))
    torch.manual_seed(seed)
    model = getattr(transformers, model_name)(getattr(transformers, config_name)(**(fields | overrides)))
    scramble(model, seed)
    if "num_local_experts" in fields:
        model.set_experts_implementation("eager")  # the grouped kernel takes no float64
    model.generation_config.pad_token_id = PAD
    return model.to(dtype).eval()


@torch.no_grad()
def scramble(model: nn.Module, seed: int, gain: float = 1.5) -> None:
    """Fill every parameter from a seed: matrices by their fan-in, norms and biases away from ones and zeros.

    Fresh weights (0.02) make a target that repeats one token whatever it reads, and norms of ones hide a norm that was
    left out.
    """
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
            if isinstance(module, nn.Embedding):
                parameter.copy_(noise / getattr(module, "scalar_embed_scale", 1.0))  # else Gemma's hides the layers
            elif parameter.dim() >= 2 and "bias" not in name:
                fan_in = parameter.shape[0] if type(module).__name__ == "Conv1D" else parameter.shape[-1]
                parameter.copy_(noise * gain / fan_in**0.5)
            else:
                parameter.add_(noise, alpha=0.2)


def tiny_draft(
    target: PreTrainedModel,
    *,
    block_size: int = 4,
    target_layer_ids: Sequence[int] = (0, 2),
    seed: int = 1,
    dtype: torch.dtype | None = None,
    draft_class: Any = None,
    **fields: Any,
) -> Any:
    """A random draft for a target: 2 layers, taps after the target's layers 0 and 2, `fields` go to `DFlashConfig`."""
    from dflash_hf.configuration_dflash import DFlashConfig
    from dflash_hf.modeling_dflash import Qwen3DFlashForDraft

    text = target.config.get_text_config()
    config = DFlashConfig(
        **{
            "block_size": block_size,
            "mask_token_id": text.vocab_size - 1,
            "target_layer_ids": list(target_layer_ids),
            "num_target_layers": text.num_hidden_layers,
            "vocab_size": text.vocab_size,
            "hidden_size": text.hidden_size,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 1024,
            **fields,
        }
    )
    torch.manual_seed(seed)
    draft = (draft_class or Qwen3DFlashForDraft)(config)
    scramble(draft, seed)
    return draft.to(dtype or target.dtype).eval()


def random_prompt(length: int, *, batch_size: int = 1, seed: int = 0, vocabulary: int = VOCABULARY) -> torch.Tensor:
    """Token ids (B, S), none of them the padding, none the mask token of `tiny_draft`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, vocabulary - 1, (batch_size, length), generator=generator)


def left_padded(prompts: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask`, (B, longest), of one-dimensional prompts of different lengths."""
    longest = max(len(prompt) for prompt in prompts)
    missing = [longest - len(prompt) for prompt in prompts]
    rows = [torch.cat([prompt.new_full((gap,), PAD), prompt]) for gap, prompt in zip(missing, prompts, strict=True)]
    masks = [torch.arange(longest) >= gap for gap in missing]
    return {"input_ids": torch.stack(rows), "attention_mask": torch.stack(masks).long()}


@contextmanager
def as_on_accelerator() -> Iterator[None]:
    """Let tensors pass for a device's, where looking at one means to wait; on a CPU the code looks more often."""
    with ExitStack() as patches:
        for module in (tree, verification):
            patches.enter_context(patch.object(module, "is_on_host", lambda tensor: False))
        yield


on_every_device = pytest.mark.parametrize("device", [nullcontext, as_on_accelerator], ids=["cpu", "accelerator"])


def greedy(target: Any, input_ids: torch.Tensor, max_new_tokens: int, **kwargs: Any) -> torch.Tensor:
    """What the target alone says: (B, S + N) token ids of plain greedy `generate`."""
    return target.generate(input_ids, max_new_tokens=max_new_tokens, do_sample=False, **kwargs)
