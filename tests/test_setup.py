"""What a user meets before any decoding: metadata, the cost of an import, the command line, the wheel."""

from __future__ import annotations

import ast
import importlib.metadata
import itertools
import os
import re
import shutil
import subprocess
import sys
import types
import venv
import zipfile
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement
from packaging.version import Version

import dflash_hf
from dflash_hf import cli
from helpers import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# What a draft's Hub repository carries, and a reader wants first.
LINKS = ["configuration_dflash.py", "generation", "modeling_dflash.py", "modeling_dflash_heads.py"]
MODULES = sorted((ROOT / "dflash_hf").rglob("*.py"))


def python(*arguments: str, executable: str = sys.executable, **kwargs) -> subprocess.CompletedProcess[str]:
    return subprocess.run([executable, *arguments], capture_output=True, text=True, **kwargs)


def printed(code: str, **kwargs) -> str:
    result = python("-W", "ignore", "-c", code, **kwargs)
    assert result.returncode == 0, result.stderr
    return result.stdout


def _normal(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


# ---------------------------------------------------------------- metadata


def test_version_is_the_same_wherever_it_is_stated():
    assert dflash_hf.__version__ == PYPROJECT["project"]["version"] == importlib.metadata.version("dflash-hf")
    assert f"## {dflash_hf.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_pins_lie_in_the_supported_ranges_and_cover_every_dependency():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = {_normal(Requirement(line).name): line.split("==")[1] for line in lines}
    extras = {k: v for k, v in PYPROJECT["project"]["optional-dependencies"].items() if k != "prompts"}
    declared = map(Requirement, itertools.chain(PYPROJECT["project"]["dependencies"], *extras.values()))
    for requirement in declared:
        if requirement.name != "dflash-hf":
            assert pins[_normal(requirement.name)] in requirement.specifier, requirement


def test_oldest_tested_transformers_is_the_oldest_supported():
    oldest = re.search(r"^OLDEST := transformers==(\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE).group(1)
    (declared,) = [r for r in map(Requirement, PYPROJECT["project"]["dependencies"]) if r.name == "transformers"]
    (lower,) = [bound.version for bound in declared.specifier if bound.operator == ">="]
    assert Version(oldest).release[:2] == Version(lower).release[:2]


@pytest.mark.parametrize("name", LINKS)
def test_root_link_leads_to_the_package(name):
    assert (ROOT / name).is_symlink()
    assert os.readlink(ROOT / name) == f"dflash_hf/{name}"
    assert (ROOT / name).exists()


# ---------------------------------------------------------------- imports


def test_import_pulls_no_heavy_optional_package():
    heavy = {"datasets", "gguf", "matplotlib", "openai", "pandas", "pyarrow"}  # Transformers itself takes the others
    loaded = printed("import dflash_hf, sys; print(*sys.modules)").split()
    assert "dflash_hf" in loaded
    assert not heavy & set(loaded)


def test_import_makes_drafts_known_to_the_auto_classes():
    code = """
import dflash_hf
from transformers import AutoConfig, AutoModel
config = AutoConfig.for_model("dflash", mask_token_id=1, target_layer_ids=[0], hidden_size=16, intermediate_size=16,
    num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8, vocab_size=32)
print(type(AutoModel.from_config(config)) is dflash_hf.Qwen3DFlashForDraft)
"""
    assert printed(code).strip() == "True"


def test_import_leaves_the_model_code_until_a_draft_is_made():
    loaded = printed("import dflash_hf, sys; print(*sys.modules)").split()
    assert "dflash_hf.configuration_dflash" in loaded
    assert not {"dflash_hf.modeling_dflash", "transformers.models.qwen3.modeling_qwen3"} & set(loaded)


def _public_definitions(path: Path) -> list[tuple[str, ast.AST]]:
    """The module, its public functions and its public classes, with their names."""
    tree = ast.parse(path.read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    public = [node for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]
    return [("the module", tree), *((node.name, node) for node in public)]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT / "dflash_hf")))
def test_everything_public_has_a_docstring(path):
    assert [name for name, node in _public_definitions(path) if not ast.get_docstring(node)] == []


def _third_party_imports(path: Path) -> set[str]:
    """Top-level names of the packages a module imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names) - {"dflash_hf"}


def test_every_imported_package_is_declared():
    lists = [*PYPROJECT["project"]["optional-dependencies"].values(), PYPROJECT["project"]["dependencies"]]
    peers = [line for line in (ROOT / "requirements-peers.txt").read_text().splitlines() if not line.startswith("#")]
    declared = {_normal(Requirement(line).name) for line in itertools.chain(peers, *lists)}
    providers = importlib.metadata.packages_distributions()
    tests = sorted((ROOT / "tests").glob("*.py"))
    for path in [*MODULES, *tests]:
        for name in _third_party_imports(path) - {test.stem for test in tests}:
            assert {_normal(provider) for provider in providers.get(name, [name])} & declared, f"{path}: {name}"


def test_differences_between_versions_are_confined_to_compat():
    inside = ROOT / "dflash_hf" / "generation" / "compat.py"
    tells = re.compile(r"packaging(\.version)? import|is_transformers_version|Version\(|past_key_values|cache_params")
    assert tells.search(inside.read_text())
    assert [path for path in MODULES if path != inside and tells.search(path.read_text())] == []


# ---------------------------------------------------------------- command line


def test_help_lists_every_command_without_loading_torch():
    code = """
import sys
sys.argv[0] = "/somewhere/bin/dflash-hf"  # as the installed script has it
from dflash_hf.cli import main
try:
    main(["--help"])
