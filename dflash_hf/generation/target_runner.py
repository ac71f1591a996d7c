"""The target's side of a round: prefill, verification, rollback, and the tapped hidden states.

Everything model-specific goes through Transformers' own `prepare_inputs_for_generation` and `forward`; this file keeps
what one-by-one decoding would have kept in `model_kwargs`: attention mask, positions, token types, the cache.

Shapes: B batch, S cached tokens, W verified tokens (anchor and candidates), L taps, H hidden, V vocabulary.
"""

from collections.abc import Sequence
from threading import get_ident
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from .attention import grouped_queries
from .compat import CACHE_KEY, get_cache, hidden_states_request, layer_outputs
from .finished_rows import FinishedRows
from .ordering import in_order, real_first
from .recurrent import RecurrentStates, check_multi_token_forward
from .rollback import LINEAR, can_realign, free_columns, record_past, reorder_last
from .rope_limits import RopeLimits
from .row_layout import LeftAligned, RightAligned
from .target_cache import GrowingLayer, give_back, let_grow
from .tree import Tree

TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


class TargetRunner:
    """A target, its cache, and the tokens that cache stands for.

    Args:
        target: The model whose `generate` was called.
        target_layer_ids: Taps, 0-based layer outputs.
        generation_config: As prepared by `generate`.
        model_kwargs: As prepared by `generate`; not modified.
        capture_all: Whether the caller of `generate` asked for all hidden states.
    """

    def __init__(
        self,
        target: Any,
        target_layer_ids: Sequence[int],
        generation_config: Any,
        model_kwargs: dict[str, Any],
        capture_all: bool,
    ):
        self.target = target
        self.target_layer_ids = list(target_layer_ids)
        self.generation_config = generation_config
        self.model_kwargs = dict(model_kwargs)
        self.hidden_state_selection = True if capture_all else hidden_states_request(target_layer_ids)
        self.cache = get_cache(self.model_kwargs)
        position_ids = self.model_kwargs.get("position_ids")
        self.last_position = None if position_ids is None else position_ids[..., -1:]  # (B, 1) or (R, B, 1)
        self.recurrent: RecurrentStates | None = None
        self.rope_limits = RopeLimits.of(target)
        config = target.config.get_text_config(decoder=True)
        self.num_positions = getattr(config, "max_position_embeddings", 0)
        self.layout: RightAligned | LeftAligned  # of the cache, once there is a prompt in it
        self.finished: FinishedRows | None = None  # of a batch whose cache the caller will see

    def prefill(self, input_ids: torch.Tensor) -> tuple[Any, torch.Tensor, list[int], int]:
        """Run the prompt.

        Returns:
            The target's outputs; its taps (B, S, L * H), real tokens first in every row; the number of real tokens
            per row; and the number of tokens that the cache held before.
        """
        past = self._cached_length()
        chunks: list[torch.Tensor] = []
        thread = get_ident()

        def collect(module: Any, args: Any, output: Any) -> None:
            if get_ident() == thread:  # other threads may be generating with this target
                chunks.append(self.taps(output))

        if self.cache is not None:
            let_grow(self.cache)  # from the first token on, or the prompt would be copied
        lent = self.cache
        handle = self.target.register_forward_hook(collect)
        try:
            kwargs = {**self.model_kwargs, "output_hidden_states": self.hidden_state_selection}
            outputs = self.target._prefill(input_ids, self.generation_config, kwargs)
        finally:
            handle.remove()
        self.cache = get_cache(outputs)
        if lent is not None and lent is not self.cache:
            give_back(lent, True)
        if self.cache is None:
            raise ValueError(
                f"{type(self.target).__name__} returned no cache; drafting needs `use_cache=True` and a target that "
                "keeps its keys and values in a Transformers cache."
            )
        record_past(self.cache)
        taps = torch.cat(chunks, dim=1) if len(chunks) > 1 else chunks[0]
        mask = self.model_kwargs.get("attention_mask")  # (B, S)
        self.layout = RightAligned(self.target, self.cache, past + taps.shape[1], mask, len(taps))
        self.can_be_ragged = can_realign(self.cache)
        if any(isinstance(layer, LINEAR) for layer in self.cache.layers):
            self.recurrent = RecurrentStates(self.target, self.cache)
        let_grow(self.cache)
        if len(taps) > 1 and self.is_cache_seen and FinishedRows.can_store(self.cache):
            self.finished = FinishedRows(self.layout.padding)
        return outputs, *_unpadded(taps, mask), past

    @property
    def is_cache_seen(self) -> bool:
        """Whether the caller lent the cache, or will get it."""
        return bool(self.generation_config.return_dict_in_generate or getattr(self.cache, "_is_user_defined", False))

    def align_left(self) -> None:
        """Let the rows of a batch start in one column, so that none moves when they keep different numbers."""
        self.layout = LeftAligned(self.layout)

    def check_continues(self, anchors: torch.Tensor) -> None:
        """Refuse a recurrent target that cannot verify several tokens at once; `anchors` is (B, 1).

        Raises:
            ValueError: If several tokens at once give other logits than one at a time.
        """
        if self.recurrent is not None:
            check_multi_token_forward(self, anchors)

    def most_tokens(self) -> int | None:
        """How many tokens the next verification may hold; `None`: any number."""
        return self.rope_limits.width_at(max(self.layout.counts))

    def free_positions(self) -> int:
        """How many positions the target was made for lie behind those of the longest row."""
        return self.num_positions - max(self.layout.counts)

    def verify(self, block_ids: torch.Tensor, tree: Tree | None = None) -> Any:
        """Run anchor and candidates (B, W), a chain or a tree, behind the cache; logits (B, W, V)."""
        batch_size, width = block_ids.shape
        kwargs = {
            key: value for key, value in self.model_kwargs.items() if key not in ("attention_mask", "position_ids")
        }
        kwargs[CACHE_KEY] = self.cache
        kwargs["attention_mask"] = self.layout.mask(width, tree)
        if self.last_position is not None:
            device = self.last_position.device
            depth = torch.arange(width, device=device) if tree is None else tree.depths.to(device)
            kwargs["position_ids"] = self.last_position + 1 + depth
        self._extend_token_types(kwargs, batch_size, width)
        inputs = self.target.prepare_inputs_for_generation(block_ids, **kwargs)
        inputs["output_hidden_states"] = self.hidden_state_selection
        if "logits_to_keep" in inputs:  # some models set it themselves, to the one position that decoding needs
            inputs["logits_to_keep"] = width
        if self.recurrent is not None:
            self.recurrent.save()
        try:
            with grouped_queries():
                outputs = self.target(**inputs, return_dict=True)
        except BaseException:
            self._take_back_unfinished()
            raise
        self.layout.length += width
        return outputs

    def taps(self, outputs: Any, count: int | None = None, order: torch.Tensor | None = None) -> torch.Tensor:
        """The tapped layer outputs of a forward, concatenated, of its first `count` tokens: (B, count, L * H).

        `order` (B, W) says in which order they count: a tree's kept path first.
        """
        return tapped_states(self.target, outputs, self.target_layer_ids, count, order)

    def keep(self, counts: Sequence[int], width: int, order: torch.Tensor | None = None) -> None:
        """Keep the first `counts[b]` of the `width` tokens of the last verification, of every row.

        `order` (B, W) says in which order they count: a tree's kept path first.
        """
        if order is not None:
            reorder_last(self.cache, order[:, : max(counts)], width)
        if self.recurrent is not None:
            self.recurrent.keep(counts, width)
        self.layout.keep(counts, width)
        if self.last_position is not None:
            if min(counts) == max(counts):
                self.last_position = self.last_position + counts[0]
            else:
                added = torch.tensor(counts, device=self.last_position.device)[:, None]
                self.last_position = self.last_position + added

    def restore_rows(self) -> None:
        """Give the caller's cache the rows back that have left it."""
        if self.finished is not None:
            self.finished.restore(self.cache, self.layout.spans, self.layout.counts)

    def close(self) -> None:
        """Leave no trace on the target and its cache, which stands for all tokens but the last."""
        if self.recurrent is not None:
            self.recurrent.close()
        if self.cache is None:
            return
        give_back(self.cache, self.is_cache_seen and self.finished is None)
        for layer in self.cache.layers:
            if getattr(layer, "record_past", False):
                layer.record_past = False

    def select_rows(self, rows: Sequence[int], anchors: torch.Tensor | None = None) -> None:
        """Let the other rows leave: they are neither verified nor stored from now on.

        Args:
            rows: Those that stay.
            anchors: The last tokens of all rows, (B, 1), which the cache does not hold yet; `None` if no row that
                leaves can be outrun by another.
        """
        if self.finished is not None:
            self._store_finished(rows, anchors)
        index = torch.tensor(rows, device=self.target.device)
        if self.last_position is not None:
            self.last_position = self.last_position.index_select(-2, index.to(self.last_position.device))
        for key in TOKEN_TYPES:
            if (types := self.model_kwargs.get(key)) is not None:
                self.model_kwargs[key] = types[index.to(types.device)]
        self.layout.select_rows(rows)

    def _store_finished(self, staying: Sequence[int], anchors: torch.Tensor | None) -> None:
        """Keep what the caller's cache shall have of the rows that leave, their last tokens included."""
        leaving = [row for row in range(len(self.layout.counts)) if row not in staying]
        self.finished.store(self.cache, leaving, self.layout.spans, self.layout.counts)
        if anchors is not None:
            self.store_last_tokens(leaving, anchors)
        self.finished.select_rows(staying)

    def store_last_tokens(self, rows: Sequence[int], anchors: torch.Tensor) -> None:
        """Keep what the last tokens of some rows, among those of all rows (B, 1), add to the caller's cache."""
        if self.finished is not None and free_columns(self.cache):
            columns = self.layout.next_column
            self.verify(anchors)
            self.finished.store_last(self.cache, rows, columns)
            self.keep([0] * len(anchors), 1)

    def _take_back_unfinished(self) -> None:
        """A forward has failed somewhere, and the layers before have written: leave all as they were."""
        for layer in self.cache.layers:
            if type(layer) in (DynamicLayer, GrowingLayer) and layer.is_initialized:
                layer.crop(min(0, self.layout.length - layer.keys.shape[-2]))
        if self.recurrent is not None:
            self.recurrent.restore()

    def _extend_token_types(self, kwargs: dict[str, Any], batch_size: int, width: int) -> None:
        """Candidates are text: token types repeat the last one, multimodal types are zero (as `generate` does)."""
        for key in TOKEN_TYPES:
            types = kwargs.get(key)
            if types is not None:
                last = types[:, -1:] if key == "token_type_ids" else types.new_zeros(batch_size, 1)
                kwargs[key] = last.expand(-1, width)

    def _cached_length(self) -> int:
        if self.cache is None or all(self.cache.is_linear):
            return 0
        return int(self.cache.get_seq_length())


