"""Staging a draft's repository and checking it the way a stranger meets it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from dflash_hf.cli import main
from dflash_hf.publishing.check import check_stage, lint_stage, run_stranger
from dflash_hf.publishing.facts import collect_facts
from dflash_hf.publishing.stage import Stage, content_tag, read_stage, stage_draft
from dflash_hf.publishing.stranger import weights_digest
from dflash_hf.publishing.upload_command import open_draft
from dflash_hf.publishing.upload_command import target_folder as target_folder_of
from helpers import ROOT, VOCABULARY, greedy, random_prompt, tiny_draft, tiny_target
from hub_server import HubServer
from test_card import RECORD, TRAINING

DRAFTS = ROOT / "drafts"
ANSWERS = {"base_model": "org/tiny", "license": "apache-2.0"}


@pytest.fixture(scope="module")
def target():
    return tiny_target(dtype=torch.float32)


@pytest.fixture(scope="module")
def draft(target):
    return tiny_draft(target)


@pytest.fixture(scope="module")
def target_folder(target, tmp_path_factory) -> Path:
    """The target's weights and a tokenizer of whole words with a chat template."""
    folder = tmp_path_factory.mktemp("target")
    target.save_pretrained(folder)
    words = ["<pad>", "<unk>", "Why", "does", "the", "moon", "have", "phases?"]
    vocabulary = {word: number for number, word in enumerate(words + [f"w{n}" for n in range(8, VOCABULARY)])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    template = "{% for message in messages %}{{ message.content }} {% endfor %}w9"
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", chat_template=template
    )
    fast.save_pretrained(folder)
    return folder


@pytest.fixture
def source(draft, tmp_path) -> Path:
    """A saved draft with both records beside it."""
    folder = tmp_path / "Tiny-DFlash"
    draft.save_pretrained(folder)
    (folder / "training.json").write_text(json.dumps({**TRAINING, "target": "org/tiny", "license": "apache-2.0"}))
    (folder / "benchmark.json").write_text(json.dumps(RECORD))
    return folder


def stage_into(draft, folder: Path, source: Path | None = None, max_shard_size: str = "5GB", **answers) -> Stage:
    facts = collect_facts(draft, source, name=folder.name, **({} if source else ANSWERS), **answers)
    return stage_draft(draft, facts, folder, source=source, max_shard_size=max_shard_size)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- staging -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["5GB", "20KB"], ids=["one file", "shards"])
def test_staging_twice_gives_the_same_bytes(draft, source, tmp_path, size):
    first = stage_into(draft, tmp_path / "a", source, size, repo_id="me/Tiny-DFlash")
    second = stage_into(draft, tmp_path / "b", source, size, repo_id="me/Tiny-DFlash")
    assert first.files == second.files
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    weights = [file.path for file in first.files if file.path.endswith(".safetensors")]
    assert ("model.safetensors.index.json" in contents(tmp_path / "a")) == (len(weights) > 1)
    assert (len(weights) > 1) == (size == "20KB")


def test_card_is_named_by_the_repository_or_by_the_staged_folder(draft, source, tmp_path):
    assert "\n# Best-DFlash\n" in stage_into(draft, tmp_path / "Best-DFlash", source).card
    assert "\n# Other\n" in stage_into(draft, tmp_path / "Best-DFlash", source, repo_id="me/Other").card


def test_staging_a_staged_folder_gives_it_again(draft, source, tmp_path):
    stage_into(draft, tmp_path / "one" / "Tiny-DFlash", source)
    again = type(draft).from_pretrained(tmp_path / "one" / "Tiny-DFlash")
    stage_into(again, tmp_path / "two" / "Tiny-DFlash", tmp_path / "one" / "Tiny-DFlash")
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


def test_stage_holds_everything_a_repository_needs(draft, source, tmp_path):
    stage = stage_into(draft, tmp_path / "a", source)
    names = {file.path for file in stage.files}
    figures = {"figures/acceptance_by_task.png", "figures/acceptance_by_position.png"}
    assert {"README.md", "LICENSE", "config.json", "generation_config.json", "model.safetensors"} <= names
    assert figures | {"training.json", "benchmark.json"} <= names
    assert lint_stage(stage.folder) == []
    assert json.loads((stage.folder / "config.json").read_text())["target_name_or_path"] == "org/tiny"


def test_pinned_tag_changes_with_weights_and_code_but_not_with_the_card(draft, source, tmp_path):
    stage = stage_into(draft, tmp_path / "a", source)
    tag = content_tag(stage.folder)
    assert tag in stage_into(draft, tmp_path / "b", source, repo_id="me/x").card
    (stage.folder / "README.md").write_text("other")
    assert content_tag(stage.folder) == tag
    (stage.folder / "compat.py").write_text("other = 1\n")
    assert content_tag(stage.folder) != tag


