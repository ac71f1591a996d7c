"""Tiny targets whose cache holds recurrent or convolution states, one of every family that Transformers has.

Shapes: B batch, S context.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers

from helpers import PAD, VOCABULARY, scramble

_BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "decoder_sparse_step": 1,
}
_MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
_GRANITE = {
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 16,
}
# In two families the step size's floor holds in the kernels for several tokens and not in those for one (see
# `test_recurrent.py`); so low, it never bites.
_NO_FLOOR = {"time_step_min": 1e-12}
_NEMOTRON = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 1,
    "conv_kernel": 4,
    "chunk_size": 8,
    "expand": 2,
    "hybrid_override_pattern": "M*M-",
}
_KIMI = {
    "num_key_value_heads": 4,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 16,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "linear_attn_config": {
        "kda_layers": [1, 2, 4],
        "full_attn_layers": [3],
        "head_dim": 8,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    },
}
_ZAMBA = {
    "mamba_d_state": 8,
    "mamba_ngroups": 1,
    "n_mamba_heads": 4,
    "mamba_headdim": 16,
    "chunk_size": 8,
    "layers_block_type": ["mamba", "hybrid", "mamba", "mamba"],
    "num_mem_blocks": 1,
}
_JAMBA = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
_LFM2 = {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "block_multiple_of": 8}

# Family -> configuration class, model class, and the fields that make it tiny.
HYBRIDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", _BASE | _DELTA | _EXPERTS),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _BASE | _DELTA),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", _BASE | _DELTA | _EXPERTS),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM", _BASE | _LFM2),
    "falcon_h1": ("FalconH1Config", "FalconH1ForCausalLM", _BASE | _MAMBA | {"mamba_d_ssm": 64}),
    "bamba": ("BambaConfig", "BambaForCausalLM", _BASE | _MAMBA | {"attn_layer_indices": [2]}),
    "granitemoehybrid": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", _BASE | _MAMBA | _GRANITE),
    "kimi_linear": ("KimiLinearConfig", "KimiLinearForCausalLM", _BASE | _KIMI),
    "mamba2": (
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "num_heads": 4,
            "head_dim": 16,
            "state_size": 8,
            "n_groups": 1,
            "expand": 2,
            "chunk_size": 8,
            "pad_token_id": PAD,
            "bos_token_id": 1,
            "eos_token_id": None,
        },
    ),
    "nemotron_h": ("NemotronHConfig", "NemotronHForCausalLM", _BASE | _NEMOTRON | _NO_FLOOR),
    "zamba2": ("Zamba2Config", "Zamba2ForCausalLM", _BASE | _ZAMBA | _NO_FLOOR),
    "jamba": ("JambaConfig", "JambaForCausalLM", _BASE | _JAMBA),
}


@cache
def hybrid_target(family: str, **overrides: Any) -> Any:
    """A tiny float64 hybrid with random weights, shared: do not change it."""
    config_name, model_name, fields = HYBRIDS[family]
    fields = fields | overrides
    torch.manual_seed(0)
    model = getattr(transformers, model_name)(getattr(transformers, config_name)(**fields))
    scramble(model, 0)
    if any("experts" in name for name in fields):
        model.set_experts_implementation("eager")  # the grouped kernel takes no float64
    model.generation_config.pad_token_id = PAD
    return model.to(torch.float64).eval()
