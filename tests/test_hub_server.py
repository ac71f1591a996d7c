"""The loopback Hub keeps what the real client sends: without this, the publishing tests would prove nothing."""

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

from hub_server import HubServer

FILES = {"config.json": b'{"a": 1}', "model.safetensors": bytes(range(256)) * 400, "code.py": b"x = 1\n"}


@pytest.fixture(autouse=True)
def _plain_lfs(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)


def folder_of(path: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


@pytest.mark.parametrize("chunk_size", [None, 30_000], ids=["one piece", "parts"])
def test_uploaded_folder_comes_back_byte_for_byte(tmp_path, chunk_size):
    folder_of(tmp_path, FILES)
    with HubServer(chunk_size=chunk_size) as hub:
        api = HfApi(endpoint=hub.url, token=hub.WRITE)
        api.create_repo("org/draft", private=True)
        api.upload_folder(repo_id="org/draft", folder_path=tmp_path, commit_message="first")
        stored = hub.repositories["org/draft"]
        assert stored.private
        assert {name: content for name, content in stored.files().items() if name in FILES} == FILES
        back = Path(api.snapshot_download("org/draft", cache_dir=tmp_path / "cache"))
        assert {name: (back / name).read_bytes() for name in FILES} == FILES
        assert hub.count("unknown") == 0
        parts = [path for step, _, path in hub.requests if step == "put"]
        assert len(parts) == (1 if chunk_size is None else 4)


def test_private_and_missing_repositories_look_alike_to_a_stranger():
    with HubServer() as hub:
        hub.add_repository("org/secret", private=True)
        for name in ("org/secret", "org/nothing"):
            with pytest.raises(RepositoryNotFoundError):
                HfApi(endpoint=hub.url, token=hub.STRANGER).model_info(name)
        assert HfApi(endpoint=hub.url, token=hub.READ).model_info("org/secret").private
        with pytest.raises(RevisionNotFoundError):
            HfApi(endpoint=hub.url, token=hub.READ).model_info("org/secret", revision="v9")


def test_a_failure_is_answered_as_often_as_asked(monkeypatch):
    with HubServer() as hub:
        hub.fail("info", status=503, times=2, after=1)
        hub.add_repository("org/draft")
        api = HfApi(endpoint=hub.url, token=hub.READ)
        api.model_info("org/draft")
        for _ in range(2):
            with pytest.raises(HfHubHTTPError, match="told to fail"):
                api.model_info("org/draft")
        api.model_info("org/draft")


def test_pull_request_leaves_main_alone(tmp_path):
    folder_of(tmp_path, FILES)
    with HubServer() as hub:
        before = hub.add_repository("org/draft").refs["main"]
        api = HfApi(endpoint=hub.url, token=hub.STRANGER)
        done = api.upload_folder(repo_id="org/draft", folder_path=tmp_path, create_pr=True)
        assert done.pr_revision == "refs/pr/1"
        assert hub.repositories["org/draft"].refs == {"main": before, "refs/pr/1": done.oid}
        with pytest.raises(HfHubHTTPError, match="rights to write"):
            api.upload_folder(repo_id="org/draft", folder_path=tmp_path)
