"""The code files that a saved draft carries, so that every save is a Hub repository which works alone.

Transformers looks a remote module's relative imports up as files beside it: on the Hub the code is flat. In the package,
`generation/__init__.py` is `generation.py` there, and the other modules of `generation/` stand beside it; every file is
copied byte for byte. Code that was itself loaded from a repository is flat already.
"""

import os
import shutil
from pathlib import Path

AUTO_MAP = {
    "AutoConfig": "configuration_dflash.DFlashConfig",
    "AutoModel": "modeling_dflash.Qwen3DFlashForDraft",
}
ENTRY_FILES = ("configuration_dflash.py", "modeling_dflash.py")


def code_files() -> dict[str, Path]:
    """The flat code files of this very copy of the code: name in a repository -> file on this machine.

    Raises:
        FileNotFoundError: If the configuration or the modeling file is not where this copy of the code expects it.
    """
    here = Path(__file__).resolve().parent
    modules = {path.name: path for path in sorted(here.glob("*.py")) if path.name != "__init__.py"}
    if (here / "__init__.py").is_file() and (here.parent / ENTRY_FILES[1]).is_file():
        package = {name: here.parent / name for name in ENTRY_FILES}
        modules = {**package, "generation.py": here / "__init__.py", **modules}
    missing = [name for name in ENTRY_FILES if name not in modules or not modules[name].is_file()]
    if missing:
        raise FileNotFoundError(f"The draft's code cannot be saved: {', '.join(missing)} is missing beside {here}.")
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