def test_folder_of_something_else_is_not_replaced(draft, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="holds something that is not a draft"):
        stage_into(draft, tmp_path / "a")
    assert contents(tmp_path / "a") == {"thesis.txt": b"years of work"}


def test_failed_staging_leaves_the_earlier_one(draft, source, tmp_path):
    stage_into(draft, tmp_path / "a", source)
    before = contents(tmp_path / "a")
    (source / "LICENSE").unlink(missing_ok=True)
    with pytest.raises(ValueError, match="No text of the licence 'mit'"):
        stage_into(draft, tmp_path / "a", source, license="mit")
    assert contents(tmp_path / "a") == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_licence_is_the_drafts_own_where_it_has_one(draft, source, tmp_path):
    (source / "LICENSE").write_text("MIT: do what you like")
    stage = stage_into(draft, tmp_path / "a", source, license="mit")
    assert (stage.folder / "LICENSE").read_text() == "MIT: do what you like"


def test_draft_that_names_no_target_or_licence_needs_them_named(draft, tmp_path):
    draft.config.target_name_or_path = None
    with pytest.raises(ValueError, match="--base-model"):
        collect_facts(draft, None, license="mit")
    with pytest.raises(ValueError, match="--license"):
        collect_facts(draft, None, base_model="org/tiny")


@pytest.mark.parametrize(
    ("text", "words"), [("{", "is not JSON"), ("[1]", "holds a list")], ids=["broken", "not an object"]
)
def test_unreadable_record_is_refused_with_its_name(draft, source, text, words):
    (source / "training.json").write_text(text)
    with pytest.raises(ValueError, match=rf"training\.json {words}"):
        collect_facts(draft, source)


def test_record_that_was_named_but_is_missing_is_refused(draft, tmp_path):
    with pytest.raises(ValueError, match=r"nothing\.json cannot be read"):
        collect_facts(draft, None, **ANSWERS, benchmark=tmp_path / "nothing.json")


# -- checking ----------------------------------------------------------------------------------------------------


@pytest.mark.slow  # starts a process that loads torch
def test_good_stage_passes_and_generates_what_the_target_generates(target, draft, target_folder, tmp_path):
    stage = stage_into(draft, tmp_path / "a")
    report = check_stage(stage, draft, target_folder)
    assert report["forbidden"] == []
    assert report["generation"]["identical"]
    assert len(report["generation"]["tokens"]) == 24
    assert report["executed"] == sorted(path.name for path in stage.folder.glob("*.py"))


def damage_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def append_code(folder: Path, name: str, line: str) -> None:
    with (folder / name).open("a") as file:
        file.write(f"\n{line}\n")


CROSS = {"AutoConfig": "configuration_dflash.DFlashConfig", "AutoModel": "a/b--modeling_dflash.Qwen3DFlashForDraft"}
NAMELESS = {"": "config.X", "AutoModel": "modeling_dflash.Qwen3DFlashForDraft"}
GONE = {"AutoConfig": "configuration_dflash.DFlashConfig", "AutoModel": "modeling_dflash.Nothing"}


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "compat.py").unlink(), "imports '.compat', and there is no file compat.py"),
        (lambda f: (f / "README.md").unlink(), "README.md is missing"),
        (
            lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
            "pytorch_model.bin may hold pickled code",
        ),
        (lambda f: (f / "model.safetensors").unlink(), "there are no safetensors weights"),
        (lambda f: (f / "extra.py").write_text(""), "extra.py is code that nothing imports"),
        (lambda f: append_code(f, "compat.py", "if 0:\n    from .no.where import x"), "imports '.no.where'"),
        (lambda f: append_code(f, "compat.py", "from ..up import x"), "compat.py imports '..up'"),
        (lambda f: append_code(f, "compat.py", "from . import settings"), "'from . import settings'"),
        (
            lambda f: append_code(f, "compat.py", "import dflash_hf"),
            "imports dflash_hf, which a stranger may not have",
        ),
        (lambda f: append_code(f, "compat.py", "def"), "compat.py is not Python"),
        (lambda f: damage_config(f, model_type="qwen3"), "model_type 'qwen3'"),
        (lambda f: damage_config(f, target_name_or_path=""), "names no target"),
        (lambda f: damage_config(f, auto_map=...), "auto_map lacks AutoConfig"),
        (lambda f: damage_config(f, auto_map=CROSS), "points to 'a/b--modeling_dflash.Qwen3DFlashForDraft'"),
        (lambda f: damage_config(f, auto_map=NAMELESS), "the key '', which is no Auto class"),
        (lambda f: damage_config(f, auto_map=GONE), "points to 'modeling_dflash.Nothing'"),
        (lambda f: damage_config(f, architectures=["DFlashDraftModel"]), "architectures names 'DFlashDraftModel'"),
    ],
)
def test_fault_of_a_staged_folder_is_named(draft, tmp_path, damage, words):
    stage = stage_into(draft, tmp_path / "a")
    damage(stage.folder)
    faults = lint_stage(stage.folder)
    assert any(words in fault for fault in faults), faults
    with pytest.raises(ValueError, match="nothing was uploaded"):
        check_stage(read_stage(stage.folder), draft)


