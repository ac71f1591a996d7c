"""Greedy answers of vLLM with a DFlash draft, and its own count of what was accepted. Runs in vLLM's environment.

Reads a request from standard input (JSON: target, draft, prompts, max_new_tokens, num_speculative_tokens, output) and
writes one line per prompt to the file that it names: token ids, drafted rounds, accepted candidates.
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
    with open(request["output"], "w", encoding="utf-8") as output:
        for prompt in request["prompts"]:
            before = counts(llm)
            answer = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)[0]
            after = counts(llm)
            row = {name: after[name] - before[name] for name in COUNTERS}
            output.write(json.dumps(row | {"tokens": list(answer.outputs[0].token_ids)}) + "\n")


if __name__ == "__main__":
    main()
