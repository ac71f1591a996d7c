"""Watches a generation with a draft and writes down what each step of a round really saw, for `dflash-hf explain`.

Nothing of the loop is copied: its own objects are wrapped at the seams between its steps, and the draft's first layer
is hooked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..generation.decoding import DecodingLoop

Shape = tuple[int, ...]


@dataclass
class Round:
    """One round as it was observed. Positions are absolute, shapes those of the tensors that passed.

    Attributes:
        taps: Shape of the new context before fusion, (B, S, L * H).
        context: Shape of the fused context C, (B, S, H).
        new_positions: Positions of the new context, first and last.
        block_ids: Anchor and masks.
        block_embeds: Shape (B, K, H).
        block_positions: First and last position of the block.
        queries: Shape after `q_norm`, (B, K, N, D).
        projected_keys: Shape after `k_norm` of what was projected in this round, (B, S + K, G, D).
        keys: Shape of all keys the layer attends to, (B, G, T, D).
        layouts: Per layer, the positions of its T rows in their order: of those from the target's features, which come
            first, and of those from the block.
        attention: Weights of every layer, (N, K, T) each; empty unless the draft runs eager attention.
        logits: Of the proposals, (P, V).
        candidates: Proposed ids.
        target_logits: (P + 1, V).
        committed: Tokens that the round committed.
        target_length: Positions in the target's cache after the round.
        draft_length: Context positions in the draft's cache after the round.
    """

    taps: Shape = ()
    context: Shape = ()
    new_positions: tuple[int, int] = (0, 0)
    block_ids: list[int] = field(default_factory=list)
    block_embeds: Shape = ()
    block_positions: tuple[int, int] = (0, 0)
    queries: Shape = ()
    projected_keys: Shape = ()
    keys: Shape = ()
    layouts: list[tuple[list[int], list[int]]] = field(default_factory=list)
    attention: list[torch.Tensor] = field(default_factory=list)
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    candidates: list[int] = field(default_factory=list)
    target_logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    committed: list[int] = field(default_factory=list)
    target_length: int = 0
    draft_length: int = 0

    @property
    def ends_in_candidate(self) -> bool:
        """Whether an accepted candidate ended the text, so that no token of the target's own follows."""
        return self.committed == self.candidates[: len(self.committed)]

    @property
    def num_accepted(self) -> int:
        """How many candidates stand."""
        return len(self.committed) - (not self.ends_in_candidate)


@dataclass
class Trace:
    """A whole generation: the prompt, what the prefill gave, and the rounds."""

    prompt_ids: list[int]
    prompt_taps: Shape = ()
    first_token: int = 0
    cached_after_prefill: int = 0
    rounds: list[Round] = field(default_factory=list)


