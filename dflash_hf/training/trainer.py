"""DFlashTrainer: Transformers' `Trainer`, taught to train a draft against a frozen target (DFlash, section 3.3).

What differs from an ordinary run: the model is the draft alone; its inputs are made here from the target's tapped
states, random anchors and the sparse mask; the loss is normalised by a sum of weights that the whole optimiser step
shares; and evaluation walks held-out sequences the way decoding does.

Shapes: B batch, S context, A anchors, K block, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from ..modeling_dflash import Qwen3DFlashForDraft
from . import checkpointing, evaluation, losses
from .blocks import IGNORED, Blocks, batch_anchors, has_label, make_blocks
from .masks import training_masks
from .sequences import SequenceCollator
from .stability import SkipNonFiniteSteps
from .target import FrozenTarget, RestrictedHead


@dataclass
class DFlashTrainingArguments(TrainingArguments):
    """[`~transformers.TrainingArguments`] with the recipe's own settings; the defaults are the paper's.

    Raises:
        ValueError: For a loss that is not there or a constant out of its range.
    """

    loss: str = field(default="ce", metadata={"help": f"one of {', '.join(losses.LOSSES)}; see docs/training.md"})
    gamma: float | None = field(
        default=None, metadata={"help": "decay of the weights along a block; default: the paper's for the block size"}
    )
    dpace_alpha: float = field(default=0.5, metadata={"help": "of dpace: 0 trusts the draft, 1 weights slots alike"})
    num_anchors: int = field(default=512, metadata={"help": "blocks drawn from each sequence at every visit"})
    loss_chunk_blocks: int = field(default=64, metadata={"help": "blocks whose logits are held at once"})
    real_eval_prompts: int = field(default=4, metadata={"help": "prompts that evaluation lets generate answer"})
    real_eval_new_tokens: int = field(default=64, metadata={"help": "new tokens of each of those answers"})
    eval_anchors_per_forward: int = field(
        default=128, metadata={"help": "blocks in one forward of the draft in evaluation"}
    )
    learning_rate: float = 6e-4
    lr_scheduler_type: str = "cosine"
    warmup_steps: float = 0.04
    max_grad_norm: float = 1.0
    num_train_epochs: float = 6.0
    remove_unused_columns: bool = False
    ddp_find_unused_parameters: bool | None = False  # every step uses them all

    def __post_init__(self) -> None:
        super().__post_init__()
        losses.check_loss_arguments(self.loss, self.gamma, self.dpace_alpha)
        for name in ("num_anchors", "loss_chunk_blocks", "eval_anchors_per_forward"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")


class DFlashTrainer(checkpointing.AtomicCheckpoints, Trainer):
    """Trains a draft's own parameters: `fc`, `hidden_norm`, the layers and the final norm.

    Args:
        draft: The model to train.
        target: The frozen target, held by reference only.
        args: Settings of the run.
        head: A head over a part of the vocabulary for the training loss; evaluation uses the target's whole head.
        eval_collator: Where the evaluation's sequences have a cache of their own. Default: `data_collator`.
        kwargs: As of [`~transformers.Trainer`]; datasets are those of `usable_sequences`.

    Raises:
        ValueError: If the draft has parts that this recipe does not train.
    """

    args: DFlashTrainingArguments

    def __init__(
        self,
        draft: Qwen3DFlashForDraft,
        target: FrozenTarget,
        args: DFlashTrainingArguments,
        head: RestrictedHead | None = None,
        eval_collator: SequenceCollator | None = None,
        **kwargs: Any,
    ):
        check_draft_is_plain(draft)
        self.target = target
        self.restricted_head = head
        kwargs.setdefault("data_collator", SequenceCollator())
        super().__init__(model=draft, args=args, **kwargs)
        self.eval_collator = eval_collator or self.data_collator
        self.model_accepts_loss_kwargs = True  # `compute_loss` divides by the weights of the whole step
        config = draft.config
        gamma = losses.default_gamma(config.block_size) if args.gamma is None else args.gamma
        self.decay = losses.decay_weights(config.block_size, gamma)
        self.non_finite = SkipNonFiniteSteps(self)
        self.add_callback(self.non_finite)

    @property
    def draft(self) -> Qwen3DFlashForDraft:
        """The draft without the wrappers of distributed training."""
        return self.accelerator.unwrap_model(self.model)

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, torch.Tensor]], torch.Tensor | None]:
        """Fetch the micro-batches of an optimiser step and draw their anchors, so that weights are summed first."""
        batches: list[dict[str, torch.Tensor]] = []
        for _ in range(num_batches):
            try:
                batches.append(next(epoch_iterator))
            except StopIteration:
                break
        for batch in batches:
            batch["anchors"] = batch_anchors(
                batch["sequences"],
                batch["prompt_lengths"],
                batch["lengths"],
                self.args.num_anchors,
                (self.args.seed, self.state.global_step),
            ).to(batch["input_ids"].device)
        return batches, self._get_num_items_in_batch(batches, device)

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor | None:
        """The sum of the static weights of all slots of the step, over micro-batches and processes."""
        if not batch_samples:
            return None
        total = torch.zeros((), device=device)
        for batch in batch_samples:
            labelled = has_label(batch["lengths"], batch["anchors"], self.draft.config.block_size)
            total += (labelled * self._static_weights(labelled.device)).sum().to(device)
        return self.accelerator.reduce(total, "sum") if self.args.world_size > 1 else total

    def _static_weights(self, device: torch.device) -> torch.Tensor:
        """Per slot (K - 1,). D-PACE makes its weights from the forward, so its slots count as one each."""
        return torch.ones_like(self.decay).to(device) if self.args.loss == "dpace" else self.decay.to(device)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The weighted loss of a micro-batch's blocks, as its share of the whole step's."""
        states = self.target_states(inputs)
        config = self.draft.config
        blocks = make_blocks(
            inputs["input_ids"], inputs["lengths"], inputs["anchors"], config.block_size, config.mask_token_id
        )
        taps = states[..., : len(config.target_layer_ids) * config.hidden_size]
        block_states = self.block_states(model, taps, blocks)
        total = self._sum_of_losses(block_states, blocks, states[..., taps.shape[-1] :])
        self.state.num_input_tokens_seen += int(inputs["lengths"].sum()) * self.args.world_size
        # DDP averages gradients over processes, and the sum of weights is that of all of them.
        return total / num_items_in_batch.clamp_min(torch.finfo(total.dtype).tiny) * self.args.world_size

    def target_states(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """The target's tapped states (B, S, L * H), for distillation with its head's inputs behind them."""
        if "states" in inputs:
            return inputs["states"]
        return self.target.states(inputs["input_ids"], inputs["attention_mask"], self.args.loss == "kl")

    def block_states(self, model: nn.Module, taps: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        """The draft's final states of all blocks, (B, A, K, H), in one forward over taps (B, S, L * H)."""
        draft = self.draft
        batch_size, context_length = taps.shape[:2]
        embeds = draft.embed_block(blocks.token_ids.flatten(1), self.target.embeddings)  # (B, A * K, H)
        context_positions = torch.arange(context_length, device=taps.device).expand(batch_size, -1)
        dtype = next(draft.parameters()).dtype
        masks = training_masks(draft.config, blocks.anchors, context_length, draft.config._attn_implementation, dtype)
        outputs = model(
            noise_embeds=embeds.to(dtype),
            # Autocast makes them what `fc` computes in; a copy in the parameters' dtype would be the step's largest.
            context_hidden_states=taps if torch.is_autocast_enabled(taps.device.type) else taps.to(dtype),
            position_ids=torch.cat([context_positions, blocks.positions.flatten(1)], dim=1),
            attention_mask=masks,
        )
        return outputs.last_hidden_state.unflatten(1, blocks.token_ids.shape[1:])

    def _sum_of_losses(self, block_states: torch.Tensor, blocks: Blocks, head_inputs: torch.Tensor) -> torch.Tensor:
        """Sum of weighted losses over the blocks that have something to predict, from their states (B, A, K, H)."""
        labels = blocks.labels
        has_any = (labels != IGNORED).any(-1)  # (B, A)
        labels = self._places_in_head(labels[has_any])  # (N, K - 1)
        row, block = has_any.nonzero(as_tuple=True)
        # Slot k's token is predicted by the target at the position before it.
        before = blocks.positions[row, block][:, :-1].clamp_max(head_inputs.shape[1] - 1)  # (N, K - 1)
        head = self.target.head if self.restricted_head is None else self.restricted_head
        decay = self.decay.to(block_states.device)

        def terms(states: torch.Tensor, chunk: slice) -> torch.Tensor:
            logits = self.draft.compute_logits(states.to(self.target.dtype), head)  # (n, K - 1, V)
            wanted = labels[chunk]
            is_label = wanted != IGNORED
            if self.args.loss == "kl":
                target_logits = self.target.logits(head_inputs[row[chunk, None], before[chunk]], head)
                each = losses.kl_divergence(logits.flatten(0, 1), target_logits.flatten(0, 1)).view_as(wanted)
                return (each * decay * is_label).sum()
            each = losses.cross_entropy(logits.flatten(0, 1), wanted.flatten()).view_as(wanted)
            if self.args.loss == "ce":
                return (each * decay).sum()
            weights = losses.dpace_weights((-each.detach()).exp(), is_label, self.args.dpace_alpha)
            return (each * weights).sum()

        return losses.chunked_sum(block_states[row, block], terms, self.args.loss_chunk_blocks)

    def _places_in_head(self, labels: torch.Tensor) -> torch.Tensor:
        if self.restricted_head is None:
            return labels
        return torch.where(labels == IGNORED, IGNORED, self.restricted_head.places[labels.clamp_min(0)])

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with the number of skipped steps once there is one."""
        if self.non_finite.skipped:
            logs = {**logs, "skipped_steps": self.non_finite.skipped}
        super().log(logs, start_time)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Walk the held-out sequences, and decode some of their prompts; see `training.evaluation`."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        metrics = evaluation.evaluate(self, dataset)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def check_draft_is_plain(draft: Qwen3DFlashForDraft) -> None:
    """Refuse a draft with parts that this recipe does not train.

    Raises:
        ValueError: Names the part.
    """
    config = draft.config
    parts = ("own_head", "own_embedding", "slots_predict_next", "selector_rank", "markov_rank", "conv_kernel_size")
    for part in parts:
        if value := getattr(config, part):
            raise ValueError(
                f"`{part}` is {value!r} in the draft's config, and training covers drafts that use the target's own "
                "embedding and head and nothing besides; start from a plain draft."
            )