def test_import_in_a_docstring_counts_as_the_loader_counts_it(draft, tmp_path):
    stage = stage_into(draft, tmp_path / "a")
    append_code(stage.folder, "compat.py", '"""Example:\n\n    from .nowhere import X\n"""')
    assert any("imports '.nowhere'" in fault for fault in lint_stage(stage.folder))


@pytest.mark.slow  # starts a process that loads torch
def test_weights_and_code_that_are_not_the_drafts_are_found_by_loading(draft, tmp_path):
    stage = stage_into(draft, tmp_path / "a")
    tensors = load_file(stage.folder / "model.safetensors")
    tensors["norm.weight"] += 1e-3
    save_file(tensors, stage.folder / "model.safetensors", metadata={"format": "pt"})
    append_code(stage.folder, "compat.py", "import socket; socket.socket().connect_ex(('127.0.0.1', 9))")
    append_code(stage.folder, "compat.py", "import pickle; pickle.loads(pickle.dumps(print))")
    with pytest.raises(ValueError, match="nothing was uploaded") as caught:
        check_stage(read_stage(stage.folder), draft)
    sentence = str(caught.value)
    assert "the loaded weights differ" in sentence
    assert "one block gives other hidden states" in sentence
    assert "socket.connect" in sentence
    assert "pickle.find_class" in sentence


@pytest.mark.slow  # starts a process that loads torch
def test_code_that_needs_the_package_does_not_load_on_a_strangers_machine(draft, tmp_path):
    stage = stage_into(draft, tmp_path / "a")
    append_code(stage.folder, "compat.py", "import importlib; importlib.import_module('dflash_hf')")
    with pytest.raises(ValueError, match=r"does not load without this package, nothing was uploaded: .*dflash_hf"):
        run_stranger(stage.folder, tmp_path)


# -- the command -------------------------------------------------------------------------------------------------


def hub_upload(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script as a user does, from another folder."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return subprocess.run(
        [sys.executable, str(ROOT / "hub_upload.py"), *arguments],
        env={**inherited, "HF_HUB_DISABLE_XET": "1", **environment},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def hub(monkeypatch):
    with HubServer() as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        yield server


def test_target_to_check_with_may_be_a_name_on_the_hub(hub, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    hub.add_repository("org/tiny", {"config.json": b"{}", "model.safetensors": b"weights"})
    assert (target_folder_of("org/tiny") / "model.safetensors").read_bytes() == b"weights"
    with pytest.raises(ValueError, match="The target org/none is no folder and could not be downloaded"):
        target_folder_of("org/none")


@pytest.mark.slow  # starts a process that loads torch
def test_dry_run_lists_files_hashes_and_card_and_sends_nothing(hub, source, target_folder, tmp_path, capsys):
    arguments = ["--dry-run", "--stage", str(tmp_path / "a"), "--check-target", str(target_folder)]
    assert main(["upload", str(source), "--repo-id", "me/Tiny-DFlash", *arguments]) == 0
    printed = capsys.readouterr().out
    for file in read_stage(tmp_path / "a").files:
        assert f"{file.sha256}  {file.size:>12,}  {file.path}" in printed
    assert printed.rstrip("\n").endswith((tmp_path / "a" / "README.md").read_text().rstrip("\n"))
    assert hub.requests == []


def test_dtype_of_the_published_weights_can_be_chosen(source, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("dflash_hf.publishing.check.check_stage", lambda *arguments: None)
    folder = tmp_path / "Half-DFlash"
    assert main(["upload", str(source), "--stage", str(folder), "--dtype", "bfloat16"]) == 0
    weights, published = (load_file(path / "model.safetensors") for path in (source, folder))
    assert {tensor.dtype for tensor in published.values()} == {torch.bfloat16} != {weights["fc.weight"].dtype}
    assert all(torch.equal(tensor, weights[name].bfloat16()) for name, tensor in published.items())
    assert main(["upload", str(source), "--stage", str(folder), "--dtype", "half"]) == 2
    assert "--dtype is 'half', which is none of" in capsys.readouterr().err


def test_failed_check_uploads_nothing(hub, source, monkeypatch, capsys):
    def damage(stage, *arguments):
        (stage.folder / "compat.py").unlink()
        check_stage(stage, *arguments)

    monkeypatch.setattr("dflash_hf.publishing.check.check_stage", damage)
    assert main(["upload", str(source), "--repo-id", "org/d"]) == 2
    sentence = capsys.readouterr().err.splitlines()[-1]
    assert sentence.startswith("error: The staged repository is faulty, nothing was uploaded: ")
    assert hub.requests == []


def test_truncated_weights_are_one_sentence(hub, source, capsys):
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert main(["upload", str(source), "--repo-id", "org/d"]) == 2
    assert "model.safetensors" in capsys.readouterr().err.splitlines()[-1]
    assert hub.requests == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "There is nothing to do without a destination"),
        (["--repo-id", "nameless"], "--repo-id nameless is not of the form ORG/NAME"),
        (["--repo-id", "a/b", "--create-pr", "--revision", "v2"], "cannot take --revision v2"),
    ],
)
def test_arguments_that_do_not_fit_are_one_sentence(tmp_path, capsys, arguments, words):
    assert main(["upload", str(tmp_path), *arguments]) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


