"""What a round puts up for verification: a chain of candidates, or a tree of them.

Shapes: B batch, P proposals, N tree nodes, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .drafting import Drafter, choose_candidates
from .policy import chain_chances
from .processors import BlockProcessor
from .settings import DraftSettings
from .tree import Tree, assemble, best_prefixes, prefix_chances


@dataclass
class Proposal:
    """Candidates behind the anchors.

    Attributes:
        tokens: (B, P) a chain, or (B, N) the nodes of `tree`.
        probs: Distributions that the candidates of a chain were drawn from, (B, P, V); `None` when not sampling.
        tree: The shape of the candidates where they are no chain.
    """

    tokens: torch.Tensor
    probs: torch.Tensor | None = None
    tree: Tree | None = None

    @property
    def width(self) -> int:
        """Positions that a verification runs: the candidates and the anchor before them."""
        return self.tokens.shape[1] + 1


class Proposer:
    """Drafts blocks and chooses candidates from them, under the settings and processors of one `generate` call."""

    def __init__(self, drafter: Drafter, processor: BlockProcessor, settings: DraftSettings, do_sample: bool):
        self.drafter = drafter
        self.processor = processor
        self.settings = settings
        self.do_sample = do_sample
        self.policy = settings.policy(do_sample)
        self.chances: list[float] = []  # of this round's candidates to stand, by the draft's own account
        self.behind: list[int] = []  # the rows that the width is chosen for

    def propose(
        self,
        rows: Sequence[int],
        prefixes: Sequence[torch.Tensor],
        anchors: torch.Tensor,
        remaining: int,
        tree_budget: int,
    ) -> Proposal:
        """Propose candidates for every row.

        Args:
            rows: Numbers of the rows in the original batch.
            prefixes: What each row has committed, (1, n_b) each.
            anchors: The last token of each row, (B, 1).
            remaining: Tokens that may still be generated; the target's own one takes the last.
            tree_budget: Nodes of the tree; 0 proposes a chain.
        """
        config = self.drafter.draft.config
        if self.policy is not None:
            self.behind = _furthest_behind(prefixes, config.num_proposals)
        num_slots = min(config.block_size, remaining + 1)
        silent_slots = config.block_size - config.num_proposals
        depth = min(self.settings.num_proposals, num_slots - silent_slots, remaining - 1)
        if depth < 1:
            return Proposal(anchors[:, :0])
        if self.policy is not None and not self.policy.wants_draft(len(rows)):
            return Proposal(anchors[:, :0])
        if self.policy is not None and self.policy.horizon and len(rows) > 1 and not tree_budget:
            depth = min(depth, self.policy.horizon)  # one row's slots share what the head costs
        logits = self.drafter.block_logits(anchors, num_slots, depth)
        if tree_budget:
            return self._tree(rows, prefixes, logits, tree_budget)
        if self.policy is not None:
            self.chances = chain_chances(logits, self.behind)
            depth = self.policy.choose(self.chances)
            if depth == 0:
                return Proposal(anchors[:, :0])
        tokens, probs = choose_candidates(
            logits[:, :depth], self.processor, rows, prefixes, self.do_sample, self.drafter.refine
        )
        return self._cut_unconfident(logits[:, :depth], Proposal(tokens, probs))

    def learn(self, proposal: Proposal, counts: Sequence[int]) -> None:
        """Take in how a round went: the tokens it committed per row, `counts`."""
        if self.policy is not None:
            behind = [counts[row] for row in self.behind]
            accepted = sum(behind) / len(behind) - 1
            self.policy.learn(self.chances[: proposal.width - 1], accepted, proposal.width)

    def _tree(
        self, rows: Sequence[int], prefixes: Sequence[torch.Tensor], logits: torch.Tensor, budget: int
    ) -> Proposal:
        levels = best_prefixes(self._scores_without_candidates(rows, prefixes, logits), budget)
        if self.policy is not None:
            self.chances = prefix_chances(levels, budget, self.behind)
            budget = self.policy.choose(self.chances)
            if budget == 0:
                return Proposal(levels[0].tokens[:, :0])
        tree = assemble(levels, budget)
        return Proposal(tree.tokens, tree=tree)

    def _scores_without_candidates(
        self, rows: Sequence[int], prefixes: Sequence[torch.Tensor], logits: torch.Tensor
    ) -> torch.Tensor:
        """Scores of every depth (B, P, V) after the processors, which see the committed prefix at each depth.

        A tree has many prefixes at a depth; which candidates it holds changes how many stand, never which tokens.
        """
        if self.processor.is_stateful:
            return logits
        if self.processor.is_empty or self.processor.is_pointwise:
            return self.processor.pointwise(logits)
        return self.processor.in_context(rows, [[prefix] * logits.shape[1] for prefix in prefixes], logits)

    def _cut_unconfident(self, logits: torch.Tensor, proposal: Proposal) -> Proposal:
        """End a chain behind its first candidate below the confidence threshold.

        That candidate itself is verified. To drop it because of its own probability would bias sampling: the target
        would judge likely draws only, and draw the rest afresh.
        """
        threshold = self.settings.confidence_threshold
        if threshold <= 0:
            return proposal
        known = logits.float().softmax(dim=-1) if proposal.probs is None else proposal.probs
        confident = known.gather(-1, proposal.tokens[..., None])[..., 0] >= threshold
        width = min(int(confident.long().cumprod(dim=1).sum(dim=1).max()) + 1, proposal.tokens.shape[1])
        return Proposal(proposal.tokens[:, :width], None if proposal.probs is None else proposal.probs[:, :width])


def _furthest_behind(prefixes: Sequence[torch.Tensor], tolerance: int) -> list[int]:
    """The rows with the least text, give or take some tokens: a batch takes as long as its slowest row."""
    least = min(prefix.shape[1] for prefix in prefixes) + tolerance
    return [row for row, prefix in enumerate(prefixes) if prefix.shape[1] <= least]


__all__ = ["Proposal", "Proposer"]
