"""Local directories stay as they are, hub ids go to snapshot_download, everything else is refused
by name.
"""

import itertools
import os
import shutil
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import filter_repo_objects, validate_repo_id

from jaxkv import LLM
from jaxkv.errors import CheckpointError
from jaxkv.testing import model_of
from jaxkv.weights.hub import _HUB_ID, OF_CODE, WITHOUT_WEIGHTS, Access, resolve_model
from tiny import SMALL, make_checkpoint, tiny_config


@pytest.fixture
def downloads(monkeypatch, tmp_path):
    calls = []

    def snapshot_download(repo_id, **options):
        calls.append((repo_id, options))
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    return calls


def fail_with(monkeypatch, error: BaseException) -> None:
    def snapshot_download(repo_id, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)


def test_a_local_directory_is_returned_as_is(downloads, monkeypatch, tmp_path):
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    for model in ["org/name", "./org/name", Path("org/name"), str(tmp_path / "org"), ".", "org"]:
        assert resolve_model(model) == Path(model)
    assert resolve_model("~/org/name") == tmp_path / "org" / "name"
    assert downloads == []


def test_a_revision_of_a_local_directory_is_refused(downloads, tmp_path):
    with pytest.raises(ValueError, match="no revision for a local directory, got 'v2'"):
        resolve_model(tmp_path, revision="v2")


@pytest.mark.parametrize(
    "hub_id", ["gpt2", "meta-llama/Llama-3.2-1B", "a/b", "Foo-BAR_foo.bar123", "_x/y_"]
)
@pytest.mark.parametrize("revision", [None, "refs/pr/1"])
def test_a_hub_id_fetches_weights_json_and_templates_only(downloads, tmp_path, hub_id, revision):
    assert resolve_model(hub_id, revision=revision) == tmp_path / "snapshot"
    ((asked, options),) = downloads
    assert (asked, options.pop("revision")) == (hub_id, revision)
    files = {
        "model-00001-of-00002.safetensors": True,
        "2_Dense/model.safetensors": True,
        "tokenizer_config.json": True,
        "chat_template.jinja": True,
        "merges.txt": True,
        "original/model.safetensors": False,  # the same once more, as gpt-oss has it
        "consolidated.safetensors": False,  # as Mistral has it
        "modeling_x.py": False,
        "pytorch_model.bin": False,
    }
    taken = [*filter_repo_objects(files, **options)]
    assert taken == [name for name, is_wanted in files.items() if is_wanted]


@pytest.mark.parametrize("trusted", [False, True])
def test_weights_are_fetched_once_it_is_known_that_the_engine_can_be(
    monkeypatch, tmp_path, trusted
):
    """Of the commit that the config was of, whatever has been pushed meanwhile. Python code comes
    only where the caller trusts it.
    """
    source, calls = make_checkpoint(tmp_path / "source", tiny_config("llama")), []

    def snapshot_download(repo_id, *, revision, allow_patterns, ignore_patterns):
        calls.append((repo_id, revision, *allow_patterns))
        (tmp_path / "c0ffee").mkdir(exist_ok=True)
        for pattern in allow_patterns:
            for path in source.glob(pattern):
                shutil.copy(path, tmp_path / "c0ffee")
        return str(tmp_path / "c0ffee")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    found = ("org/name", None, *WITHOUT_WEIGHTS, *(("*.py", *OF_CODE[1:]) if trusted else ()))
    with pytest.raises(ValueError, match="kv_cache_dtype"):
        LLM("org/name", kv_cache_dtype="int2", trust_remote_code=trusted, **SMALL)
    assert calls == [found]
    llm = LLM("org/name", trust_remote_code=trusted, **SMALL)
    assert calls[1:] == [found, ("org/name", "c0ffee", "*.safetensors", *WITHOUT_WEIGHTS)]
    assert model_of(llm).directory == tmp_path / "c0ffee"


def test_the_hub_agrees_that_the_accepted_ids_are_ids():
    alphabet = ["a", "B7", "-", "_", ".", "/", "--", "..", ".git", "é", " ", "x" * 95]
    texts = ["".join(parts) for parts in itertools.product(alphabet, repeat=3)]
    for text in filter(_HUB_ID.fullmatch, texts):
        validate_repo_id(text)
    assert sum(bool(_HUB_ID.fullmatch(text)) for text in texts) > 50


@pytest.mark.parametrize(
    "model",
    [
        "./no",
        "../no",
        "/no",
        "~/no",
        "a/b/c",
        "a\\b",
        "C:\\models\\x",
        Path("org/name"),
        "file.gguf",
    ],
)
def test_a_path_that_is_no_directory_is_refused_by_name(downloads, tmp_path, model):
    (tmp_path / "file.gguf").touch()
    with pytest.raises(CheckpointError) as caught:
        resolve_model(model)
    assert str(caught.value).startswith(f"{os.path.expanduser(model)}: expected a directory")
    assert downloads == []


def test_a_gguf_file_is_no_model(tmp_path):
    (tmp_path / "file.gguf").touch()
    with pytest.raises(CheckpointError, match=r"got a file; GGUF is not read: pass .*safetensors"):
        resolve_model(tmp_path / "file.gguf")


@pytest.mark.parametrize(
    "model", ["", "a b", "a/", "a--b", "a..b", "x.git", "-a", "a-", "a\0b", "a\n", "é", "x" * 97]
)
def test_what_is_neither_path_nor_id_is_refused(downloads, model):
    with pytest.raises(
        CheckpointError, match="expected a local directory or a hub id such as org/name, got"
    ) as caught:
        resolve_model(model)
    assert repr(model) in str(caught.value)
    assert downloads == []


def http_error() -> Exception:
    """As the hub raises for a gated or missing model; httpx2 or httpx, whichever this hub version
    uses.
    """
    http = sys.modules[HfHubHTTPError.__bases__[0].__module__.split(".")[0]]
    return HfHubHTTPError(
        "401 Client Error", response=http.Response(401, request=http.Request("GET", "https://hub"))
    )


ERRORS = [
    http_error(),
    LocalEntryNotFoundError("no snapshot"),
    OfflineModeIsEnabled("offline"),
    HfHubHTTPError.__bases__[0]("connection reset"),
    ValueError("Invalid IPv6 URL"),  # HF_ENDPOINT
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_hub_error_says_the_id_and_the_ways_out(monkeypatch, error):
    fail_with(monkeypatch, error)
    with pytest.raises(OSError, match="org/name at revision 'v2': expected its files") as caught:
        resolve_model("org/name", revision="v2")
    for fragment in [str(error), "local directory", "HF_HUB_OFFLINE", "HF_TOKEN"]:
        assert fragment in str(caught.value)
    assert caught.value.__cause__ is error


def test_other_errors_pass_untouched(monkeypatch):
    for error in [PermissionError("cache is read-only"), KeyError("bug")]:
        fail_with(monkeypatch, error)
        with pytest.raises(type(error)) as caught:
            resolve_model("org/name")
        assert caught.value is error


def test_the_real_hub_client_offline_ends_in_the_same_error(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match="org/name: expected its files") as caught:
        resolve_model("org/name")
    assert isinstance(caught.value.__cause__, LocalEntryNotFoundError)


def test_token_and_folder_are_handed_on_where_they_are_given(downloads):
    access = Access(token="s3cret", cache_dir="there")
    resolve_model("org/name", access=access)
    assert downloads[-1][1].items() >= {"token": "s3cret", "cache_dir": "there"}.items()
    assert "s3cret" not in repr(access)
