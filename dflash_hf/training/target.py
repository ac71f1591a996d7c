"""The frozen target of a training run: tapped states, embedding, head and, for distillation, its own logits.

It is held by reference and never becomes a submodule of the draft or of the trainer's model, so it ends up in no
checkpoint and no optimiser.

Shapes: B batch, S context, L taps, H hidden, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..generation.compat import hidden_states_request
from ..generation.target_runner import tapped_states


class FrozenTarget:
    """A causal language model in evaluation mode, without gradients.

    Args:
        model: The target; its parameters stop requiring gradients.
        target_layer_ids: Taps, 0-based layer outputs.

    Raises:
        ValueError: If it has no head, its tied head is not its embedding, or it is offloaded.
    """

    def __init__(self, model: Any, target_layer_ids: Sequence[int]):
        check_trainable_against(model)
        self.model = model.eval().requires_grad_(False)
        self.target_layer_ids = list(target_layer_ids)
        self.embeddings: nn.Module = model.get_input_embeddings()
        self.head: nn.Module = model.get_output_embeddings()
        text = model.config.get_text_config(decoder=True)
        self.softcap: float | None = getattr(text, "final_logit_softcapping", None)
        self.hidden_size: int = text.hidden_size
        self._logits_are_checked = False

    @property
    def dtype(self) -> torch.dtype:
        """What the target computes in; the draft's states are cast to it before the head, as in decoding."""
        return self.model.dtype

    def shard(self) -> None:
        """Spread the decoder layers over all processes (FSDP2); embedding and head, used alone, stay whole."""
        from torch.distributed.fsdp import fully_shard

        for layer in decoder_layers(self.model):
            fully_shard(layer)

    @torch.no_grad()
    def states(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, with_head_inputs: bool = False
    ) -> torch.Tensor:
        """Concatenated taps (B, S, L * H) of right-padded rows; with the head's inputs behind, (B, S, (L + 1) * H)."""
        kwargs: dict[str, Any] = {"output_hidden_states": hidden_states_request(self.target_layer_ids)}
        parameters = inspect.signature(self.model.forward).parameters
        if not with_head_inputs and "logits_to_keep" in parameters:
            kwargs["logits_to_keep"] = 1
        captured: list[torch.Tensor] = []

        def capture(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            captured.append(args[0])
            # Of a slice, the head would be a batched product with a copy of its weight for every row.
            return (args[0].contiguous(), *args[1:])

        handle = self.head.register_forward_pre_hook(capture)
        try:
            with torch.autocast(input_ids.device.type, enabled=False):
                outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **kwargs)
        finally:
            handle.remove()
        taps = tapped_states(self.model, outputs, self.target_layer_ids)
        if not with_head_inputs:
            return taps
        if not self._logits_are_checked:
            self._check_logits(captured[0], outputs.logits)
        return torch.cat([taps, captured[0].to(taps)], dim=-1)

    def logits(self, head_inputs: torch.Tensor, head: nn.Module | None = None) -> torch.Tensor:
        """The target's logits (..., V) from the inputs of its head (..., H)."""
        with torch.no_grad():
            logits = (head or self.head)(head_inputs)
            return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def _check_logits(self, head_inputs: torch.Tensor, expected: torch.Tensor) -> None:
        if not torch.allclose(self.logits(head_inputs[:1]).float(), expected[:1].float(), rtol=1e-2, atol=1e-2):
            raise ValueError(
                f"{type(self.model).__name__} changes its logits after the head in a way that is not known here, so "
                "`loss` cannot be 'kl'; train with 'ce' or 'dpace'."
            )
        self._logits_are_checked = True


class RestrictedHead(nn.Module):
    """The rows of a head that belong to some tokens: the same argmax among them at a part of the cost.

    Args:
        head: The target's head, a plain linear layer.
        token_ids: The tokens to keep, ascending, (V',).

    Raises:
        ValueError: If the head is no plain linear layer (quantised ones are not).
    """

    def __init__(self, head: nn.Module, token_ids: torch.Tensor):
        super().__init__()
        if type(head) is not nn.Linear:
            raise ValueError(
                f"`restrict_vocabulary` is on but the target's head is a {type(head).__name__}, not a plain linear "
                "layer; switch it off to train over the whole vocabulary."
            )
        self.token_ids = token_ids
        self.weight = head.weight.detach()[token_ids].contiguous()
        self.bias = None if head.bias is None else head.bias.detach()[token_ids]
        self.places = torch.full((head.weight.shape[0],), -1, device=head.weight.device)  # a token's row here
        self.places[token_ids] = torch.arange(len(token_ids), device=head.weight.device)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Logits (..., V') from states (..., H)."""
        return nn.functional.linear(states, self.weight, self.bias)


def decoder_layers(target: Any) -> Sequence[Any]:
    """The target's list of decoder layers.

    Raises:
        ValueError: If there is none to be found.
    """
    base = target.base_model
    base = getattr(base, "language_model", base)
    layers = getattr(base, "layers", None) or getattr(base, "h", None)
    if layers is None:
        raise ValueError(f"{type(target).__name__} has no list of layers (`layers` or `h`) under its base model.")
    return layers


def check_trainable_against(model: Any) -> None:
    """Refuse a target that a draft cannot be trained against.

    Raises:
        ValueError: If it has no head, its tied head is not its embedding, or it is offloaded.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(
            f"{type(model).__name__} has no language-model head (`get_output_embeddings()` is None); load the target "
            "with `AutoModelForCausalLM`."
        )
    offloaded = [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]
    if offloaded:
        raise ValueError(
            f"the target is offloaded: {len(offloaded)} of its parameters, such as {offloaded[0]}, are on no device; "
            "load it whole, or spread it over the processes with `shard_target`."
        )
    embeddings = model.get_input_embeddings()
    is_tied = getattr(model.config.get_text_config(decoder=True), "tie_word_embeddings", False)
    weights = getattr(head, "weight", None), getattr(embeddings, "weight", None)
    if is_tied and None not in weights and weights[0].data_ptr() != weights[1].data_ptr():
        raise ValueError(
            "`tie_word_embeddings` is true but the target's head and embedding are different tensors, so one of them "
            "was never loaded; load the target with `AutoModelForCausalLM.from_pretrained` or call `tie_weights()`."
        )
