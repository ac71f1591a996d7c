"""Qwen3DFlashForDraft: a small bidirectional model that fills a block of tokens in one forward (arXiv 2602.06036).

What DFlash changes in a Qwen3 decoder, and all that is written here by hand:

* fusion: `C = hidden_norm(fc([H^l1; ...; H^lL]))`, the target's tapped layer outputs as one context (section 3.2);
* KV injection: in every layer, queries come from the block, keys and values from `[C; block]`, through the same
  projections; C is the same tensor at every layer and has no output of its own;
* positions: keys are rotated at all their positions, queries at the last K of them;
* visibility: full layers see everything, sliding layers their window; see `visible_keys`.

The token embedding and the language-model head are the target's, passed in by the caller, unless the draft was
published with its own. Parts that only some drafts have are in `modeling_dflash_heads`.

Shapes: B batch, S context, K block, H hidden, V vocabulary, L taps, N heads, D head size, T keys in view.
"""

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3MLP,
    Qwen3PreTrainedModel,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)

from .configuration_dflash import DFlashConfig
from .generation import (
    CACHE_KEY,
    DraftCache,
    DraftProtocol,
    DraftRepository,
    install_hook,
    to_attention_mask,
    visible_keys,
)
from .modeling_dflash_heads import (
    CandidateSelector,
    ConfidenceHead,
    GroupedDynamicCausalConv,
    MarkovHead,
    with_sinks,
)


