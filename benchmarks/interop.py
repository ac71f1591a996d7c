"""Does a serving engine read our exports and accept what we accept? vLLM on the CPU against `generate`, both in bf16.

Every export that vLLM reads is written from one draft and served; the tokens of ten greedy answers and the acceptance
lengths are compared with our own. `make interop` builds vLLM's environment and runs this; it is no part of the tests.

bf16 kernels of two libraries round differently, so two greedy texts may part, at a near tie of the target's logits.
What is accepted is compared on one text all the same: ours is measured along the tokens that vLLM answered.
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
NEAR_TIE = 0.25  # of logits around 20, where bf16 steps by 0.125
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
        assistant_model=draft,
        logits_processor=follows,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
    )
    return output.sequences[0, len(prompt) :].tolist(), output.acceptance_lengths[0]


def gap_at(target: Any, prompt: list[int], tokens: list[int], place: int) -> float:
    """By how much the target, on one prefix, prefers its first token to its second."""
    ids = torch.tensor([prompt + tokens[:place]])
    with torch.no_grad():
        first, second = target(ids, use_cache=False).logits[0, -1].float().topk(2).values.tolist()
    return first - second


def compare(target: Any, draft: Any, prompt: list[int], tokens: list[int], theirs: dict[str, Any]) -> dict[str, Any]:
    """One prompt's figures on vLLM's text; `place` is where our own answer parts from it, `None` if it does not."""
    _, lengths = generated(target, draft, prompt, len(tokens), theirs["tokens"])
    pairs = enumerate(zip(tokens, theirs["tokens"], strict=True))
    place = next((place for place, (a, b) in pairs if a != b), None)
    return {
        "ours": sum(lengths) / len(lengths),
        "theirs": 1 + theirs["accepted"] / max(theirs["rounds"], 1),
        "place": place,
        "gap": None if place is None else gap_at(target, prompt, tokens, place),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", required=True, help="Python of an environment with vLLM")
    parser.add_argument("--draft", default=None, help="default: the embedded pair's draft")
    parser.add_argument("--to", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--prompts", type=int, default=len(QUESTIONS))
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    args = parser.parse_args()
    target, tokenizer = load_embedded_target("bfloat16")
    source = Path(args.draft or default_draft_path())
    prompts = prompts_of(tokenizer)[: args.prompts]
    draft = load_draft(source, target)
    draft.generation_config.draft_tree_budget = 0  # vLLM drafts chains
    target.generation_config.eos_token_id = None  # it is told to go on behind an end token
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
                compare(target, draft, prompt, tokens, theirs)
                for prompt, tokens, theirs in zip(prompts, answers, served_rows, strict=True)
            ]
            record["formats"][to] = rows
            agrees &= report(to, rows)
    if args.output:
        args.output.write_text(json.dumps(record, indent=2) + "\n")
    return 0 if agrees else 1


def report(to: str, rows: list[dict[str, Any]]) -> bool:
    """Print a format's figures; whether vLLM accepts as much on the same text, and parts from us at near ties."""
    print(f"{to}: acceptance length on vLLM's text, ours and its, and where ours parts from it (gap of the logits)")
    agrees = True
    for row in rows:
        same = row["place"] is None
        parting = "same tokens" if same else f"part at token {row['place']}, gap {row['gap']:.3f}"
        print(f"  {row['ours']:.2f}  {row['theirs']:.2f}  {parting}")
        agrees &= same or row["gap"] <= NEAR_TIE
    mean = [sum(row[name] for row in rows) / len(rows) for name in ("ours", "theirs")]
    agrees &= abs(mean[0] - mean[1]) <= TOLERANCE * mean[0]
    print(f"  {mean[0]:.2f}  {mean[1]:.2f}  mean of {len(rows)}: {'agrees' if agrees else 'DISAGREES'}", flush=True)
    return agrees


if __name__ == "__main__":
    sys.exit(main())
