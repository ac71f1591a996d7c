"""A draft that knows the answer, down to a chosen depth: random drafts are almost always rejected at once.

Shapes: B batch, S context, K block, H hidden, V vocabulary, L taps, N new tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from dflash_hf.modeling_dflash import Qwen3DFlashForDraft
from helpers import greedy, tiny_draft

# How many proposals are true: a number; a list, walked by the anchor's position; or a function of that position.
Depth = int | Sequence[int] | Callable[[int], int]


class OracleDraft(Qwen3DFlashForDraft):
    """A draft whose first `depth` proposals are the target's own next tokens, and whose next one is wrong.

    It reads its real inputs (tapped states, positions, block) to find out which of the told rows it is drafting for,
    and where, so wrong states, wrong positions or a wrong anchor are an error here, not a lower acceptance.
    """

    def tell(self, target: Any, rows: Sequence[torch.Tensor], depth: Depth) -> None:
        """Take the truth: unpadded token ids per row, continued further than will be generated, and what to say."""
        depths = [depth] if isinstance(depth, int) else depth
        self.depth_at = depths if callable(depths) else lambda position: depths[position % len(depths)]
        self.rows = [row.tolist() for row in rows]
        self.truth = [self._taps_of(target, row) for row in rows]  # (S + N, L * H) each

    @torch.no_grad()
    def _taps_of(self, target: Any, row: torch.Tensor) -> torch.Tensor:
        states = target(row[None], output_hidden_states=True, use_cache=False).hidden_states
        return torch.cat([states[tap + 1] for tap in self.config.target_layer_ids], dim=-1)[0]

    def embed_block(self, token_ids: torch.Tensor, target_embeddings: nn.Module) -> torch.Tensor:
        """As any draft; remembers the block."""
        assert (token_ids[:, 1:] == self.config.mask_token_id).all(), f"a block must hold masks only: {token_ids}"
        self.anchors = token_ids[:, 0].tolist()
        return super().embed_block(token_ids, target_embeddings)

    def forward(self, noise_embeds: torch.Tensor, context_hidden_states: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As any draft; works out the rows and the positions of the block."""
        position_ids = args[0] if args else kwargs.get("position_ids")
        batch_size, block_size = noise_embeds.shape[:2]
        cache = kwargs.get("cache")
        if position_ids is None:
            seen = 0 if cache is None else cache.get_seq_length()
            position_ids = torch.arange(seen, seen + context_hidden_states.shape[1] + block_size)[None]
        position_ids = position_ids.expand(batch_size, -1)
        self.places = [
            self._place(anchor, states, positions, block_size)
            for anchor, states, positions in zip(self.anchors, context_hidden_states, position_ids, strict=True)
        ]
        return super().forward(noise_embeds, context_hidden_states, *args, **kwargs)

    def _place(self, anchor: int, states: torch.Tensor, positions: torch.Tensor, block_size: int) -> tuple[int, int]:
        """The row and the anchor's position in it. All that the target has accepted so far is true, so it is found."""
        at, first = int(positions[-block_size]), int(positions[0])
        for number, (row, truth) in enumerate(zip(self.rows, self.truth, strict=True)):
            if at < len(row) and row[at] == anchor and torch.allclose(states[0], truth[first], rtol=1e-3, atol=1e-4):
                return number, at
        raise AssertionError(
            f"no told row has token {anchor} at position {at} and these states at position {first}: "
            "the draft was given a wrong anchor, wrong positions or wrong states"
        )

    def compute_logits(self, last_hidden_state: torch.Tensor, target_head: nn.Module) -> torch.Tensor:
        """(B, K - 1, V): sharply the true tokens down to the depth, then sharply a wrong one, then the draft's own."""
        logits = super().compute_logits(last_hidden_state, target_head)
        vocabulary = logits.shape[-1]
        for row_logits, (number, at) in zip(logits, self.places, strict=True):
            true = self.rows[number][at + 1 :]
            depth = self.depth_at(at)
            for slot in range(min(depth + 1, len(row_logits), len(true))):
                token = true[slot] if slot < depth else (true[slot] + 1) % vocabulary
                row_logits[slot] = row_logits[slot].clamp(-5, 5)
                row_logits[slot, token] = 15.0
        return logits


def oracle_draft(
    target: Any,
    input_ids: torch.Tensor,
    max_new_tokens: int,
    depth: Depth,
    *,
    attention_mask: torch.Tensor | None = None,
    block_size: int = 4,
    generate_kwargs: dict[str, Any] | None = None,
    **draft_fields: Any,
) -> OracleDraft:
    """An `OracleDraft` that knows the greedy continuation of these prompts (B, S), each computed alone, unpadded.

    `generate_kwargs` (a logits processor, say) shape the truth as they shape the generation under test.
    """
    draft = tiny_draft(target, block_size=block_size, draft_class=OracleDraft, **draft_fields)
    masks = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    prompts = [row[mask.bool()] for row, mask in zip(input_ids, masks, strict=True)]
    length = max_new_tokens + block_size  # a block may look beyond the end
    rows = [
        greedy(target, prompt[None], length, eos_token_id=None, **(generate_kwargs or {}))[0] for prompt in prompts
    ]
    draft.tell(target, rows, depth)
    return draft
