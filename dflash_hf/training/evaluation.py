"""Measures of a draft in training that mean something for decoding.

The acceptance length is simulated by walking each held-out response round by round: a round starts where the one
before it ended, so more rounds start where the draft fails. The mean over random anchors does not know that and
overstates it; it is reported beside it. A few prompts are decoded for real.

Shapes: B batch, S context, A anchors, K block, H hidden.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .blocks import IGNORED, Blocks, make_blocks
from .losses import cross_entropy

if TYPE_CHECKING:
    from .trainer import DFlashTrainer


def accepted_proposals(is_correct: torch.Tensor) -> torch.Tensor:
    """Number of leading correct proposals, (...,), from booleans (..., K - 1)."""
    return is_correct.long().cumprod(-1).sum(-1)


def walk(accepted: Sequence[int], block_size: int) -> list[int]:
    """Tokens committed per round of decoding a response, its first token given.

    Args:
        accepted: For every token of the response but the last, how many proposals behind it are right; proposals
            behind the end count as wrong.
        block_size: K; a round commits at most K tokens.

    Returns:
        One number a round, as `generate` reports them: accepted proposals and the target's own token, no more than
        are left.
    """
    lengths = []
    anchor = 0
    while anchor < len(accepted):
        committed = min(accepted[anchor] + 1, block_size, len(accepted) - anchor)
        lengths.append(committed)
        anchor += committed
    return lengths


@torch.no_grad()
def score_response(trainer: DFlashTrainer, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Draft a block at every token of one response: predictions, labels (A, K - 1) and the loss of every slot."""
    config, target = trainer.draft.config, trainer.target
    states = trainer.target_states(batch)[..., : len(config.target_layer_ids) * config.hidden_size]
    anchors = torch.arange(int(batch["prompt_lengths"][0]), int(batch["lengths"][0]) - 1)
    parts = []
    for some in anchors.split(trainer.args.eval_anchors_per_forward):
        blocks = make_blocks(
            batch["input_ids"],
            batch["lengths"],
            some[None].to(batch["input_ids"].device),
            config.block_size,
            config.mask_token_id,
        )
        parts.append((*_score(trainer, states, blocks, target), blocks.labels[0]))
    predicted, loss, labels = (torch.cat(part) for part in zip(*parts, strict=True))
    return predicted, labels, loss


def _score(
    trainer: DFlashTrainer, taps: torch.Tensor, blocks: Blocks, target: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    with trainer.compute_loss_context_manager():
        states = trainer.block_states(trainer.draft, taps, blocks)[0]  # (A, K, H)
    predicted, loss = [], []
    pieces = states.split(trainer.args.loss_chunk_blocks)
    for piece, labels in zip(pieces, blocks.labels[0].split(trainer.args.loss_chunk_blocks), strict=True):
        logits = trainer.draft.compute_logits(piece.to(target.dtype), target.head)
        predicted.append(logits.argmax(-1))
        loss.append(cross_entropy(logits.flatten(0, 1), labels.flatten()).view_as(labels))
    return torch.cat(predicted), torch.cat(loss)


def evaluate(trainer: DFlashTrainer, dataset: Any) -> dict[str, float]:
    """Loss, accuracy per slot, mean acceptance at all anchors, simulated and real acceptance length.

    Processes share the sequences out and add their sums.
    """
    draft = trainer.draft
    was_training = draft.training
    draft.eval()
    sums = _no_sums(draft.config.block_size - 1)
    rank, world = trainer.args.process_index, trainer.args.world_size
    for number in range(rank, len(dataset), world):
        batch = trainer._prepare_inputs(trainer.eval_collator([dataset[number]]))
        predicted, labels, loss = score_response(trainer, batch)
        _add(sums, _sums_of(predicted, labels, loss, trainer))
    for number in range(rank, min(trainer.args.real_eval_prompts, len(dataset)), world):
        lengths = decode(trainer, dataset[number])
        _add(sums, {"real_tokens": sum(lengths), "real_rounds": len(lengths)})
    if world > 1:
        sums = {name: trainer.accelerator.reduce(total.to(trainer.args.device), "sum") for name, total in sums.items()}
    draft.train(was_training)
    return _metrics(sums)


def _no_sums(slots: int) -> dict[str, torch.Tensor]:
    scalars = (
        "loss",
        "weight",
        "anchor_tokens",
        "anchors",
        "walk_tokens",
        "walk_rounds",
        "real_tokens",
        "real_rounds",
    )
    sums = {name: torch.zeros((), dtype=torch.float64) for name in scalars}
    return sums | {name: torch.zeros(slots, dtype=torch.float64) for name in ("correct", "counted")}


def _add(sums: dict[str, torch.Tensor], more: dict[str, Any]) -> None:
    for name, value in more.items():
        sums[name] += value.double().cpu() if isinstance(value, torch.Tensor) else value


def _sums_of(
    predicted: torch.Tensor, labels: torch.Tensor, loss: torch.Tensor, trainer: DFlashTrainer
) -> dict[str, Any]:
    """What one response adds to the totals; everything (A, K - 1)."""
    is_label = labels != IGNORED
    is_correct = (predicted == labels) & is_label
    accepted = accepted_proposals(is_correct)
    rounds = walk(accepted.tolist(), trainer.draft.config.block_size)
    weights = trainer.decay.to(loss.device) * is_label
    return {
        "correct": is_correct.sum(0),
        "counted": is_label.sum(0),
        "loss": (loss * weights).sum(),
        "weight": weights.sum(),
        "anchor_tokens": (accepted + 1).sum(),
        "anchors": len(accepted),
        "walk_tokens": sum(rounds),
        "walk_rounds": len(rounds),
    }


def _metrics(sums: dict[str, torch.Tensor]) -> dict[str, float]:
    def ratio(tokens: str, rounds: str) -> float:
        return float(sums[tokens] / sums[rounds].clamp_min(1e-12))

    metrics = {
        "loss": ratio("loss", "weight"),
        "simulated_acceptance": ratio("walk_tokens", "walk_rounds"),
        "anchor_acceptance": ratio("anchor_tokens", "anchors"),
    }
    if sums["real_rounds"]:
        metrics["real_acceptance"] = ratio("real_tokens", "real_rounds")
    accuracy = sums["correct"] / sums["counted"].clamp_min(1)
    return metrics | {f"accuracy_slot_{slot}": float(value) for slot, value in enumerate(accuracy, start=1)}


def decode(trainer: DFlashTrainer, row: dict[str, Any]) -> list[int]:
    """Acceptance lengths of a real `generate` on a sequence's prompt, in the dtype the target runs in."""
    target = trainer.target.model
    draft = copy.deepcopy(trainer.draft).to(trainer.target.dtype).eval()
    prompt = torch.as_tensor(row["input_ids"][: row["prompt_length"]], device=target.device)[None]
    outputs = target.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        assistant_model=draft,
        do_sample=False,
        max_new_tokens=trainer.args.real_eval_new_tokens,
        return_dict_in_generate=True,
    )
    return outputs.acceptance_lengths[0]