finally:
    print({"torch", "transformers", "datasets"} & set(sys.modules) or "nothing heavy")
"""
    result = python("-c", code)
    assert result.stdout.strip().endswith("nothing heavy")
    assert result.returncode == 0
    for name in cli.SUBCOMMANDS:
        assert re.search(rf"^    {name}\b", result.stdout, re.MULTILINE), name


@pytest.mark.parametrize("name", list(cli.SUBCOMMANDS))
def test_every_command_has_a_help_page(name, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    assert stop.value.code == 0
    assert f"usage: dflash-hf {name}" in capsys.readouterr().out


def test_installed_script_states_the_version():
    script = Path(sys.executable).with_name("dflash-hf")
    result = subprocess.run([script, "--version"], capture_output=True, text=True)
    assert result.stdout.strip() == f"dflash-hf {dflash_hf.__version__}"


def test_unknown_command_is_refused_with_the_choices(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["tarin"])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert "tarin" in message and "train" in message


@pytest.fixture
def failing(monkeypatch):
    """A command `fail` that raises what the test gives it."""
    module = types.ModuleType("failing_command")
    module.add_parser = lambda subparsers: subparsers.add_parser("fail")
    monkeypatch.setitem(sys.modules, "failing_command", module)
    monkeypatch.setattr(cli, "SUBCOMMANDS", {"fail": "failing_command"})
    monkeypatch.setattr(cli, "register", lambda: None)

    def run_with(outcome):
        def run(args):
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        module.run = run
        return cli.main(["fail"])

    return run_with


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("`block_size` is 40,\n  at most 16"), "error: `block_size` is 40, at most 16"),
        (FileNotFoundError(2, "No such file", "x.json"), "error: [Errno 2] No such file: 'x.json'"),
        (ValueError(), "error: ValueError"),
    ],
    ids=["value", "file", "no message"],
)
def test_mistake_becomes_one_line_and_status_2(failing, capsys, error, line):
    assert failing(error) == 2
    assert capsys.readouterr().err == f"{line}\n"


def test_traceback_is_shown_when_asked_for(failing, monkeypatch):
    monkeypatch.setenv("DFLASH_HF_TRACEBACK", "1")
    with pytest.raises(ValueError, match="deep inside"):
        failing(ValueError("deep inside"))


def test_fault_of_ours_is_not_disguised_as_a_mistake(failing):
    with pytest.raises(TypeError):
        failing(TypeError("a bug"))


@pytest.mark.parametrize(("outcome", "status"), [(None, 0), (0, 0), (1, 1), (KeyboardInterrupt(), 130)], ids=str)
def test_outcome_of_a_command_is_the_exit_status(failing, outcome, status):
    assert failing(outcome) == status


# ---------------------------------------------------------------- wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy of what belongs to it (a build leaves folders behind)."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", "hub_upload.py"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "dflash_hf", source / "dflash_hf", ignore=shutil.ignore_patterns("__pycache__"))
    for name in LINKS:
        (source / name).symlink_to(f"dflash_hf/{name}")
    out = tmp_path_factory.mktemp("wheel")
    pip = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(source))
    result = python(*pip)
    assert result.returncode == 0, result.stderr
    return next(out.glob("*.whl"))


@pytest.mark.slow
def test_wheel_holds_the_package_once_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    files = [path for path in (ROOT / "dflash_hf").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {str(path.relative_to(ROOT)) for path in files} <= set(names)
    assert len(names) == len(set(names))
    assert {name.split("/")[0] for name in names} == {"dflash_hf", f"dflash_hf-{dflash_hf.__version__}.dist-info"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def _runtime_closure() -> dict[str, importlib.metadata.Distribution]:
    """The distributions that `pip install dflash-hf` would bring, without any extra."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = list(PYPROJECT["project"]["dependencies"])
    while waiting:
        requirement = Requirement(waiting.pop())
        name = _normal(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found[name] = importlib.metadata.distribution(name)
        waiting += found[name].requires or []
    return found


@pytest.fixture(scope="module")
def clean_python(wheel, tmp_path_factory) -> str:
    """An interpreter that has the wheel and its declared dependencies (links to ours), and nothing else."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(folder, with_pip=True, symlinks=True)
    executable = str(folder / "bin" / "python")
    site = Path(printed("import sysconfig; print(sysconfig.get_path('purelib'))", executable=executable).strip())
    for distribution in _runtime_closure().values():
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(distribution.locate_file(top))
    result = python("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel), executable=executable)
    assert result.returncode == 0, result.stderr
    return executable


@pytest.mark.slow
def test_wheel_works_with_its_declared_dependencies_alone(clean_python, tmp_path):
    code = """
import dflash_hf
config = dflash_hf.DFlashConfig(mask_token_id=1, target_layer_ids=[0], hidden_size=16, intermediate_size=16,
    num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8, vocab_size=32)
dflash_hf.Qwen3DFlashForDraft(config).save_pretrained("draft")
from transformers import AutoModel
print(type(AutoModel.from_pretrained("draft")).__name__)
print(dflash_hf.__file__)
"""
    kind, place = printed(code, executable=clean_python, cwd=tmp_path).splitlines()[-2:]
    assert kind == "Qwen3DFlashForDraft"
    assert Path(place).is_relative_to(Path(clean_python).parent.parent)
    script = subprocess.run(
        [Path(clean_python).with_name("dflash-hf"), "--help"], capture_output=True, text=True, cwd=tmp_path
    )
    assert script.returncode == 0, script.stderr
    assert all(name in script.stdout for name in cli.SUBCOMMANDS)
