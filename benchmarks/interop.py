"""Does a serving engine read our exports and accept what we accept? vLLM on the CPU against `generate`, both in bf16.

Every export that vLLM reads is written from one draft and served; the tokens of ten greedy answers and the acceptance
lengths are compared with our own. `make interop` builds vLLM's environment and runs this; it is no part of the tests.

bf16 kernels of two libraries round differently, so two greedy texts may part, at a near tie of the target's logits.
How near is measured: where they part, the target in float32 must prefer one of the two tokens by no more than bf16,
in Transformers or in vLLM, shifts the difference of two best logits in these answers. What is accepted is compared on
one text all the same: ours is measured along the tokens that vLLM answered, in bf16 and, as a measure of what rounding
does to it, in float32. Both are tokens behind the first for each drafted round: vLLM's own counter (`theirs_counted`)
takes in tokens beyond the end of an answer, too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from dflash_hf import load_draft
from dflash_hf.checkpoints.convert import convert
from dflash_hf.embedded import default_draft_path, embedded_target_path, load_embedded_target

QUESTIONS = [
    "What causes the seasons to change on Earth?",
    "Who wrote the play Romeo and Juliet?",
    "How do vaccines protect people from disease?",
    "What is the capital of Australia?",
    "Why is the sky blue?",
    "What does a heart do?",
    "Name three planets of the solar system.",
    "How is bread made?",
    "What is photosynthesis?",
    "Why do we sleep?",
]
FORMATS = ("zlab", "speculators")  # on the CPU vLLM 0.32 starts a native draft, but with other taps than its own
TOLERANCE = 0.03  # of the mean acceptance length: a draft's near ties fall either way, too


def prompts_of(tokenizer: Any) -> list[list[int]]:
    """Token ids of the questions in the target's chat template."""
    return [
        tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)["input_ids"]
        for question in QUESTIONS
    ]


def served(
    python: str, target: Path, draft: Path, prompts: list[list[int]], max_new_tokens: int, num: int
) -> list[Any]:
    """vLLM's answers: tokens, rounds and accepted candidates per prompt."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "answers.jsonl"
        request = {
            "target": str(target),
            "draft": str(draft),
            "prompts": prompts,
            "max_new_tokens": max_new_tokens,
            "num_speculative_tokens": num,
            "output": str(output),
        }
        script = Path(__file__).with_name("interop_vllm.py")
        subprocess.run([python, str(script)], input=json.dumps(request), text=True, check=True)
        return [json.loads(line) for line in output.read_text().splitlines()]


class Follows(LogitsProcessor):
    """Lets the target say a given text. A processor that `generate` does not know is not shown to the draft."""

    def __init__(self, text: list[int]):
        self.text = text  # prompt included

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores (1, V) that leave the next token of the text."""
        scores = torch.full_like(scores, -torch.inf)
        scores[:, self.text[input_ids.shape[1]]] = 0
        return scores


def generated(
    target: Any, draft: Any, prompt: list[int], max_new_tokens: int, text: list[int] | None = None
) -> tuple[list[int], list[int]]:
    """Our answer, or `text` as if it were, and the tokens that each round committed."""
    ids = torch.tensor([prompt])
    follows = LogitsProcessorList([] if text is None else [Follows(prompt + text)])
    output = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),  # else the template's end tokens would pass for padding
        assistant_model=draft,
        logits_processor=follows,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
    )
    return output.sequences[0, len(prompt) :].tolist(), output.acceptance_lengths[0]


