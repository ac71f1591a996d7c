"""The output inside `docs/walkthrough.md`: `python tests/walkthrough_page.py` puts today's into the page."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "walkthrough.md"
PROMPT = "What is the capital of France?"
ROUNDS = 2
SECTION = re.compile(r"<!-- explain: (?P<name>[^\n]*?) -->\n(?P<body>.*?)<!-- end -->", re.S)


def explain() -> dict[str, str]:
    """What `dflash-hf explain` says, by part: models, prefill, round 1, round 2."""
    from dflash_hf.evaluation.explain import Explanation, trace_rounds
    from dflash_hf.evaluation.models import encode_chat, load_pair

    pair = load_pair(argparse.Namespace(target=None, draft=None, dtype="float32", device="cpu"))
    prompt_ids = encode_chat(pair.tokenizer, [{"role": "user", "content": PROMPT}])
    text = "\n".join(Explanation(pair, trace_rounds(pair, prompt_ids, ROUNDS), ROUNDS).lines())
    models, prefill, *rounds = text.split("\n\n")[: 2 + ROUNDS]
    return {"models": models, "prefill": prefill} | {f"round {n}": part for n, part in enumerate(rounds, start=1)}


def sections(page: str) -> dict[str, str]:
    """The page's output by part, without its fence."""
    return {m["name"]: m["body"].removeprefix("```text\n").removesuffix("\n```\n") for m in SECTION.finditer(page)}


def filled(page: str, parts: dict[str, str]) -> str:
    """The page with these parts in it."""
    return SECTION.sub(
        lambda m: f"<!-- explain: {m['name']} -->\n```text\n{parts[m['name']]}\n```\n<!-- end -->", page
    )


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), explain()), encoding="utf-8")
