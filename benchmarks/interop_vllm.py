"""Greedy answers of vLLM with a DFlash draft, and its own count of what was accepted. Runs in vLLM's environment.

Reads a request from standard input (JSON: target, draft, prompts, max_new_tokens, num_speculative_tokens, output) and
writes one line per prompt to the file that it names: token ids, drafted rounds, accepted candidates, and, at the place
of each token, the ids of vLLM's two best and by how much it prefers the first.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

COUNTERS = {
    "rounds": "vllm:spec_decode_num_drafts",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}


def counts(llm: Any) -> dict[str, int]:
    """vLLM's counters since it started."""
    values = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return {name: int(values.get(counter, 0)) for name, counter in COUNTERS.items()}


def preferences(llm: Any, prompt: list[int], tokens: list[int], sampling: Any) -> list[tuple[int, int, float]]:
    """At the place of every token of an answer: the two best tokens, and the difference of their log-probabilities."""
    places = llm.generate({"prompt_token_ids": prompt + tokens}, sampling, use_tqdm=False)[0].prompt_logprobs
    found = []
    for place in places[len(prompt) :]:
        (first, a), (second, b) = sorted(place.items(), key=lambda item: -item[1].logprob)[:2]
        found.append((first, second, a.logprob - b.logprob))
    return found


def main() -> None:
    from vllm import LLM, SamplingParams

    request = json.load(sys.stdin)
    llm = LLM(
        model=request["target"],
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=1,
        disable_log_stats=False,
        speculative_config={
            "method": "dflash",
            "model": request["draft"],
            "num_speculative_tokens": request["num_speculative_tokens"],
        },
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=request["max_new_tokens"], ignore_eos=True)
    judging = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2)
    with open(request["output"], "w", encoding="utf-8") as output:
        for prompt in request["prompts"]:
            before = counts(llm)
            answer = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)[0]
            after = counts(llm)
            row = {name: after[name] - before[name] for name in COUNTERS}
            tokens = list(answer.outputs[0].token_ids)
            row |= {"tokens": tokens, "preferences": preferences(llm, prompt, tokens, judging)}
            output.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
