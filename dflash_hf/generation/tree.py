"""Draft trees (DDTree, arXiv 2604.12989): many continuations, verified in one forward of the target.

A block's slots give one distribution per depth, independent of each other. The tree holds the `budget` prefixes with
the largest product of probabilities, which maximises the expected number of accepted tokens under the draft's own
belief. A prefix is never less probable than its extensions, so keeping the best of each depth and then the best of all
depths finds the optimum that the paper's best-first search finds, without leaving the device.

Nodes are numbered by depth; node 0 is the anchor. Shapes: B batch, P depths, V vocabulary, N nodes, W = N + 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .verification import Verdict, best_tokens, is_on_host, sample


@dataclass
class Tree:
    """A batch of token trees of equal size.

    Attributes:
        tokens: (B, N) token of each node but the root.
        parents: (B, W) number of each node's parent; the root is its own.
        depths: (B, W), the root's is 0.
        ancestors: (B, W, W), row a node, true for its ancestors and itself.
        log_probs: (B, N) log-probability of each node's whole prefix under the draft.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    ancestors: torch.Tensor
    log_probs: torch.Tensor


def build_tree(scores: torch.Tensor, budget: int) -> Tree:
    """The tree of the `budget` most probable prefixes of scores (B, P, V)."""
    return assemble(best_prefixes(scores, budget), budget)


def best_prefixes(scores: torch.Tensor, budget: int) -> list["Level"]:
    """The `budget` most probable prefixes of every depth (fewer where the vocabulary allows fewer).

    Args:
        scores: The draft's scores, (B, P, V); position p is depth p + 1.
        budget: Nodes, the root not counted.
    """
    log_probs = scores.float().log_softmax(dim=-1)
    best, token = log_probs.topk(min(budget, log_probs.shape[-1]), dim=-1)  # (B, P, k)
    # Where a draft overflows, any guess will do, but no child may outrank its parent.
    best = best.nan_to_num(nan=-math.log(log_probs.shape[-1]), neginf=-torch.inf)
    level = Level(best.new_zeros(best.shape[0], 1), None, None, first=-1)  # the root
    levels: list[Level] = []
    for depth in range(best.shape[1]):
        joint = (level.log_probs[:, :, None] + best[:, depth, None, :]).flatten(1)  # (B, M * k)
        values, index = _largest(joint, budget)
        parents = level.first + index // best.shape[-1]
        first = level.first + level.log_probs.shape[1]
        level = Level(values, token[:, depth].gather(1, index % best.shape[-1]), parents, first)
        levels.append(level)
    return levels


@dataclass
class Level:
    """The best prefixes of one depth: all levels together are one list of entries, numbered from `first` on."""

    log_probs: torch.Tensor  # (B, M)
    tokens: torch.Tensor | None
    parents: torch.Tensor | None  # entry numbers, -1 for the root
    first: int


