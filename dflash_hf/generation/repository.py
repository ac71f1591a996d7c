"""The code files that a saved draft carries, so that every save is a Hub repository which works alone.

Transformers looks a remote module's relative imports up as files beside it: on the Hub the code is flat. There
`generation/__init__.py` is `generation.py`, and the other modules of `generation/` stand beside it; every file is copied
byte for byte. Code that was itself loaded from a repository is flat already.
"""

import os
import shutil
from pathlib import Path

from transformers.dynamic_module_utils import get_relative_imports

AUTO_MAP = {
    "AutoConfig": "configuration_dflash.DFlashConfig",
    "AutoModel": "modeling_dflash.Qwen3DFlashForDraft",
}
ENTRY_FILES = ("configuration_dflash.py", "modeling_dflash.py")


def code_files() -> dict[str, Path]:
    """The flat code files of this very copy of the code: name in a repository -> file on this machine.

    Raises:
        FileNotFoundError: If a module that the code imports is not where this copy of the code expects it.
    """
    here = Path(__file__).resolve().parent
    modules = {path.name: path for path in here.glob("*.py") if path.name != "__init__.py"}
    folder = here
    if (here / "__init__.py").is_file() and (here.parent / ENTRY_FILES[1]).is_file():
        modules["generation.py"] = here / "__init__.py"
        folder = here.parent
    pending = list(ENTRY_FILES)
    while pending:
        name = pending.pop()
        source = modules.setdefault(name, folder / name)
        if not source.is_file():
            raise FileNotFoundError(f"The draft's code cannot be saved: {name} is missing in {folder}.")
        pending += [f"{module}.py" for module in get_relative_imports(source) if f"{module}.py" not in modules]
    return dict(sorted(modules.items()))


def save_code(folder: str | os.PathLike[str]) -> list[str]:
    """Write the flat code files into `folder`, each aside and then renamed; returns their names."""
    files = code_files()
    for name, source in files.items():
        target = Path(folder) / name
        if target.exists() and target.samefile(source):
            continue
        aside = target.with_name(f".{name}.{os.getpid()}")
        shutil.copyfile(source, aside)
        os.replace(aside, target)
    return list(files)


__all__ = ["AUTO_MAP", "ENTRY_FILES", "code_files", "save_code"]
