"""Uploading: the real client against a Hub on loopback that refuses, breaks off and changes underneath."""

import json
import socket
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import HfApi

from dflash_hf.publishing.card import MARK
from dflash_hf.publishing.stage import Stage, read_stage
from dflash_hf.publishing.upload import UploadError, publish
from hub_server import HubServer

REPO = "org/draft"
WEIGHTS = bytes(range(256)) * 1000
CARD = f"---\nlicense: mit\ntags:\n- dflash\n---\n\n{MARK} -->\n\n# draft\n\nA drafter.\n\n## Limits\n\nSome.\n"


@pytest.fixture
def waits(monkeypatch):
    """The client's waits between its retries, noted instead of waited."""
    noted: list[float] = []
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", noted.append)
    return noted


@pytest.fixture(autouse=True)
def _client(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)


@pytest.fixture
def stage(tmp_path) -> Stage:
    folder = tmp_path / "stage"
    (folder / "figures").mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "dflash"}')
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    (folder / "modeling_dflash.py").write_text("x = 1\n")
    (folder / "README.md").write_text(CARD)
    (folder / "figures" / "plot.png").write_bytes(b"\x89PNG" + WEIGHTS[:500])
    return read_stage(folder)


@pytest.fixture
def hub():
    with HubServer() as server:
        yield server


def client(hub: HubServer, token: str | None = HubServer.WRITE) -> HfApi:
    return HfApi(endpoint=hub.url, token=token)


def contents(stage: Stage) -> dict[str, bytes]:
    return {file.path: (stage.folder / file.path).read_bytes() for file in stage.files}


def published(hub: HubServer, revision: str = "main") -> dict[str, bytes]:
    return {path: data for path, data in hub.repositories[REPO].files(revision).items() if path != ".gitattributes"}


def refusal(stage: Stage, hub: HubServer, token: str | None = HubServer.WRITE, **arguments) -> str:
    """The sentence of a refused upload, after which the Hub holds no commit of ours."""
    before = {name: len(repository.log) for name, repository in hub.repositories.items()}
    with pytest.raises(UploadError) as caught:
        publish(stage, REPO, api=client(hub, token), **arguments)
    for name, repository in hub.repositories.items():
        assert len(repository.log) == before.get(name, 1)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert sentence.endswith(".")
    return sentence


def test_everything_arrives_in_one_commit(hub, stage):
    done = publish(stage, REPO, tag="dflash-1", message="First draft", api=client(hub))
    repository = hub.repositories[REPO]
    assert published(hub) == contents(stage)
    assert [entry["message"] for entry in repository.log] == ["initial commit", "First draft"]
    assert repository.refs == {"main": done.oid, "dflash-1": done.oid}
    assert not repository.private
    assert done.commit_url == f"{hub.url}/{REPO}/commit/{done.oid}"
    assert hub.count("unknown") == 0


def test_large_file_in_parts_arrives_whole(stage):
    with HubServer(chunk_size=100_000) as hub:
        publish(stage, REPO, api=client(hub))
        assert published(hub) == contents(stage)
        assert hub.count("complete") == 1


def test_private_repository_is_created_private(hub, stage):
    publish(stage, REPO, private=True, api=client(hub))
    assert hub.repositories[REPO].private


def test_private_is_refused_for_a_repository_that_is_public(hub, stage):
    hub.add_repository(REPO)
    assert "public" in refusal(stage, hub, private=True)


def test_branch_is_created_and_main_stays(hub, stage):
    before = hub.add_repository(REPO).refs["main"]
    done = publish(stage, REPO, revision="v2", api=client(hub))
    assert hub.repositories[REPO].refs == {"main": before, "v2": done.oid}
    assert published(hub, "v2") == contents(stage)


def test_pull_request_by_someone_who_may_only_read_leaves_main_alone(hub, stage):
    before = hub.add_repository(REPO).refs["main"]
    done = publish(stage, REPO, create_pr=True, tag="dflash-1", api=client(hub, hub.STRANGER))
    assert hub.repositories[REPO].refs == {"main": before, "refs/pr/1": done.oid}
    assert done.pull_request == f"{hub.url}/{REPO}/discussions/1"
    assert done.tag is None


def test_pull_request_against_another_branch_is_refused_before_anything_is_sent(hub, stage):
    with pytest.raises(ValueError, match=r"--create-pr .* --revision v2"):
        publish(stage, REPO, create_pr=True, revision="v2", api=client(hub))
    assert hub.requests == []


def test_second_run_without_changes_makes_no_commit(hub, stage):
    first = publish(stage, REPO, tag="dflash-1", api=client(hub))
    again = publish(stage, REPO, tag="dflash-1", api=client(hub))
    assert again.oid == first.oid
    assert hub.count("put") == 2
    assert hub.count("commit") == 1