# -- published, and met by a stranger ----------------------------------------------------------------------------

STRANGER = """
import contextlib, io, json, re, sys
sys.path.insert(0, {tests!r})
sys.path.insert(0, {publishing!r})
from stranger import Hidden, executed_files, weights_digest
if {hide}:
    sys.meta_path.insert(0, Hidden())
import torch
from transformers import AutoModel, AutoModelForCausalLM
from transformers.dynamic_module_utils import get_class_from_dynamic_module

REPOSITORIES, TARGET, PROMPT = {repositories!r}, {target!r}, torch.tensor({prompt!r})
target = AutoModelForCausalLM.from_pretrained(TARGET)
seen = {{}}

def load(name, revision):
    return AutoModel.from_pretrained(name, revision=revision, trust_remote_code=True)

def run(draft):
    return target.generate(PROMPT, assistant_model=draft, max_new_tokens=16, do_sample=False).tolist()

{body}
print(json.dumps(seen))
"""


def stranger(tmp_path: Path, hub: HubServer, body: str, target_folder: Path, hide: bool = True, **names) -> dict:
    """Run `body` in a clean interpreter whose Hub is `hub`; returns what it put into `seen`."""
    code = STRANGER.format(
        tests=str(ROOT / "tests"),
        publishing=str(ROOT / "dflash_hf" / "publishing"),
        hide=hide,
        repositories=names,
        target=str(target_folder),
        prompt=random_prompt(6).tolist(),
        body=body,
    )
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHON"))}
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], env=inherited | environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def published(target_folder, draft, tmp_path_factory):
    """A Hub that holds the target, the draft, uploaded by the script, and a draft of another code revision."""
    folder = tmp_path_factory.mktemp("published")
    draft.save_pretrained(folder / "source")
    with HubServer(chunk_size=60_000) as hub:
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "home"), "HF_TOKEN": hub.WRITE}
        arguments = ["--repo-id", "org/first", "--base-model", "org/tiny", "--license", "apache-2.0"]
        done = hub_upload(str(folder / "source"), *arguments, **environment)
        assert done.returncode == 0, done.stderr
        other = dict(hub.repositories["org/first"].files())
        other["protocol.py"] += b"\n\nDraftProtocol.revision_of_code = 2\n"
        hub.add_repository("org/second", other)
        hub.add_repository("org/tiny", contents(target_folder))
        hub.requests.clear()
        yield hub, done.stdout


@pytest.mark.slow  # starts a process that loads torch
def test_uploaded_repository_holds_one_commit_and_the_tag_of_its_card(published):
    hub, printed = published
    repository = hub.repositories["org/first"]
    (tag,) = (name for name in repository.refs if name != "main")
    assert [entry["ref"] for entry in repository.log] == ["main", "main"]
    assert repository.refs[tag] == repository.refs["main"]
    assert f'revision="{tag}"' in printed
    assert f'revision="{tag}"' in repository.files()["README.md"].decode()


