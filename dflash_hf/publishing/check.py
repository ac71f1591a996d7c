"""The check before an upload: does the staged repository work for someone who has only Transformers and torch?

First the files are read (`lint_stage`); then a clean subprocess loads them by remote code, offline, without this
package, and runs one block, whose result and weights are compared with the source draft's (`stranger.py` is that
subprocess).
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .stage import Stage
from .stranger import run_block, weights_digest

STRANGER = Path(__file__).parent / "stranger.py"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
REQUIRED = ("config.json", "generation_config.json", "README.md", "LICENSE")
ALLOWED_PACKAGES = {"torch", "transformers", "huggingface_hub", "safetensors", "numpy"}
TIMEOUT = 900


def check_stage(stage: Stage, draft: Any, target: Path | None = None) -> dict[str, Any]:
    """Prove that the staged repository is `draft`, and works alone; returns what the subprocess saw.

    Args:
        target: A folder of the target's weights. With it, `generate` with the draft is compared to the target alone.

    Raises:
        ValueError: With every fault found, if there is one.
    """
    if faults := lint_stage(stage.folder):
        raise ValueError(f"The staged repository is faulty, nothing was uploaded: {'; '.join(faults)}.")
    with tempfile.TemporaryDirectory() as home:
        report = run_stranger(stage.folder, Path(home), target)
    if faults := compare(report, draft, stage):
        raise ValueError(f"The staged repository does not work alone, nothing was uploaded: {'; '.join(faults)}.")
    return report


def lint_stage(folder: Path) -> list[str]:
    """What is wrong with the files of a staged repository, as phrases."""
    faults = [f"{name} is missing" for name in REQUIRED if not (folder / name).is_file()]
    faults += [f"{path.name} may hold pickled code" for path in folder.rglob("*") if path.suffix in PICKLES]
    if not any(folder.glob("*.safetensors")):
        faults.append("there are no safetensors weights")
    if (folder / "config.json").is_file():
        faults += lint_config(folder)
    return faults + lint_code(folder)


def lint_config(folder: Path) -> list[str]:
    """What is wrong with config.json: `auto_map`, architecture, model type, target."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    faults = []
    if config.get("model_type") != "dflash":
        faults.append(f"config.json has model_type {config.get('model_type')!r}, not 'dflash'")
    if not config.get("target_name_or_path"):
        faults.append("config.json names no target (`target_name_or_path`)")
    auto_map = config.get("auto_map") or {}
    faults += [f"auto_map lacks {name}" for name in ("AutoConfig", "AutoModel") if name not in auto_map]
    for name, reference in auto_map.items():
        if not re.fullmatch(r"Auto[A-Z]\w*", name):
            faults.append(f"auto_map has the key {name!r}, which is no Auto class")
        elif not _class_exists(folder, reference):
            faults.append(f"auto_map's {name} points to {reference!r}, which is not in this repository")
    classes = {str(reference).split(".")[-1] for reference in auto_map.values()}
    unknown = set(config.get("architectures") or ["none"]) - classes
    return faults + [f"architectures names {name!r}, which auto_map does not" for name in sorted(unknown)]


def _class_exists(folder: Path, reference: Any) -> bool:
    file, _, name = str(reference).partition(".")
    path = folder / f"{file}.py"
    if not re.fullmatch(r"\w+", file) or not path.is_file():
        return False
    return any(
        isinstance(node, ast.ClassDef) and node.name == name for node in ast.parse(path.read_text("utf-8")).body
    )


def lint_code(folder: Path) -> list[str]:
    """What the dynamic-module loader would stumble over: it finds relative imports by pattern, docstrings included."""
    from transformers.dynamic_module_utils import get_imports, get_relative_imports

    if faults := [f"{path.name} is not Python" for path in sorted(folder.rglob("*.py")) if not _is_python(path)]:
        return faults
    entries = [folder / name for name in ("configuration_dflash.py", "modeling_dflash.py")]
    reached, pending = set(), [path for path in entries if path.is_file()]
    while pending:
        path = pending.pop()
        reached.add(path)
        for module in get_relative_imports(path):
            sibling = folder / f"{module}.py"
            if not re.fullmatch(r"\w+", module) or not sibling.is_file():
                faults.append(f"{path.name} imports '.{module}', and there is no file {module}.py beside it")
            elif sibling not in reached:
                pending.append(sibling)
        faults += [f"{path.name} has '{line}', which the loader does not see" for line in _unseen_imports(path)]
        foreign = set(get_imports(path)) - ALLOWED_PACKAGES - sys.stdlib_module_names
        faults += [f"{path.name} imports {package}, which a stranger may not have" for package in sorted(foreign)]
    strays = set(folder.rglob("*.py")) - reached
    return faults + [f"{path.relative_to(folder)} is code that nothing imports" for path in sorted(strays)]


def _is_python(path: Path) -> bool:
    try:
        ast.parse(path.read_text("utf-8"))
    except (SyntaxError, ValueError):
        return False
    return True


def _unseen_imports(path: Path) -> list[str]:
    """Relative imports in forms that the loader's pattern misses or misreads."""
    imports = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ImportFrom)]
    return [ast.unparse(node) for node in imports if node.level > 1 or (node.level == 1 and not node.module)]


def run_stranger(folder: Path, home: Path, target: Path | None = None) -> dict[str, Any]:
    """Load `folder` in a clean subprocess whose `HF_HOME` is the empty folder `home`; returns its report.

    Raises:
        ValueError: If the subprocess fails; the message carries its last line.
    """
    job = {"folder": str(folder.resolve()), "target": None if target is None else str(target.resolve())}
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHON"))}
    environment |= {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(
        [sys.executable, "-I", str(STRANGER), json.dumps(job)],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise ValueError(
            "The staged repository does not load without this package, nothing was uploaded: "
            f"{lines[-1].strip() if lines else f'exit status {done.returncode}'}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def compare(report: dict[str, Any], draft: Any, stage: Stage) -> list[str]:
    """The differences between what the stranger saw and the source draft, as phrases."""
    import torch

    faults = [f"{kind} tensors: {', '.join(names)}" for kind, names in report["loading"].items() if names]
    code = sorted(file.path for file in stage.files if file.path.endswith(".py"))
    if report["executed"] != code:
        faults.append(f"loading ran {report['executed']}, not the repository's own {code}")
    if report["weights"] != weights_digest(draft):
        faults.append("the loaded weights differ from the draft's")
    expected = torch.tensor(run_block(draft))
    seen = torch.tensor(report["block"])
    if seen.shape != expected.shape or not torch.allclose(seen, expected, rtol=1e-4, atol=1e-4):
        faults.append("one block gives other hidden states than the draft's own")
    faults += [f"loading did what it must not: {event}" for event in report["forbidden"]]
    if report["generation"] and not report["generation"]["identical"]:
        faults.append("generating with the draft gives other tokens than the target alone")
    return faults