def test_stale_weights_code_and_plots_go_but_foreign_files_stay(hub, stage):
    kept = {"notes.txt": b"mine", "config.json": b'{"model_type": "dflash"}'}
    stale = {
        "model-00001-of-00002.safetensors": b"old",
        "pytorch_model.bin": b"old",
        "old.py": b"",
        "figures/a.png": b"x",
    }
    hub.add_repository(REPO, {**kept, **stale, "model.safetensors.index.json": b"{}"})
    publish(stage, REPO, api=client(hub))
    assert set(published(hub)) == set(contents(stage)) | {"notes.txt"}


def test_hand_written_section_of_the_present_card_is_kept(hub, stage):
    present = CARD.replace("Some.", "Old words.") + "\n## My notes\n\nWritten by hand.\n"
    hub.add_repository(REPO, {"README.md": present.encode(), "config.json": b'{"model_type": "dflash"}'})
    publish(stage, REPO, api=client(hub))
    card = published(hub)["README.md"].decode()
    assert "## My notes\n\nWritten by hand." in card
    assert "Old words." not in card


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"config.json": b'{"model_type": "qwen3"}'}, "'qwen3'"),
        ({"config.json": b"no json"}, "None"),
        ({"weights.gguf": b"GGUF"}, "weights.gguf"),
    ],
    ids=["another model", "broken config", "weights alone"],
)
def test_name_taken_by_something_else_is_refused(hub, stage, files, found):
    hub.add_repository(REPO, files)
    sentence = refusal(stage, hub)
    assert f"The name {REPO} is taken" in sentence
    assert found in sentence


def test_name_taken_by_a_repository_that_the_token_cannot_see_is_refused(hub, stage):
    hub.fail("create", status=409, message="You already created this model repo")
    assert f"The name {REPO} is taken" in refusal(stage, hub)


def test_missing_token_is_refused_before_anything_is_sent(hub, stage):
    assert "hf auth login" in refusal(stage, hub, token=None)
    assert hub.requests == []


@pytest.mark.parametrize(
    ("token", "words"),
    [
        (HubServer.BAD, "The Hub refused the token (Invalid user token)"),
        (HubServer.READ, "The token of reader may only read"),
        (HubServer.STRANGER, f"may not write to {REPO}"),
    ],
    ids=["bad token", "read token", "no right in the organisation"],
)
def test_token_that_will_not_do_is_named(hub, stage, token, words):
    assert words in refusal(stage, hub, token=token)
    assert REPO not in hub.repositories


STEPS = ["info", "preupload", "batch", "put", "verify", "commit"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("status", "message", "words"),
    [
        (403, "Forbidden", "may not write"),
        (403, "Private repository storage limit reached", "storage quota"),
        (409, "conflict", "Somebody else changed"),
        (500, "Internal Error", "The Hub answered 500"),
    ],
    ids=["forbidden", "quota", "conflict", "server error"],
)
def test_refusal_at_any_step_publishes_nothing_and_a_second_run_goes_on(
    hub, stage, waits, step, status, message, words
):
    hub.add_repository(REPO)
    hub.fail(step, status=status, message=message, times=1000)
    sentence = refusal(stage, hub)
    assert words in sentence
    assert message in sentence
    assert set(published(hub)) == set()
    hub.failures.clear()
    publish(stage, REPO, api=client(hub))
    assert published(hub) == contents(stage)


@pytest.mark.parametrize("step", ["preupload", "batch", "put"])
def test_rate_limit_is_waited_out_as_the_hub_asks(hub, stage, waits, step):
    hub.fail(step, status=429, times=2, Retry_After="7")
    publish(stage, REPO, api=client(hub))
    assert published(hub) == contents(stage)
    assert [wait for wait in waits if wait > 6] == [8.0, 8.0]  # the client adds a second


def test_rate_limit_at_the_commit_names_the_wait(hub, stage, waits):
    hub.add_repository(REPO)
    hub.fail("commit", status=429, times=9, Retry_After="300")
    assert "wait 300 seconds" in refusal(stage, hub)


def test_short_outage_is_ridden_out_by_the_clients_own_retries(hub, stage, waits):
    hub.fail("put", status=503, times=2)
    publish(stage, REPO, api=client(hub))
    assert published(hub) == contents(stage)
    assert waits


def test_connection_cut_in_a_large_file_is_retried(hub, stage, waits):
    hub.fail("put", cut_after=50_000)
    publish(stage, REPO, api=client(hub))
    assert published(hub) == contents(stage)