def apply_rotary_pos_emb(
    queries: torch.Tensor, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate keys (B, N, S + K, D) at all positions and queries (B, N, K, D) at the last K of them.

    The block sits behind the context, so its first query is at position S, not 0. Rotated at 0..K-1, a query would
    take the keys of the prompt for its neighbours; nothing would fail, acceptance would only fall.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # (B, 1, S + K, D)
    block_size = queries.shape[-2]
    query_cos, query_sin = cos[..., -block_size:, :], sin[..., -block_size:, :]
    return queries * query_cos + rotate_half(queries) * query_sin, keys * cos + rotate_half(keys) * sin


class DraftRotaryEmbedding(Qwen3RotaryEmbedding):
    """Qwen3's rotary embedding, whose frequencies stay float32 when the draft is cast.

    `draft.to(torch.bfloat16)` would round them by up to 0.4 %, which at position 1000 is a turn of a radian and more:
    nothing would fail, acceptance would only fall the further the text goes.
    """

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        exact = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            moved = getattr(self, name)
            if moved.dtype != buffer.dtype:
                setattr(self, name, buffer.to(moved.device))
        return self


class Qwen3DFlashAttention(Qwen3Attention):
    """Attention of the block over `[context; block]` (paper, section 3.2, "KV injection")."""

    def __init__(self, config: DFlashConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.is_causal = config.layer_is_causal(layer_idx)
        self.value_scale = config.attention_value_scale
        self.sinks = nn.Parameter(torch.zeros(config.num_attention_heads)) if config.attention_sinks else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        context: torch.Tensor | None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: Any = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from the block (B, K, H) to the cached context, the new context (B, S, H) and the block itself."""
        batch_size, block_size = hidden_states.shape[:-1]
        sources = hidden_states if context is None else torch.cat([context, hidden_states], dim=1)  # (B, S + K, H)
        heads = (batch_size, -1, self.head_dim)
        queries = self.q_norm(self.q_proj(hidden_states).view(batch_size, block_size, *heads[1:])).transpose(1, 2)
        keys = self.k_norm(self.k_proj(sources).view(*sources.shape[:2], *heads[1:])).transpose(1, 2)
        values = self.v_proj(sources).view(*sources.shape[:2], *heads[1:]).transpose(1, 2)
        if self.value_scale is not None:
            values = values * self.value_scale
        queries, keys = apply_rotary_pos_emb(queries, keys, *position_embeddings)
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_idx)
        if self.sinks is not None:
            if self.config._attn_implementation in ("eager", "sdpa"):
                keys, values, attention_mask = with_sinks(keys, values, attention_mask, self.sinks, block_size)
            else:
                kwargs["s_aux"] = self.sinks
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(
            self,
            queries,
            keys,
            values,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        return self.o_proj(output.reshape(batch_size, block_size, -1)), weights


class Qwen3DFlashDecoderLayer(GradientCheckpointingLayer):
    """A Qwen3 decoder layer whose attention also reads the target's context."""

    def __init__(self, config: DFlashConfig, layer_idx: int):
        super().__init__()
        self.self_attn = Qwen3DFlashAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        has_convolutions = config.conv_kernel_size is not None
        self.attention_conv = GroupedDynamicCausalConv(config) if has_convolutions else None
        self.mlp_conv = GroupedDynamicCausalConv(config) if has_convolutions else None

    def forward(
        self, hidden_states: torch.Tensor, context: torch.Tensor | None, **attention_kwargs: Any
    ) -> torch.Tensor:
        """(B, K, H) to (B, K, H). The context (B, S, H) enters unnormed: `hidden_norm` has been applied to it."""

        def attend(normed: torch.Tensor) -> torch.Tensor:
            return self.self_attn(normed, context, **attention_kwargs)[0]

        normed = self.input_layernorm(hidden_states)
        hidden_states = hidden_states + convolved(attend, normed, self.attention_conv)
        normed = self.post_attention_layernorm(hidden_states)
        return hidden_states + convolved(self.mlp, normed, self.mlp_conv)


def convolved(
    sublayer: Callable[[torch.Tensor], torch.Tensor], states: torch.Tensor, conv: GroupedDynamicCausalConv | None
) -> torch.Tensor:
    """A sublayer's output (B, K, H), convolved before and after where the draft has convolutions."""
    if conv is None:
        return sublayer(states)
    states, kernel = conv.prepare(states)
    return conv.finish(sublayer(states), kernel)


class Qwen3DFlashForDraft(DraftProtocol, DraftRepository, Qwen3PreTrainedModel):
    """A DFlash draft: reads tapped hidden states of a target, fills a block of masked positions in one forward.

    Pass it to the target: `target.generate(**inputs, assistant_model=draft)`. Drafting is steered by
    `draft.generation_config`: `num_assistant_tokens`, `assistant_confidence_threshold`, `draft_tree_budget`.

    Raises:
        ValueError: If the config lacks `mask_token_id` or `target_layer_ids`.
    """

    config_class = DFlashConfig
    base_model_prefix = "draft"
    main_input_name = "noise_embeds"
    _no_split_modules: ClassVar[list[str]] = ["Qwen3DFlashDecoderLayer"]

    def __init__(self, config: DFlashConfig):
        super().__init__(config)
        for field in ("mask_token_id", "target_layer_ids"):
            if getattr(config, field) is None:
                raise ValueError(
                    f"`{field}` is missing from the draft's config (got null); a draft cannot run without it, add "
                    "the value it was trained with."
                )
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(Qwen3DFlashDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = DraftRotaryEmbedding(config)
        self._add_optional_parts(config)
        self.generation_config = default_generation_config(config)
        self.post_init()

    def _add_optional_parts(self, config: DFlashConfig) -> None:
        """What only some published drafts have; attributes that a draft lacks are `None`."""
        hidden_size, vocab_size = config.hidden_size, config.vocab_size
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size) if config.own_embedding else None
        self.lm_head = None
        if config.own_head:
            self.lm_head = nn.Linear(hidden_size, config.draft_vocab_size or vocab_size, bias=False)
        if config.draft_vocab_size is not None:  # the target's id of each row of the head
            self.register_buffer("draft_token_ids", torch.arange(config.draft_vocab_size))
        self.mask_embedding = nn.Parameter(torch.zeros(hidden_size)) if config.own_mask_embedding else None
        self.tap_norms = None
        if config.tap_norms:
            norms = (Qwen3RMSNorm(hidden_size, eps=config.rms_norm_eps) for _ in config.target_layer_ids)
            self.tap_norms = nn.ModuleList(norms)
        self.candidate_selector = CandidateSelector(config) if config.selector_rank is not None else None
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.confidence_head else None

    def fuse(self, target_states: torch.Tensor) -> torch.Tensor:
        """The context C of all layers, (B, S, H), from the concatenated taps (B, S, L * H): `hidden_norm(fc(.))`."""
        if self.tap_norms is not None:
            taps = target_states.split(self.config.hidden_size, dim=-1)
            normed = [norm(tap) for norm, tap in zip(self.tap_norms, taps, strict=True)]
            target_states = torch.cat(normed, dim=-1)
        return self.hidden_norm(self.fc(target_states))

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict[str, Any] | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Denoise one block per row (paper, section 3.2).

        Args:
            noise_embeds: Embeddings of `[anchor, MASK, ..., MASK]`, (B, K, H).
            context_hidden_states: Concatenated taps of the positions new since the last call, (B, S, L * H).
            position_ids: Absolute positions of new context and block, (B, S + K). Default: they follow the cache.
            attention_mask: 1 for real, 0 for padded keys, (B, cached + S + K); or ready masks by layer type.
            cache: A `DraftCache`, or any Transformers cache that records its past.

        Returns:
            `last_hidden_state` (B, K, H), normed: ready for `compute_logits`.
        """
        if cache is None:  # under the name that Transformers' own DFlash path gives it in this version
            cache = kwargs.pop(CACHE_KEY, None)
        num_new = 0 if context_hidden_states is None else context_hidden_states.shape[1]
        if position_ids is None:
            start = cache.get_seq_length() if cache is not None else 0
            end = start + num_new + noise_embeds.shape[1]
            position_ids = torch.arange(start, end, device=noise_embeds.device)[None]
        context = None if context_hidden_states is None else self.fuse(context_hidden_states)
        if isinstance(attention_mask, dict):
            masks = attention_mask
        else:
            masks = self._attention_masks(noise_embeds, num_new, attention_mask, cache)
        position_embeddings = self.rotary_emb(noise_embeds, position_ids)  # cos, sin (B, S + K, D)
        hidden_states = noise_embeds
        for layer_idx, layer in enumerate(self.layers):
            hidden_states = layer(
                hidden_states,
                context,
                position_embeddings=position_embeddings,
                attention_mask=masks[self.config.layer_types[layer_idx]],
                cache=cache,
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), **{CACHE_KEY: cache})

    def _attention_masks(
        self,
        noise_embeds: torch.Tensor,
        num_new: int,
        attention_mask: torch.Tensor | None,
        cache: Any,
    ) -> dict[str, Any]:
        """One mask per layer type, `None` where a layer sees every key."""
        block_size = noise_embeds.shape[1]
        masks = {}
        for layer_type in dict.fromkeys(self.config.layer_types):
            layer_idx = self.config.layer_types.index(layer_type)
            window = self.config.sliding_window if layer_type == "sliding_attention" else None
            is_causal = self.config.layer_is_causal(layer_idx)
            layout = cache.layer_layouts[layer_idx] if isinstance(cache, DraftCache) else None
            if layout is not None:
                num_keys, valid = layout.num_columns, layout.valid
            else:
                past = cache.get_seq_length(layer_idx) if cache is not None else 0
                if window is not None and cache is not None:
                    past = min(past, window - 1)
                num_keys = past + num_new + block_size
                valid = None if attention_mask is None else attention_mask[:, -num_keys:].bool()
            if window is not None and num_keys <= window:
                window = None  # every key is within reach
            visible = None
            if window is not None or is_causal:
                positions = layout.positions() if layout else torch.arange(num_keys, device=noise_embeds.device)[None]
                queries = positions[:, -block_size:]
                visible = visible_keys(queries, positions, window, is_causal, self.config.window_from_anchor)
            if valid is not None:
                visible = valid[:, None, :] if visible is None else visible & valid[:, None, :]
                visible = visible.expand(-1, block_size, -1)
            masks[layer_type] = to_attention_mask(visible, self.config._attn_implementation, noise_embeds.dtype)
        return masks

    def new_cache(self, context_length: int | None = None) -> DraftCache:
        """An empty cache. Sliding layers keep their window; `context_length` bounds the full layers, too."""
        window = self.config.sliding_window
        keeps = [window - 1 if kind == "sliding_attention" else None for kind in self.config.layer_types]
        if context_length is not None:
            keeps = [context_length if keep is None else min(keep, context_length) for keep in keeps]
        return DraftCache(keeps)

    def embed_block(self, token_ids: torch.Tensor, target_embeddings: nn.Module) -> torch.Tensor:
        """Embed blocks of tokens (B, K) with the target's embedding module, (B, K, H).

        The module is called, its weight never read, so quantised and offloaded embeddings work. What the module adds
        to its table is undone where the draft was trained on the bare table: a norm always, a scale where
        `input_embedding_scale` is set. A draft with a table of its own embeds with that.
        """
        if self.embed_tokens is not None:
            embeds = self.embed_tokens(token_ids) * (self.config.input_embedding_scale or 1.0)
        else:
            embeds = self._embed_with(target_embeddings, token_ids)
        if self.mask_embedding is None:
            return embeds
        is_mask = (token_ids == self.config.mask_token_id)[..., None]
        return torch.where(is_mask, self.mask_embedding.to(embeds), embeds)

    def _embed_with(self, target_embeddings: nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
        bare = target_embeddings
        if getattr(bare, "embed_norm", None) is not None:  # left out of a copy: other threads may be embedding with it
            bare = copy.copy(target_embeddings)
            bare._modules = {**target_embeddings._modules, "embed_norm": nn.Identity()}
        embeds = bare(token_ids)
        if self.config.input_embedding_scale is None:
            return embeds
        return embeds * (self.config.input_embedding_scale / getattr(target_embeddings, "embed_scale", 1.0))

    def slot_states(self, last_hidden_state: torch.Tensor) -> torch.Tensor:
        """The states that proposals are made from, (B, P, H): all K slots, or all but the anchor's."""
        return last_hidden_state if self.config.slots_predict_next else last_hidden_state[:, 1:]

    def compute_logits(self, last_hidden_state: torch.Tensor, target_head: nn.Module) -> torch.Tensor:
        """Logits of the proposals over the target's vocabulary, (B, P, V), from the block's states (B, K, H).

        Tokens that the draft's own head leaves out get minus infinity. With `config.proposes_stepwise` these are the
        logits that `step_logits` starts from.
        """
        # Contiguous: of a slice, the head would be a batched product with a copy of its weight for every block.
        states = self.slot_states(last_hidden_state).contiguous()
        logits = target_head(states) if self.lm_head is None else self.lm_head(states.to(self.lm_head.weight))
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        if cap := self.config.final_logit_softcapping:
            logits = cap * torch.tanh(logits / cap)
        return self._over_whole_vocabulary(logits, -torch.inf)

    def step_logits(
        self, logits: torch.Tensor, last_hidden_state: torch.Tensor, previous_ids: torch.Tensor
    ) -> torch.Tensor:
        """Logits of the next proposal, (B, V), given those chosen before it in this block.

        Args:
            logits: Of all slots, from `compute_logits`, (B, P, V).
            last_hidden_state: Of the block, (B, K, H).
            previous_ids: The anchor and the i proposals chosen so far, (B, i + 1); i below P.
        """
        slot = previous_ids.shape[1] - 1
        slot_logits, previous_ids = logits[:, slot].to(self.device), previous_ids.to(self.device)
        states = self.slot_states(last_hidden_state)[:, : slot + 1].to(device=self.device, dtype=self.dtype)
        if self.candidate_selector is not None:
            return self.candidate_selector(slot_logits, states[:, -1], previous_ids[:, -1])
        if self.markov_head is None:
            return slot_logits
        bias = self.markov_head(states, previous_ids)
        return slot_logits + self._over_whole_vocabulary(bias, 0.0).to(slot_logits.dtype)

    def predict_confidence(
        self, last_hidden_state: torch.Tensor, previous_ids: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Log-odds of acceptance per proposal, (B, P), from the block's states and the token before each, (B, P).

        `None` for a draft without a confidence head.
        """
        if self.confidence_head is None:
            return None
        features = self.slot_states(last_hidden_state).to(device=self.device, dtype=self.dtype)
        if self.config.confidence_head_with_markov:
            features = torch.cat([features, self.markov_head.markov_w1(previous_ids.to(self.device))], dim=-1)
        return self.confidence_head(features)

    def _over_whole_vocabulary(self, scores: torch.Tensor, elsewhere: float) -> torch.Tensor:
        """Scores (..., V) from those of the draft's reduced vocabulary, `elsewhere` for tokens that it leaves out."""
        if self.config.draft_vocab_size is None:
            return scores
        whole = scores.new_full((*scores.shape[:-1], self.config.vocab_size), elsewhere)
        whole[..., self.draft_token_ids] = scores
        return whole

    @classmethod
    def can_generate(cls) -> bool:
        """`True`: a draft has a generation config, and `pipeline` gets as far as `generate`, which explains itself."""
        return True

    def generate(self, *args: Any, **kwargs: Any) -> None:
        """A draft cannot generate alone.

        Raises:
            ValueError: Always; it says how to use the draft.
        """
        raise ValueError(
            "A DFlash draft cannot generate alone: load its target and call `target.generate(**inputs, "
            "assistant_model=draft)`."
        )


def default_generation_config(config: DFlashConfig) -> GenerationConfig:
    """The knobs of drafting: propose the whole block, never cut it, and verify one chain."""
    generation_config = GenerationConfig(
        num_assistant_tokens=config.num_proposals,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    generation_config.draft_tree_budget = 0
    generation_config.draft_context_length = None
    return generation_config


install_hook()

__all__ = ["Qwen3DFlashForDraft"]
