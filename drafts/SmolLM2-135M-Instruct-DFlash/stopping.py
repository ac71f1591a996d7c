"""Where a committed block ends: `generate`'s stopping criteria, judged after every single token as it would."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)


class StopRule:
    """The stopping criteria of one `generate` call.

    Length and end-of-sequence are compared on the host, on tokens it has anyway; every other criterion is called with
    the exact prefix after each token, since it may hold in the middle of a block.

    Attributes:
        is_rowwise: Every criterion judges each row by its own tokens. One of the caller's own may not: it may count
            its calls, or compare rows.
    """

    def __init__(self, criteria: StoppingCriteriaList, max_length: int):
        self.max_length = max_length
        self.eos_token_ids: set[int] = set()
        self.others: list[Callable[..., torch.Tensor]] = []
        for criterion in criteria:
            if type(criterion) is MaxLengthCriteria:
                self.max_length = min(self.max_length, criterion.max_length)
            elif type(criterion) is EosTokenCriteria:
                self.eos_token_ids.update(torch.as_tensor(criterion.eos_token_id).flatten().tolist())
            else:
                self.others.append(criterion)
        self.is_rowwise = all(type(criterion) in (MaxTimeCriteria, StopStringCriteria) for criterion in self.others)

    def committed(
        self,
        length: int,
        tokens: Sequence[int],
        prefix_at: Callable[[int], torch.Tensor],
        scores_at: Callable[[int], Any],
    ) -> tuple[int, bool]:
        """How many of `tokens` are generated before the row stops, and whether it stops.

        Args:
            length: Length of the row before these tokens.
            prefix_at: The row's ids (1, length + n) after n of the tokens.
            scores_at: What `generate` passes as `scores` after n of the tokens.
        """
        for count, token in enumerate(tokens, start=1):
            stops = token in self.eos_token_ids or length + count >= self.max_length
            # Every criterion is called even when another holds already: some keep count of their calls.
            for criterion in self.others:
                stops |= bool(torch.as_tensor(criterion(prefix_at(count), scores_at(count))).any())
            if stops:
                return count, True
        return len(tokens), False


__all__ = ["StopRule"]
