"""A stranger's machine: loads a draft's repository with Transformers and torch alone and reports what it saw as JSON.

Run as a script in an isolated interpreter (`python -I stranger.py JOB`), so it imports nothing of this package; the
package is hidden even where it is installed. Loading may neither connect anywhere nor unpickle anything: an audit hook
notes each attempt.
"""

from __future__ import annotations

import hashlib
import importlib.abc
import json
import sys
from pathlib import Path
from typing import Any

PACKAGE = "dflash_hf"
SEED = 20260206
NUM_CONTEXT = 5
NEW_TOKENS = 24


class Hidden(importlib.abc.MetaPathFinder):
    """Makes the installed package invisible."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == PACKAGE:
            raise ModuleNotFoundError(f"No module named {name!r} on a stranger's machine", name=name)


def watch() -> list[str]:
    """Note, from now on, each connection and each object that an unpickler looks up."""
    seen: list[str] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("socket.connect", "socket.getaddrinfo", "pickle.find_class"):
            seen.append(f"{event} {arguments[1:]}")

    sys.addaudithook(hook)
    return seen


def weights_digest(model: Any) -> str:
    """One SHA-256 over names, types, shapes and bytes of all tensors."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def run_block(draft: Any) -> list[float]:
    """Hidden states of one block behind a context, both from seeded noise, flat, in float32 on the CPU."""
    import copy

    import torch

    draft = copy.deepcopy(draft).to(device="cpu", dtype=torch.float32).eval()
    config, generator = draft.config, torch.Generator().manual_seed(SEED)
    block = torch.randn(1, config.block_size, config.hidden_size, generator=generator)  # (B, K, H)
    width = len(config.target_layer_ids) * config.hidden_size
    context = torch.randn(1, NUM_CONTEXT, width, generator=generator)  # (B, S, L * H)
    with torch.no_grad():
        return draft(block, context).last_hidden_state.flatten().tolist()


def generate_both(draft: Any, folder: str) -> dict[str, Any]:
    """Greedy tokens of the target with the draft against the target's own, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    draft = draft.float()
    vocabulary = target.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(SEED)
    prompt = torch.randint(0, vocabulary, (1, 16), generator=generator)  # (B, S)
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    plain = target.generate(prompt, **settings)
    drafted = target.generate(prompt, assistant_model=draft, **settings)
    return {"identical": plain.tolist() == drafted.tolist(), "tokens": drafted[0, prompt.shape[1] :].tolist()}


def executed_files() -> list[str]:
    """The files of remote code that this process has run."""
    from transformers.utils import HF_MODULES_CACHE

    cache = Path(HF_MODULES_CACHE).resolve()
    paths = [
        Path(module.__file__).resolve() for module in list(sys.modules.values()) if getattr(module, "__file__", None)
    ]
    return sorted({path.name for path in paths if cache in path.parents and path.name != "__init__.py"})


def main() -> None:
    """Do the job given as JSON in the first argument; print what was found as JSON."""
    job = json.loads(sys.argv[1])
    sys.meta_path.insert(0, Hidden())
    import torch  # noqa: F401  (imported before the watch: what torch does at import is not the repository's doing)
    from transformers import AutoModel
    from transformers.models.qwen3 import modeling_qwen3  # noqa: F401

    forbidden = watch()
    draft, info = AutoModel.from_pretrained(
        job["folder"], trust_remote_code=True, dtype="auto", output_loading_info=True
    )
    events = list(forbidden)
    report = {
        "loading": {kind: sorted(map(str, names)) for kind, names in info.items() if kind.endswith("_keys")},
        "forbidden": events,
        "weights": weights_digest(draft),
        "block": run_block(draft),
        "generation": generate_both(draft, job["target"]) if job["target"] else None,
        "executed": executed_files(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
