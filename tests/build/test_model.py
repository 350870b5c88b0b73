"""Whatever is broken about the small files of a model is one CheckpointError that names the file,
before weights are read.
"""

import json
import shutil
from pathlib import Path

import pytest

from jaxkv.build.model import find_model
from jaxkv.build.options import EngineOptions
from jaxkv.errors import CheckpointError
from tiny import make_checkpoint, tiny_config
from tokenizers_ import CHAT_TEMPLATE, save_tokenizer

pytestmark = pytest.mark.usefixtures("quick_compile")

VOCAB = 380


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    directory = make_checkpoint(
        tmp_path_factory.mktemp("whole"), tiny_config("llama", vocab_size=VOCAB)
    )
    save_tokenizer(directory, chat_template=CHAT_TEMPLATE)
    (directory / "generation_config.json").write_text('{"temperature": 0.5}')
    (directory / "special_tokens_map.json").write_text('{"bos_token": "<s>"}')
    (directory / "added_tokens.json").write_text('{"<zz>": 379}')
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return directory


@pytest.fixture
def directory(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def refused(directory: Path, what: str) -> str:
    """Returns the message, which begins with the path of `what`."""
    with pytest.raises(CheckpointError) as caught:
        find_model(EngineOptions(directory)).default_params()
    assert str(caught.value).startswith(str(directory / what)), caught.value
    return str(caught.value)


def test_the_whole_model_is_read(whole):
    model = find_model(EngineOptions(whole))
    assert model.default_params().temperature == 0.5
    assert model.tokenizer.encode("one")


JSON_FILES = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"),
    *("special_tokens_map.json", "added_tokens.json"),
)
NO_OBJECTS = {
    "empty": b"",
    "cut": b'{"a": [1, 2',
    "binary": bytes(range(256)),
    "a list": b"[1]",
    "null": b"null",
    "nested": b"[" * 100_000,
    "another encoding": '{"a": 1}'.encode("utf-16"),
    "a byte order mark": b'\xef\xbb\xbf{"a": 1}',
}


@pytest.mark.parametrize("content", NO_OBJECTS.values(), ids=NO_OBJECTS)
@pytest.mark.parametrize("name", JSON_FILES)
def test_a_file_that_is_no_json_object_is_named(directory, name, content):
    (directory / name).write_bytes(content)
    assert "expected" in refused(directory, name)


@pytest.mark.parametrize("name", [*JSON_FILES, "chat_template.jinja"])
def test_what_is_no_file_is_not_passed_over(directory, name):
    (directory / name).unlink()
    (directory / name).mkdir()
    refused(directory, name)
    (directory / name).rmdir()
    (directory / name).symlink_to("gone")
    refused(directory, name)


@pytest.mark.parametrize(
    ("name", "key", "value", "culprit"),
    [
        ("config.json", "hidden_size", -1, "config.json"),
        ("config.json", "num_hidden_layers", 10**30, "config.json"),
        ("tokenizer.json", "model", {"type": "BPE"}, "tokenizer.json"),
        ("tokenizer.json", "version", 3, "tokenizer.json"),
        ("tokenizer.json", "decoder", {"type": "no such"}, "tokenizer.json"),
        ("tokenizer.json", "added_tokens", [1.5], " (tokenizer.json"),
        ("tokenizer_config.json", "tokenizer_class", [1], " (tokenizer.json"),
        ("tokenizer_config.json", "extra_special_tokens", 3, " (tokenizer.json"),
        ("generation_config.json", "top_p", -1, "generation_config.json"),
    ],
)
def test_a_value_of_another_kind_is_an_error_of_its_file(directory, name, key, value, culprit):
    values = json.loads((directory / name).read_text())
    (directory / name).write_text(json.dumps(values | {key: value}))
    if culprit.startswith(" "):
        with pytest.raises(CheckpointError) as caught:
            find_model(EngineOptions(directory))
        assert str(caught.value).startswith(f"{directory}{culprit}")
        assert "pass tokenizer=DIR" in str(caught.value)
    else:
        refused(directory, culprit)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_key_may_be_there_twice_with_one_value_only(directory, whole, name):
    text = (directory / name).read_text()
    key, value = next(iter(json.loads(text).items()))
    for other, is_same in ((value, True), (["another"], False)):
        twice = text.replace("{", f'{{"{key}": {json.dumps(other)}, ', 1)
        (directory / name).write_text(twice)
        if is_same:
            found, before = (find_model(EngineOptions(one)) for one in (directory, whole))
            assert found.spec == before.spec
            assert found.default_params() == before.default_params()
        else:
            assert f"got two values of '{key}': fetch" in refused(directory, name)


def test_a_chat_template_of_another_kind_or_encoding_is_refused(directory):
    (directory / "chat_template.jinja").write_bytes(b"caf\xe9")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja\): its tokenizer cannot be"):
        find_model(EngineOptions(directory))
    (directory / "chat_template.jinja").unlink()
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": 1.5}))
    assert "chat_template: expected a text" in refused(directory, "tokenizer_config.json")
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"model_max_length": "x"}))
    assert "model_max_length: expected a number" in refused(directory, "tokenizer_config.json")


def test_a_directory_of_gguf_alone_is_told_that_it_is_not_read(tmp_path):
    (tmp_path / "model-Q4_K_M.gguf").touch()
    assert "GGUF is not read: pass a directory" in refused(tmp_path, "config.json")


def test_a_tokenizer_of_more_tokens_than_the_model_is_refused(directory, whole):
    (directory / "config.json").write_text(json.dumps(tiny_config("llama", vocab_size=VOCAB - 1)))
    with pytest.raises(CheckpointError, match=r"at most 379 tokens, .* got 380: is it another"):
        find_model(EngineOptions(directory, tokenizer=whole))
    assert find_model(EngineOptions(directory, skip_tokenizer_init=True)).tokenizer is None


def test_an_added_token_without_an_embedding_is_no_reason_to_refuse(directory):
    values = json.loads((directory / "tokenizer.json").read_text())
    values["added_tokens"].append({**values["added_tokens"][0], "id": VOCAB, "content": "<more>"})
    (directory / "tokenizer.json").write_text(json.dumps(values))
    tokenizer = find_model(EngineOptions(directory)).tokenizer
    assert tokenizer.encode("<more>")[-1] == VOCAB
