"""Parts that only some drafts have, built where the config asks for them.

* DFlash 2: a short causal convolution, its kernel made from the token itself, before and after every sublayer; and a
  selector that scores the likeliest tokens of a slot against the token chosen before them.
* DSpark (arXiv 2607.05147): a Markov head, which adds a low-rank bias made from the token chosen before, and a
  confidence head, which estimates whether the target will accept.

A draft with a selector or a Markov head chooses its proposals one after the other, by `step_logits`.

Shapes: B batch, K block, P proposals, H hidden, V vocabulary, W kernel taps, G channel groups, R rank, C candidates.
"""

import torch
from torch import nn
from torch.nn import functional

from .configuration_dflash import DFlashConfig


def with_sinks(
    keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, sinks: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sinks (N,) as one more key of zeros, whose logit the mask supplies, and one more value of zeros.

    Returns keys and values with T + 1 columns, and the mask as floats to add, (B, N, K, T + 1).
    """
    batch_size, _, key_length, _ = keys.shape
    sink = sinks.to(keys.dtype)[None, :, None, None].expand(batch_size, -1, block_size, 1)
    if mask is None:
        mask = keys.new_zeros(batch_size, 1, block_size, key_length)
    elif mask.dtype == torch.bool:
        mask = keys.new_zeros(mask.shape).masked_fill_(~mask, torch.finfo(keys.dtype).min)
    mask = torch.cat([mask.expand(batch_size, len(sinks), block_size, key_length), sink], dim=-1)
    return nn.functional.pad(keys, (0, 0, 0, 1)), nn.functional.pad(values, (0, 0, 0, 1)), mask


class GroupedDynamicCausalConv(nn.Module):
    """Two convolutions along the block, at a sublayer's input and at its output, their kernels made at its input.

    The channels of a group share the dynamic part of the kernel; the static part is each channel's own.
    """

    def __init__(self, config: DFlashConfig):
        super().__init__()
        self.kernel_size = config.conv_kernel_size
        self.num_groups = config.hidden_size // config.conv_group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, self.kernel_size, config.hidden_size))
        nn.init.ones_(self.base_kernel[:, 0])  # the token itself: a fresh convolution changes nothing
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.kernel_size * self.num_groups, bias=False)

    def prepare(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Convolve a sublayer's input (B, K, H); also the kernel for its output, (B, K, W, G)."""
        kernels = self.kernel_projection(hidden_states).unflatten(-1, (2, self.kernel_size, self.num_groups))
        return self._convolve(hidden_states, kernels[..., 0, :, :], self.base_kernel[0]), kernels[..., 1, :, :]

    def finish(self, hidden_states: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        """Convolve the sublayer's output (B, K, H) with the kernel that `prepare` made."""
        return self._convolve(hidden_states, kernel, self.base_kernel[1])

    def _convolve(self, hidden_states: torch.Tensor, kernel: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        channels = hidden_states.unflatten(-1, (self.num_groups, -1))  # (B, K, G, H / G)
        base = base.to(hidden_states.dtype).unflatten(-1, (self.num_groups, -1))  # (W, G, H / G)
        output = torch.zeros_like(channels)
        for tap in range(self.kernel_size):
            earlier = functional.pad(channels, (0, 0, 0, 0, tap, 0))[:, : channels.shape[1]]
            output = output + base[tap] * earlier + kernel[:, :, tap, :, None] * earlier
        return output.flatten(-2)


class CandidateSelector(nn.Module):
    """Scores a slot's likeliest tokens b after the token a: `logit(b) + <A(a) * H(h), B(b)>` (DFlash 2)."""

    def __init__(self, config: DFlashConfig):
        super().__init__()
        self.top_k = config.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.zeros(config.vocab_size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.zeros(config.vocab_size, config.selector_rank))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def forward(self, logits: torch.Tensor, states: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Logits (B, V) of one slot, from its own (B, V), its state (B, H) and the token before, (B,).

        Tokens that are no candidates get minus infinity: this draft never proposes them.
        """
        scores, candidates = logits.topk(self.top_k, dim=-1)  # (B, C) each
        wanted = self.predecessor_codebook[previous] * self.hidden_projection(states)  # (B, R)
        scores = scores + torch.einsum("br,bcr->bc", wanted, self.successor_codebook[candidates])
        return torch.full_like(logits, -torch.inf).scatter(-1, candidates, scores.to(logits.dtype))


class MarkovHead(nn.Module):
    """A low-rank bias on a slot's logits made from the token chosen before it (DSpark, section 3).

    `vanilla` reads that token alone, `gated` weighs it by the slot's state, `rnn` carries a state along the block.
    """

    def __init__(self, config: DFlashConfig):
        super().__init__()
        rank, hidden_size = config.markov_rank, config.hidden_size
        self.kind = config.markov_head_type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size or config.vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def forward(self, states: torch.Tensor, previous_ids: torch.Tensor) -> torch.Tensor:
        """The bias of slot i, (B, V), from slots 0..i: states (B, i + 1, H) and the tokens before each, (B, i + 1)."""
        previous = self.markov_w1(previous_ids)  # (B, i + 1, R)
        states = states.to(previous.dtype)
        if self.kind == "vanilla":
            return self.markov_w2(previous[:, -1])
        if self.kind == "gated":
            gate = torch.sigmoid(self.gate_proj(torch.cat([states[:, -1], previous[:, -1]], dim=-1)))
            return self.markov_w2(gate * previous[:, -1])
        return self.markov_w2(self._recur(states, previous))

    def _recur(self, states: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        memory = torch.zeros_like(previous[:, 0])
        for slot in range(previous.shape[1]):
            joint = self.joint_proj(torch.cat([memory, previous[:, slot], states[:, slot]], dim=-1))
            gate, candidate, output = joint.chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            memory = gate * memory + (1 - gate) * torch.tanh(candidate)
        return torch.tanh(output)


class ConfidenceHead(nn.Module):
    """Log-odds that the target accepts a proposal (DSpark, section 3)."""

    def __init__(self, config: DFlashConfig):
        super().__init__()
        extra = config.markov_rank if config.confidence_head_with_markov else 0
        self.proj = nn.Linear(config.hidden_size + extra, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(B, P) from the slots' states, with the Markov embedding of the token before each where trained so."""
        return self.proj(features)[..., 0]


__all__ = ["CandidateSelector", "ConfidenceHead", "GroupedDynamicCausalConv", "MarkovHead"]