def _unpadded(taps: torch.Tensor, attention_mask: torch.Tensor | None) -> tuple[torch.Tensor, list[int]]:
    """Every row's real tokens first, as the draft's cache has them, and their numbers; `taps` (B, n, L * H)."""
    batch_size, num_tokens = taps.shape[:2]
    if attention_mask is None:
        return taps, [num_tokens] * batch_size
    real = attention_mask[:, -num_tokens:].bool()
    return real_first(taps, real), real.sum(dim=1).tolist()


def tapped_states(
    target: Any,
    outputs: Any,
    layer_ids: Sequence[int],
    count: int | None = None,
    order: torch.Tensor | None = None,
) -> torch.Tensor:
    """Concatenate the tapped layer outputs, (B, S, L * H), wherever the target's layers live.

    With `count`, those of the first `count` tokens, in turn or in an `order` (B, S).

    Raises:
        ValueError: If a layer's output is not one state per token.
    """
    num_layers = target.config.get_text_config(decoder=True).num_hidden_layers
    states = layer_outputs(outputs.hidden_states, layer_ids, num_layers)
    odd = next((state for state in states if state.dim() != 3), None)
    if odd is not None:
        raise ValueError(
            f"The layers of {type(target).__name__} put out several streams per token, {tuple(odd.shape)}, but "
            "a draft reads one hidden state per token, (batch, tokens, hidden); generate without `assistant_model`."
        )
    if order is not None:
        states = [in_order(state, order[:, :count]) for state in states]
    return torch.cat([state[:, :count].to(states[0].device) for state in states], dim=-1)


__all__ = ["TargetRunner", "tapped_states"]