@torch.no_grad()
def scores_of(target: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Float32 logits (n, V) that the target, in its own dtype, gives at the place of each of the tokens."""
    ids = torch.tensor([prompt + tokens])
    return target(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()


def rounding(exact: torch.Tensor, rounded: torch.Tensor) -> float:
    """The most that bf16 shifts the difference of the two best logits, over the places of a text; (n, V) each."""
    best = rounded.topk(2).indices
    first, second = ((rounded - exact).gather(1, best)).unbind(dim=1)
    return (first - second).abs().max().item()


def rounding_of_vllm(exact: torch.Tensor, preferences: list[tuple[int, int, float]]) -> float:
    """The same for vLLM, which says its two best tokens at each place and by how much it prefers the first."""
    shifts = [
        abs(gap - (scores[first] - scores[second]).item())
        for scores, (first, second, gap) in zip(exact, preferences, strict=True)
    ]
    return max(shifts)


def compare(pairs: dict[str, tuple[Any, Any]], prompt: list[int], tokens: list[int], theirs: dict[str, Any]) -> Any:
    """One prompt's figures on vLLM's text; `place` is where our own answer parts from it, `None` if it does not.

    Args:
        pairs: Target and draft, by the name of their dtype.
        prompt: Token ids.
        tokens: Our answer.
        theirs: vLLM's, and its counts.
    """
    text = theirs["tokens"]
    means = {}
    for dtype, (target, draft) in pairs.items():
        _, lengths = generated(target, draft, prompt, len(tokens), text)
        means[dtype] = sum(lengths) / len(lengths)
    exact, rounded = (scores_of(pairs[dtype][0], prompt, text) for dtype in ("float32", "bfloat16"))
    place = next((i for i, (a, b) in enumerate(zip(tokens, text, strict=True)) if a != b), None)
    return {
        "ours": means["bfloat16"],
        "ours_in_float32": means["float32"],
        "theirs": (len(text) - 1) / theirs["rounds"],  # the first token comes with the prompt
        "theirs_counted": 1 + theirs["accepted"] / theirs["rounds"],
        "place": place,
        "gap": None if place is None else (exact[place, tokens[place]] - exact[place, text[place]]).abs().item(),
        "rounding": rounding(exact, rounded),
        "rounding_of_vllm": rounding_of_vllm(exact, theirs["preferences"]),
    }


def load_pairs(source: Path) -> tuple[dict[str, tuple[Any, Any]], Any]:
    """Target and draft in bf16 and in float32, and the tokenizer."""
    pairs = {}
    for dtype in ("bfloat16", "float32"):
        target, tokenizer = load_embedded_target(dtype)
        draft = load_draft(source, target)
        draft.generation_config.draft_tree_budget = 0  # vLLM drafts chains
        target.generation_config.eos_token_id = None  # it is told to go on behind an end token
        pairs[dtype] = target, draft
    return pairs, tokenizer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", required=True, help="Python of an environment with vLLM")
    parser.add_argument("--draft", default=None, help="default: the embedded pair's draft")
    parser.add_argument("--to", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--prompts", type=int, default=len(QUESTIONS))
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    args = parser.parse_args()
    source = Path(args.draft or default_draft_path())
    pairs, tokenizer = load_pairs(source)
    target, draft = pairs["bfloat16"]
    prompts = prompts_of(tokenizer)[: args.prompts]
    answers = [generated(target, draft, prompt, args.max_new_tokens)[0] for prompt in prompts]
    record: dict[str, Any] = {"draft": source.name, "max_new_tokens": args.max_new_tokens, "formats": {}}
    agrees = True
    with tempfile.TemporaryDirectory() as folder:
        for to in args.to:
            exported = Path(folder) / to
            convert(source, exported, to, str(embedded_target_path()))
            num = draft.config.num_proposals
            try:
                served_rows = served(
                    args.vllm_python, embedded_target_path(), exported, prompts, args.max_new_tokens, num
                )
            except subprocess.CalledProcessError as error:
                print(f"{to}: vLLM did not serve it (exit status {error.returncode})", flush=True)
                record["formats"][to], agrees = None, False
                continue
            rows = [
                compare(pairs, prompt, tokens, theirs)
                for prompt, tokens, theirs in zip(prompts, answers, served_rows, strict=True)
            ]
            record["formats"][to] = rows
            agrees &= report(to, rows)
    if args.output:
        args.output.write_text(json.dumps(record, indent=2) + "\n")
    return 0 if agrees else 1


def report(to: str, rows: list[dict[str, Any]]) -> bool:
    """Print a format's figures; whether vLLM accepts as much on the same text, and parts from us at near ties."""
    print(f"{to}: acceptance length on vLLM's text: ours (and in float32), its; where our own answer parts from it")
    shifts = [max(row[name] for row in rows) for name in ("rounding", "rounding_of_vllm")]
    agrees = True
    for row in rows:
        same = row["place"] is None
        parting = "same tokens" if same else f"part at token {row['place']}, gap in float32 {row['gap']:.3f}"
        print(f"  {row['ours']:.2f} ({row['ours_in_float32']:.2f})  {row['theirs']:.2f}  {parting}")
        agrees &= same or row["gap"] <= max(shifts)
    ours, exact, theirs = (sum(row[n] for row in rows) / len(rows) for n in ("ours", "ours_in_float32", "theirs"))
    agrees &= abs(ours - theirs) <= TOLERANCE * ours
    print(f"  {ours:.2f} ({exact:.2f})  {theirs:.2f}  mean of {len(rows)}: {'agrees' if agrees else 'DISAGREES'}")
    print(f"  bf16 shifts a gap by up to {shifts[0]:.3f} here, {shifts[1]:.3f} in vLLM", flush=True)
    return agrees


if __name__ == "__main__":
    sys.exit(main())