def _largest(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest `count` of each row (B, n) in descending order; on a tie, the earlier."""
    ordered, index = values.sort(dim=1, descending=True, stable=True)
    return ordered[:, :count], index[:, :count]


def prefix_chances(levels: list[Level], budget: int, rows: list[int]) -> list[float]:
    """The draft's probability of each of the best `budget` prefixes, in descending order, averaged over some rows."""
    log_probs = torch.cat([level.log_probs for level in levels], dim=1)[rows]
    return _largest(log_probs, budget)[0].exp().mean(dim=0).tolist()


def assemble(levels: list[Level], budget: int) -> Tree:
    """Keep the best `budget` of all entries. On a tie the shallower wins, so that no node loses its parent."""
    values = torch.cat([level.log_probs for level in levels], dim=1)
    batch_size, num_entries = values.shape
    depth = torch.cat([torch.full_like(level.parents[0], i) for i, level in enumerate(levels, start=1)])
    chosen = _largest(values, budget)[1].sort(dim=1).values  # (B, N), parents before children
    node_of = chosen.new_zeros(batch_size, num_entries + 1)  # entry -> node; the last stands for entry -1, the root
    node_of.scatter_(1, chosen, torch.arange(1, chosen.shape[1] + 1, device=values.device).expand_as(chosen))
    parent_entry = torch.cat([level.parents for level in levels], dim=1).gather(1, chosen)
    root = chosen.new_zeros(batch_size, 1)
    parents = torch.cat([root, node_of.gather(1, parent_entry % (num_entries + 1))], dim=1)
    return Tree(
        tokens=torch.cat([level.tokens for level in levels], dim=1).gather(1, chosen),
        parents=parents,
        depths=torch.cat([root, depth[chosen]], dim=1),
        ancestors=_ancestors(parents, len(levels)),
        log_probs=values.gather(1, chosen),
    )


def _ancestors(parents: torch.Tensor, num_depths: int) -> torch.Tensor:
    """Transitive closure of "is the parent of", (B, W, W), by doubling."""
    batch_size, width = parents.shape
    reach = torch.eye(width, dtype=torch.float32, device=parents.device).expand(batch_size, -1, -1).clone()
    reach.scatter_(2, parents[:, :, None], 1.0)
    for _ in range(max(num_depths - 1, 1).bit_length()):
        reach = (reach @ reach).clamp_max_(1.0)
    return reach > 0


def walk(tree: Tree, scores: torch.Tensor, do_sample: bool) -> Verdict:
    """Follow the target's own choice from the root while it is a child of the node at hand.

    The target chooses once at a node, from its scores (B, W, V) after the node's prefix: its argmax, or a sample of
    its own distribution. Only its own choices are kept, so the result is its own at every temperature. The verdict's
    `order` names the nodes of the kept path first.
    """
    if is_on_host(scores):
        return _walk_on_host(tree, scores, do_sample)
    choice = _choose(scores, do_sample)  # (B, W)
    matches = tree.tokens == choice.gather(1, tree.parents[:, 1:])
    matches = torch.cat([torch.ones_like(matches[:, :1]), matches], dim=1)  # (B, W)
    on_path = (matches[:, None, :] | ~tree.ancestors).all(dim=2)
    width = tree.depths.shape[1]
    order = torch.where(on_path, tree.depths, width).argsort(dim=1, stable=True)
    return Verdict(choice.gather(1, order), on_path.sum(dim=1) - 1, order)


def _walk_on_host(tree: Tree, scores: torch.Tensor, do_sample: bool) -> Verdict:
    """The same, choosing at the nodes of the path only: a CPU takes long to read the scores of all."""
    children = [
        {edge: node for node, edge in enumerate(zip(parents[1:], tokens, strict=True), start=1)}
        for parents, tokens in zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
    ]
    paths: list[list[int]] = [[0] for _ in children]
    chosen: list[list[int]] = [[] for _ in children]
    walking = list(range(len(children)))
    while walking:
        nodes = [paths[row][-1] for row in walking]
        choice = _choose(scores[walking, nodes][:, None], do_sample)[:, 0].tolist()
        still_walking = []
        for row, node, token in zip(walking, nodes, choice, strict=True):
            chosen[row].append(token)
            if (child := children[row].get((node, token))) is not None:
                paths[row].append(child)
                still_walking.append(row)
        walking = still_walking
    return Verdict.from_host(chosen, tree.tokens, paths)


def _choose(scores: torch.Tensor, do_sample: bool) -> torch.Tensor:
    """The target's own token (B, W) at every position of scores (B, W, V)."""
    return sample(scores.float().softmax(dim=-1)) if do_sample else best_tokens(scores)


def node_contexts(tree: Tree, prefixes: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The tokens that each node's scores stand behind: a row's prefix (1, n) and the path down to the node."""
    contexts = []
    for tokens, parents, prefix in zip(tree.tokens, tree.parents.tolist(), prefixes, strict=True):
        row = [prefix]
        for node, parent in enumerate(parents[1:]):
            row.append(torch.cat([row[parent], tokens[None, node : node + 1]], dim=1))
        contexts.append(row)
    return contexts


__all__ = ["Tree", "assemble", "best_prefixes", "build_tree", "node_contexts", "prefix_chances", "walk"]
