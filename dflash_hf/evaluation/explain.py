"""`dflash-hf explain "PROMPT"`: a few rounds of the pair, step by step, with what really passed through them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .models import Pair, add_pair_arguments, check_length, check_text, encode_chat, load_pair

if TYPE_CHECKING:
    from .trace import Round, Trace

DEFAULT_PROMPT = "What is the capital of France?"


def add_parser(subparsers: Any) -> None:
    """Declare the sub-command."""
    parser = subparsers.add_parser(
        "explain",
        help="show a few rounds of drafting and verifying, step by step",
        description="Run a few rounds and show every step: shapes, tokens, positions, taps, candidates, caches.",
    )
    parser.add_argument("prompt", nargs="?", default=DEFAULT_PROMPT, metavar="PROMPT", help="what to ask")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="how many to show (default: 2)")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the attention of one draft layer")
    parser.add_argument("--plot-layer", type=int, default=-1, metavar="I", help="which (default: the last)")
    add_pair_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Explain; draw if asked to."""
    check_arguments(args)
    check_text("PROMPT", args.prompt)
    pair = load_pair(args)
    check_layer(pair, args.plot_layer)
    prompt_ids = encode_chat(pair.tokenizer, [{"role": "user", "content": args.prompt}])
    trace = trace_rounds(pair, prompt_ids, args.rounds, with_attention=args.plot is not None)
    print("\n".join(Explanation(pair, trace, args.rounds).lines()))
    if args.plot is not None:
        from .explain_plot import draw_attention

        draw_attention(pair, trace, min(args.rounds, len(trace.rounds)) - 1, args.plot_layer, args.plot)
        print(f"\nDrew the attention of draft layer {args.plot_layer % len(pair.draft.layers)} in {args.plot}.")
    return 0


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse what can be told before loading anything.

    Raises:
        ValueError: If no rounds are asked for, or the plot cannot be written.
    """
    if args.rounds < 1:
        raise ValueError(f"--rounds is {args.rounds}; it must be at least 1.")
    if args.plot is not None and args.plot.suffix.lower() != ".png":
        raise ValueError(f"--plot is {args.plot}, but the plot is a PNG; give it a name that ends in .png.")
    if args.plot is not None and not args.plot.absolute().parent.is_dir():
        raise ValueError(f"--plot is {args.plot}, but the folder {args.plot.absolute().parent} does not exist.")


def check_layer(pair: Pair, layer: int) -> None:
    """Refuse a layer that the draft does not have."""
    count = len(pair.draft.layers)
    if not -count <= layer < count:
        raise ValueError(f"--plot-layer is {layer} but the draft has {count} layers, 0 to {count - 1}.")


def trace_rounds(pair: Pair, prompt_ids: list[int], rounds: int, with_attention: bool = False) -> Trace:
    """Generate greedily, long enough for `rounds` whole blocks, and keep what was seen."""
    import torch

    from .trace import Trace, traced

    max_new_tokens = 1 + rounds * (pair.draft.config.num_proposals + 1)
    check_length(pair.target, len(prompt_ids), max_new_tokens, f"--rounds is {rounds} (up to {max_new_tokens} tokens)")
    for name, value in whole_chains(pair.draft).items():
        setattr(pair.draft.generation_config, name, value)
    if with_attention:
        pair.draft.set_attn_implementation("eager")  # the only one that returns its weights
    input_ids = torch.tensor([prompt_ids], device=pair.target.device)
    trace = Trace(prompt_ids)
    with traced(pair.draft, trace):
        pair.target.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            assistant_model=pair.draft,
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
    if not trace.rounds:
        raise ValueError("The target ended its answer with the first token, so there is no round to show; ask else.")
    return trace


def whole_chains(draft: Any) -> dict[str, Any]:
    """The settings of a draft that the walkthrough is of: every block whole, and no tree."""
    return {
        "draft_tree_budget": 0,
        "num_assistant_tokens_schedule": "constant",
        "num_assistant_tokens": draft.config.num_proposals,
        "assistant_confidence_threshold": 0.0,
    }


class Explanation:
    """A trace in words."""

    def __init__(self, pair: Pair, trace: Trace, rounds: int):
        self.pair = pair
        self.trace = trace
        self.rounds = trace.rounds[:rounds]
        self.config = pair.draft.config
        ends = pair.target.generation_config.eos_token_id
        self.end_tokens = ends if isinstance(ends, list) else [ends]

    def lines(self) -> list[str]:
        """All of it."""
        lines = [*self._models(), "", *self._prefill()]
        start = len(self.trace.prompt_ids)  # position of the next anchor
        for number, each in enumerate(self.rounds, start=1):
            lines += ["", f"Round {number}", *self._draft(each), *self._verify(each, start)]
            start += len(each.committed)
        text = self.pair.tokenizer.decode([self.trace.first_token, *[t for r in self.rounds for t in r.committed]])
        count = sum(len(each.committed) for each in self.rounds)
        means = f"{count / len(self.rounds):.2f} tokens a round"
        return [*lines, "", f"{len(self.rounds)} rounds committed {count} tokens, {means}: {text!r}"]

    def _models(self) -> list[str]:
        text, draft = self.pair.target.config.get_text_config(decoder=True), self.config
        layers, hidden = text.num_hidden_layers, text.hidden_size
        taps = ", ".join(str(layer) for layer in draft.target_layer_ids)
        heads = (
            f"{draft.num_attention_heads} heads of {draft.head_dim}, {draft.num_key_value_heads} for keys and values"
        )
        return [
            f"Target {self.pair.target_name}: layers 0 to {layers - 1}, hidden size H = {hidden}, "
            f"vocabulary V = {text.vocab_size}",
            f"Draft {self.pair.draft_name}: {draft.num_hidden_layers} layers, {heads}",
            f"  block: K = {draft.block_size} slots, an anchor and {draft.block_size - 1} masks "
            f"(token {draft.mask_token_id})",
            f"  taps: the outputs of the target's layers {taps}; L = {len(draft.target_layer_ids)}",
        ]

    def _prefill(self) -> list[str]:
        trace, count = self.trace, len(self.trace.prompt_ids)
        numbered = [f"{i} {self._token(token)}" for i, token in enumerate(trace.prompt_ids)]
        shown = numbered if count <= 12 else [*numbered[:4], "...", *numbered[-6:]]
        return [
            "Prefill",
            f"  The target reads the prompt, {count} tokens at positions {_span(0, count - 1)}:",
            f"    {'  '.join(shown)}",
            f"  Tapped and concatenated: {_shape(trace.prompt_taps)} = (B, S, L * H)",
            f"  It answers {self._token(trace.first_token)}, the token of position {count}. It belongs to no round; "
            "it is the first anchor.",
            f"  Target's cache: {trace.cached_after_prefill} positions. Draft's cache: empty.",
        ]

    def _draft(self, each: Round) -> list[str]:
        new, block = _span(*each.new_positions), _span(*each.block_positions)
        tokens = " ".join(["MASK" if i else self._token(token) for i, token in enumerate(each.block_ids)])
        old = each.projected_keys[1] - len(each.block_ids)
        lines = [
            f"  1. Fuse: the taps at {new}, {_shape(each.taps)}, become the context "
            f"C = hidden_norm(fc(taps)), {_shape(each.context)} = (B, S, H)",
            f"  2. Block at positions {block}, embedded by the target, {_shape(each.block_embeds)} = (B, K, H):",
            f"       {tokens}",
            f"  3. Inject, in each of the {len(self.pair.draft.layers)} layers: queries from the block alone, "
            f"{_shape(each.queries)} = (B, K, heads, D),",
            f"     keys and values from C and from the block through the same projections, {old} + "
            f"{len(each.block_ids)} rows projected in this round; all rows {_shape(each.keys)}:",
        ]
        lines += self._key_rows(each)
        return [*lines, f"     queries are rotated at positions {block}, the last of the keys' positions"]

    def _key_rows(self, each: Round) -> list[str]:
        """Which rows of the first layer's K and V come from where."""
        first_new = each.new_positions[0]
        groups = [
            ("target features, cached in earlier rounds", [p for p in each.layouts[0][0] if p < first_new]),
            ("target features, new in this round", [p for p in each.layouts[0][0] if p >= first_new]),
            ("block", each.layouts[0][1]),
        ]
        return [
            f"       {len(positions):5d} from the {source}: position{_span(min(positions), max(positions), 's ')}"
            for source, positions in groups
            if positions
        ]

    def _verify(self, each: Round, start: int) -> list[str]:
        width = len(each.candidates) + 1
        block = _span(start, start + width - 1)
        lines = [
            f"  4. Head over slots {self._slots(each)}",
            f"  5. Verify: the target reads anchor and candidates at positions {block} in one forward, logits "
            f"{_shape((1, *each.target_logits.shape))}:",
            f"       {'position':>8}  {'draft proposes':<26} {'target answers':<26}",
            *self._candidates(each, start),
        ]
        taken = " ".join(self._token(token) for token in each.candidates[: each.num_accepted]) or "nothing"
        return [
            *lines,
            f"  6. Accept {each.num_accepted} of {len(each.candidates)}: {taken}; {self._what_follows(each)}. "
            f"The round commits {len(each.committed)}.",
            f"  7. Caches: the target's keeps positions {_span(0, each.target_length - 1)} and drops "
            f"{width - len(each.committed)}; the draft's holds the context of {_span(0, each.draft_length - 1)}, and "
            "its block rows will be overwritten.",
        ]

    def _candidates(self, each: Round, start: int) -> list[str]:
        draft_probs, target_probs = each.logits.softmax(-1), each.target_logits.softmax(-1)
        lines = []
        for slot in range(len(each.target_logits)):
            answer = int(each.target_logits[slot].argmax())
            right = f"{self._token(answer)} {target_probs[slot, answer]:.0%}"
            if slot == len(each.candidates):
                left = ""
            else:
                proposal = each.candidates[slot]
                left = f"{self._token(proposal)} {draft_probs[slot, proposal]:.0%}"
            lines.append(f"       {start + slot + 1:>8}  {left:<26} {right:<26} {_verdict(each, slot)}")
        return lines

    def _slots(self, each: Round) -> str:
        last, logits = len(each.block_ids) - 1, _shape((1, *each.logits.shape))
        if self.config.slots_predict_next:
            return f"0 to {last}: logits {logits} = (B, K, V); each slot proposes the token behind it"
        return f"1 to {last}: logits {logits} = (B, K - 1, V); the anchor's own slot proposes nothing"

    def _what_follows(self, each: Round) -> str:
        if each.ends_in_candidate:
            return "the last of them ends the text, so no token of the target's own follows"
        own, is_end = self._token(each.committed[-1]), each.committed[-1] in self.end_tokens
        return f"the target's own {own} follows and {'ends the text' if is_end else 'is the next anchor'}"

    def _token(self, token: int) -> str:
        return repr(self.pair.tokenizer.decode([token]))


def _verdict(each: Round, slot: int) -> str:
    """What became of a slot's candidate; the slot behind the last candidate has none."""
    if slot < each.num_accepted:
        return "accepted"
    if slot > each.num_accepted or each.ends_in_candidate:
        return "not asked"
    return "own" if slot == len(each.candidates) else "refused, the target's own instead"


def _shape(shape: tuple[int, ...]) -> str:
    return "(" + ", ".join(str(size) for size in shape) + ")"


def _span(first: int, last: int, plural: str = "") -> str:
    return f"{plural}{first}..{last}" if last > first else f"{' ' if plural else ''}{first}"


__all__ = ["Explanation", "add_parser", "run", "trace_rounds"]
