"""What `import dflash_hf` costs: processor seconds of fresh interpreters, the least of several runs each.

    python benchmarks/import_time.py

Transformers loads its parts on first use. So there are two baselines: `import torch, transformers`, which loads
almost nothing of it, and with what a script that generates text loads: `AutoModelForCausalLM`, `GenerationMixin`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

IMPORTS = {
    "torch, transformers": "import torch, transformers",
    "with dflash_hf": "import torch, transformers, dflash_hf",
    "torch, transformers, generate": (
        "import torch, transformers; from transformers import AutoModelForCausalLM, GenerationMixin"
    ),
    "with dflash_hf, generate": (
        "import torch, transformers; from transformers import AutoModelForCausalLM, GenerationMixin; import dflash_hf"
    ),
}


def processor_seconds(code: str, runs: int) -> float:
    """The least processor time of a fresh interpreter that runs `code`; other load moves it less than wall time."""
    found = []
    for _ in range(runs):
        before = os.times()
        subprocess.run([sys.executable, "-c", code], check=True, stderr=subprocess.DEVNULL)
        after = os.times()
        user, system = (getattr(after, n) - getattr(before, n) for n in ("children_user", "children_system"))
        found.append(user + system)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    for name, code in IMPORTS.items():
        print(f"{name:<32} {processor_seconds(code, args.runs):6.2f} s", flush=True)


if __name__ == "__main__":
    main()