@contextmanager
def loops_watched(draft: Any, watch: Callable[[DecodingLoop], AbstractContextManager[Any]]) -> Iterator[None]:
    """Let every generation with this draft run inside `watch(its loop)`; undone at the end."""

    def decode(target: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        processors, criteria = kwargs.pop("logits_processor"), kwargs.pop("stopping_criteria")
        config = kwargs.pop("generation_config")
        streamer, synced_gpus = kwargs.pop("streamer", None), kwargs.pop("synced_gpus", False)
        for unused in ("inputs_tensor", "tokenizer", "assistant_tokenizer"):
            kwargs.pop(unused, None)
        loop = DecodingLoop(target, draft, input_ids, processors, criteria, config, kwargs)
        with watch(loop):
            return loop.run(streamer, synced_gpus)

    draft.decode = decode  # the hook on `generate` calls what it finds on the draft
    try:
        yield
    finally:
        del draft.decode


@contextmanager
def traced(draft: Any, trace: Trace) -> Iterator[None]:
    """Let a generation with this draft fill `trace`; undone at the end."""
    with loops_watched(draft, lambda loop: _watching(loop, draft, trace)):
        yield


@contextmanager
def _watching(loop: DecodingLoop, draft: Any, trace: Trace) -> Iterator[None]:
    watcher = _Watcher(loop, trace)
    layer = draft.layers[0].self_attn
    handles = [
        draft.register_forward_pre_hook(watcher.before_draft, with_kwargs=True),
        draft.hidden_norm.register_forward_hook(watcher.saw_shape("context")),
        layer.q_norm.register_forward_hook(watcher.saw_shape("queries")),
        layer.k_norm.register_forward_hook(watcher.saw_shape("projected_keys")),
    ]
    handles += [each.self_attn.register_forward_hook(watcher.after_attention) for each in draft.layers]
    _wrap(loop.runner, "prefill", watcher.after_prefill)
    _wrap(loop.runner, "verify", watcher.after_verify)
    _wrap(loop.runner, "keep", watcher.after_keep)
    _wrap(loop.drafter, "block_logits", watcher.after_block_logits)
    _wrap(loop.drafter.cache, "update", watcher.after_update)
    _wrap(loop.sequences, "append", watcher.after_append)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _wrap(owner: Any, name: str, after: Callable[..., None]) -> None:
    """Call `after(result, *arguments)` whenever `owner.name(...)` has returned."""
    original = getattr(owner, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        after(result, *args, **kwargs)
        return result

    setattr(owner, name, wrapper)


class _Watcher:
    """The observers, one for each seam."""

    def __init__(self, loop: DecodingLoop, trace: Trace):
        self.loop = loop
        self.trace = trace

    @property
    def round(self) -> Round:
        return self.trace.rounds[-1]

    def after_prefill(self, result: Any, *_: Any) -> None:
        self.trace.prompt_taps = tuple(result[1].shape)
        self.trace.cached_after_prefill = self.loop.runner.layout.length

    def after_block_logits(self, logits: torch.Tensor, anchors: torch.Tensor, num_slots: int, depth: int) -> None:
        self.round.logits = logits[0].float()
        mask = self.loop.drafter.draft.config.mask_token_id
        self.round.block_ids = [int(anchors[0, 0]), *[mask] * (num_slots - 1)]

    def before_draft(self, module: Any, args: Any, kwargs: Any) -> None:
        self.trace.rounds.append(Round())
        positions = kwargs["position_ids"][0].tolist()
        self.round.taps = tuple(kwargs["context_hidden_states"].shape)
        self.round.block_embeds = tuple(kwargs["noise_embeds"].shape)
        num_new = self.round.taps[1]
        self.round.new_positions = positions[0], positions[num_new - 1]
        self.round.block_positions = positions[num_new], positions[-1]

    def saw_shape(self, name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: torch.Tensor) -> None:
            setattr(self.round, name, tuple(output.shape))

        return hook

    def after_update(self, result: Any, keys: Any, values: Any, layer_idx: int) -> None:
        layout = self.loop.drafter.cache.layer_layouts[layer_idx]
        positions = layout.positions()[0].tolist()
        self.round.layouts.append((positions[: layout.block_start], positions[layout.block_start :]))
        if layer_idx == 0:
            self.round.keys = tuple(result[0].shape)

    def after_attention(self, module: Any, args: Any, output: Any) -> None:
        if output[1] is not None:
            self.round.attention.append(output[1][0].float())

    def after_verify(self, outputs: Any, block_ids: torch.Tensor, *_: Any, **__: Any) -> None:
        if not self.trace.rounds:
            return
        self.round.candidates = block_ids[0, 1:].tolist()
        self.round.target_logits = outputs.logits[0].float()

    def after_append(self, result: None, rows: list[int], tokens: list[list[int]], *_: Any) -> None:
        if self.trace.rounds:
            self.round.committed = list(tokens[0])
        else:
            self.trace.first_token = tokens[0][0]

    def after_keep(self, *_: Any, **__: Any) -> None:
        self.round.target_length = self.loop.runner.layout.length
        self.round.draft_length = self.loop.drafter.cache.get_seq_length()


__all__ = ["Round", "Trace", "loops_watched", "traced"]