@pytest.mark.slow  # starts a process that loads torch
def test_stranger_loads_two_code_revisions_side_by_side(target, draft, published, target_folder, tmp_path):
    hub, _ = published
    tag = next(name for name in hub.repositories["org/first"].refs if name != "main")
    body = """
try:
    AutoModel.from_pretrained("org/first", trust_remote_code=False)
except Exception as error:
    seen["without trust"] = str(error)
seen["executed without trust"] = executed_files()
first, second = load("org/first", REPOSITORIES["tag"]), load("org/second", "main")
seen["plain"] = run(None)
ran = []
def noting(decode):
    def decode_and_note(*arguments, **named):
        protocol = sys.modules[decode.__func__.__module__].DraftProtocol
        ran.append(getattr(protocol, "revision_of_code", 1))
        return decode(*arguments, **named)
    return decode_and_note
for draft in (first, second):
    draft.decode = noting(draft.decode)
seen["tokens"] = [run(first), run(second), run(first)]
seen["revision of the code that ran"] = ran
seen["weights"] = [weights_digest(first), weights_digest(second)]
seen["modules"] = sorted({type(first).__module__.split(".")[2], type(second).__module__.split(".")[2]})
snippet = re.search(r"```python\\n(.*?)```", REPOSITORIES["card"], re.DOTALL)[1]
printed = io.StringIO()
with contextlib.redirect_stdout(printed):
    names = {}
    exec(snippet, names)
seen["snippet"] = printed.getvalue().strip()
alone = names["target"].generate(**names["inputs"], max_new_tokens=128)
seen["snippet, target alone"] = names["tokenizer"].decode(
    alone[0, names["inputs"]["input_ids"].shape[1]:], skip_special_tokens=True
).strip()
first.save_pretrained("again")
again = AutoModel.from_pretrained("again", trust_remote_code=True)
seen["again"] = [weights_digest(again), run(again)]
"""
    card = hub.repositories["org/first"].files()["README.md"].decode()
    seen = stranger(tmp_path, hub, body, target_folder, tag=tag, card=card)
    expected = greedy(target, random_prompt(6), 16).tolist()
    assert "trust_remote_code" in seen["without trust"]
    assert seen["executed without trust"] == []
    assert seen["plain"] == expected
    assert seen["tokens"] == [expected] * 3
    assert seen["revision of the code that ran"] == [1, 2, 1]
    assert seen["weights"] == [weights_digest(draft)] * 2
    assert seen["modules"] == ["first", "second"]
    assert seen["again"] == [weights_digest(draft), expected]
    assert [path for step, _, path in hub.requests if step == "unknown" and "/org/" in path] == []
    assert seen["snippet"] == seen["snippet, target alone"]


@pytest.mark.slow  # starts a process that loads torch
def test_package_imported_after_a_remote_draft_shares_the_process(target, published, target_folder, tmp_path):
    hub, _ = published
    body = """
remote = load("org/second", "main")
seen["first"] = run(remote)
import dflash_hf
local = dflash_hf.Qwen3DFlashForDraft.from_pretrained("org/first")
seen["modules"] = [type(local).__module__, type(remote).__module__.split(".")[0]]
seen["tokens"] = [run(remote), run(local), run(remote)]
seen["plain"] = run(None)
seen["by auto"] = [type(AutoModel.from_pretrained("org/first")).__module__, type(load("org/first", "main")).__module__]
"""
    seen = stranger(tmp_path, hub, body, target_folder, hide=False)
    expected = greedy(target, random_prompt(6), 16).tolist()
    assert seen["modules"] == ["dflash_hf.modeling_dflash", "transformers_modules"]
    assert seen["tokens"] == [expected] * 3
    assert seen["plain"] == seen["first"] == expected
    assert seen["by auto"] == ["dflash_hf.modeling_dflash"] * 2


# -- the embedded draft ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", sorted(DRAFTS.glob("*-DFlash")) or [None], ids=lambda path: path and path.name)
def test_embedded_draft_is_what_staging_produces(folder, tmp_path):
    if folder is None:
        pytest.skip(f"there is no draft in {DRAFTS} yet")
    draft, source = open_draft(str(folder))
    stage = stage_into(draft, tmp_path / folder.name, source)
    staged, embedded = contents(stage.folder), contents(folder)
    assert staged.keys() == embedded.keys()
    for name in staged.keys() - {"config.json", "generation_config.json"}:
        if not name.endswith(".png"):
            assert staged[name] == embedded[name], name
            continue
        first, second = imread(stage.folder / name), imread(folder / name)  # another Matplotlib, other bytes
        assert first.shape == second.shape and abs(first - second).mean() < 0.02, name
    for name in ("config.json", "generation_config.json"):  # they name the version that wrote them
        first, second = json.loads(staged[name]), json.loads(embedded[name])
        del first["transformers_version"], second["transformers_version"]
        assert first == second