def test_connection_that_keeps_breaking_publishes_nothing_and_sent_files_are_not_sent_again(hub, stage, waits):
    hub.add_repository(REPO)
    hub.fail("put", cut_after=50_000, times=1000, after=1)
    assert "run this again to go on" in refusal(stage, hub)
    assert len(hub.objects) == 1
    hub.failures.clear()
    before = hub.count("put")
    publish(stage, REPO, api=client(hub))
    assert published(hub) == contents(stage)
    assert hub.count("put") == before + 1


def test_commit_that_breaks_off_leaves_the_earlier_one(hub, stage, waits):
    publish(stage, REPO, api=client(hub))
    before = published(hub)
    hub.fail("commit", cut_after=10)
    (stage.folder / "modeling_dflash.py").write_text("x = 2\n")
    assert "all of it or nothing is published" in refusal(read_stage(stage.folder), hub)
    assert published(hub) == before
    publish(read_stage(stage.folder), REPO, api=client(hub))
    assert published(hub)["modeling_dflash.py"] == b"x = 2\n"


def test_commit_whose_answer_was_lost_is_not_denied_and_the_next_run_finds_it(hub, stage, waits):
    hub.fail("commit", lose_answer=True)
    with pytest.raises(UploadError, match="all of it or nothing is published in org/draft, run this again") as caught:
        publish(stage, REPO, api=client(hub))
    assert "nothing was published" not in str(caught.value)
    assert published(hub) == contents(stage)
    done = publish(stage, REPO, tag="dflash-1", api=client(hub))
    assert len(hub.repositories[REPO].log) == 2
    assert hub.repositories[REPO].refs["dflash-1"] == done.oid == hub.repositories[REPO].refs["main"]


def test_commit_of_somebody_else_in_between_is_not_overwritten(hub, stage, monkeypatch):
    repository = hub.add_repository(REPO)
    api = client(hub)
    create_commit = api.create_commit

    def race(**arguments):
        repository.commit("main", {"README.md": b"# theirs\n"}, "theirs")
        return create_commit(**arguments)

    monkeypatch.setattr(api, "create_commit", race)
    with pytest.raises(UploadError, match="Somebody else changed org/draft"):
        publish(stage, REPO, api=api)
    assert published(hub) == {"README.md": b"# theirs\n"}


def test_interrupted_upload_says_what_is_published(hub, stage, monkeypatch):
    hub.add_repository(REPO)
    api = client(hub)

    def interrupted(**arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "create_commit", interrupted)
    with pytest.raises(
        UploadError, match="Interrupted while uploading; all of it or nothing is published in org/draft"
    ):
        publish(stage, REPO, api=api)


def test_no_network_is_one_sentence(stage, waits):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(UploadError, match="The connection to the Hub failed while asking who you are"):
            publish(stage, REPO, api=HfApi(endpoint=address, token="hf_x"))


def test_tag_that_cannot_be_set_is_reported_with_the_commit(hub, stage):
    hub.fail("tag", status=403, message="no tags today")
    with pytest.raises(UploadError, match=r"is published at .*/commit/\w+, but the tag dflash-1.*no tags today"):
        publish(stage, REPO, tag="dflash-1", api=client(hub))
    done = publish(stage, REPO, tag="dflash-1", api=client(hub))
    assert hub.repositories[REPO].refs["dflash-1"] == done.oid


def test_failure_of_the_xet_transfer_is_one_sentence(hub, stage, monkeypatch):
    pytest.importorskip("hf_xet")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", False)
    hub.add_repository(REPO)
    assert "run this again to go on" in refusal(stage, hub)
    assert "xet-write-token" in hub.requests[-1][2]


def test_token_that_the_xet_storage_refuses_is_one_sentence(hub, stage, monkeypatch):
    hf_xet = pytest.importorskip("hf_xet")
    api = client(hub)

    def refused(**arguments):
        raise hf_xet.XetAuthenticationError("token expired")

    monkeypatch.setattr(api, "create_commit", refused)
    with pytest.raises(UploadError, match=r"storage refused the token \(token expired\)"):
        publish(stage, REPO, api=api)


def test_error_of_our_own_is_not_dressed_up_as_the_hubs(hub, stage, monkeypatch):
    api = client(hub)

    def broken(*arguments, **named):
        raise KeyError("a bug")

    monkeypatch.setattr(api, "whoami", broken)
    with pytest.raises(KeyError, match="a bug"):
        publish(stage, REPO, api=api)


def test_card_travels_with_valid_metadata(hub, stage):
    publish(stage, REPO, api=client(hub))
    sent = [path for step, _, path in hub.requests if step == "yaml"]
    assert sent
    assert json.loads(published(hub)["config.json"]) == {"model_type": "dflash"}
    assert Path(stage.folder / "README.md").read_bytes() == published(hub)["README.md"]
