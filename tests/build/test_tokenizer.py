"""A tokenizer is the one that transformers' AutoTokenizer loads, whoever chooses its class."""

import json
import sys

import pytest

from jaxkv.build.model import find_model
from jaxkv.build.options import EngineOptions
from jaxkv.build.tokenizer import ALWAYS, ALWAYS_GENERIC, OF_MODELS, known_class, load_tokenizer
from jaxkv.errors import CheckpointError
from jaxkv.requests.grammar import Grammars
from tiny import make_checkpoint, tiny_config
from tokenizers_ import save_tokenizer

TEXTS = ["The end of  the story", " One\n\nby <s> one", "Привет, мир! 12345"]


@pytest.mark.parametrize(
    ("name", "model_type", "is_known"),
    [
        ("PreTrainedTokenizerFast", "llama", True),
        ("TokenizersBackend", None, True),
        ("Qwen2Tokenizer", "qwen3", True),
        ("Qwen2TokenizerFast", "qwen2", True),
        ("GemmaTokenizer", "gemma3_text", True),
        ("LlamaTokenizer", "llama", True),
        ("LlamaTokenizerFast", "mistral", True),
        ("GPT2Tokenizer", "granite", True),
        ("GPT2Tokenizer", "olmo2", True),
        ("PreTrainedTokenizerFast", "qwen2", True),
        ("LlamaTokenizerFast", "qwen2", True),
        ("GPT2Tokenizer", "gpt2", True),
        ("GPTNeoXTokenizerFast", "gpt_neox", True),
        ("CohereTokenizerFast", "cohere2", True),
        ("LlamaTokenizerFast", "phi3", True),
        ("Qwen2Tokenizer", "llama", False),
    ],
)
def test_the_class_is_the_one_that_transformers_chooses(tmp_path, name, model_type, is_known):
    from transformers import AutoTokenizer

    save_tokenizer(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": name}))
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert (known_class(tmp_path) is not None) == is_known
    want, got = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    assert type(got) is type(want)
    for text in TEXTS:
        assert got.encode(text) == want.encode(text)


def test_no_space_is_taken_out_of_a_text_whatever_the_files_ask_for(tmp_path):
    save_tokenizer(tmp_path)
    file, asked = tmp_path / "tokenizer_config.json", "clean_up_tokenization_spaces"
    more = {asked: True, f"{asked}_for_bpe_even_though_it_will_corrupt_output": True}
    file.write_text(json.dumps(json.loads(file.read_text()) | more))
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("One . Two", add_special_tokens=False)
    assert tokenizer.decode(ids) == "One . Two"


@pytest.mark.parametrize("own", [None, "own"])
def test_a_template_in_a_file_of_its_own_counts_where_there_is_no_other(tmp_path, own):
    """Mistral Small 3.1 has it so; in transformers its processor alone reads it."""
    save_tokenizer(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    more = {} if own is None else {"chat_template": own}
    file.write_text(json.dumps(json.loads(file.read_text()) | more))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "of the file"}))
    assert load_tokenizer(tmp_path).chat_template == (own or "of the file")


def test_a_vocabulary_and_its_merges_are_a_tokenizer(tmp_path):
    from transformers import AutoTokenizer

    letters = {letter: number for number, letter in enumerate("abcdeĠ")}
    (tmp_path / "vocab.json").write_text(json.dumps(letters | {"ab": 6, "abc": 7}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(
        CheckpointError, match=r"expected tokenizer\.json or tokenizer_config\.json"
    ):
        load_tokenizer(tmp_path)
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\nab c\n")
    want = AutoTokenizer.from_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).encode("abc ab") == want.encode("abc ab") == [7, 5, 6]


def test_a_llama_tokenizer_of_pieces_is_the_one_that_transformers_chooses(tmp_path):
    from transformers import AutoTokenizer

    save_tokenizer(tmp_path, "sentencepiece-like")
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {"tokenizer_class": "LlamaTokenizer"}
    file.write_text(json.dumps(config))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    want, got = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    assert type(got) is type(want) is known_class(tmp_path)
    assert type(got).__name__ == "LlamaTokenizer"
    for text in TEXTS:
        assert got.encode(text) == want.encode(text)


def test_the_classes_of_model_types_are_those_of_transformers():
    from transformers.models.auto.tokenization_auto import (
        MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS,
        TOKENIZER_MAPPING_NAMES,
    )

    for model_type, name in ALWAYS.items():
        assert TOKENIZER_MAPPING_NAMES[model_type].removesuffix("Fast") == name
        assert model_type in MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    for name, model_types in OF_MODELS.items():
        for model_type in model_types:
            assert TOKENIZER_MAPPING_NAMES.get(model_type, name).removesuffix("Fast") == name
    generic = ("TokenizersBackend", "MistralCommonBackend")
    assert {TOKENIZER_MAPPING_NAMES[name] for name in ALWAYS_GENERIC} <= {*generic}


@pytest.mark.parametrize("change", [{"auto_map": {}}, {"tokenizer_class": None}])
def test_where_files_leave_a_doubt_transformers_is_asked(tmp_path, change):
    save_tokenizer(tmp_path)
    assert known_class(tmp_path) is not None
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert known_class(tmp_path) is None


OWN = """
from transformers import PreTrainedTokenizer


class OwnTokenizer(PreTrainedTokenizer):
    vocab_size = 256

    def get_vocab(self):
        return {chr(256 + i): i for i in range(256)} | self.added_tokens_encoder

    def _tokenize(self, text):
        return [chr(256 + byte) for byte in text.encode()]

    def _convert_token_to_id(self, token):
        return ord(token) - 256

    def _convert_id_to_token(self, number):
        return chr(256 + number)

    def convert_tokens_to_string(self, tokens):
        return bytes(ord(token) - 256 for token in tokens).decode(errors="replace")
"""


def test_code_of_a_checkpoint_makes_a_tokenizer_only_where_it_is_trusted(tmp_path, monkeypatch):
    cache = "transformers.dynamic_module_utils.HF_MODULES_CACHE"
    monkeypatch.setattr(cache, str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", [*sys.path])  # to which that directory is added
    make_checkpoint(tmp_path, tiny_config("llama", vocab_size=257))
    (tmp_path / "tokenization_own.py").write_text(OWN)
    names = {"auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}}
    names |= {"tokenizer_class": "OwnTokenizer", "eos_token": "<end>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    with pytest.raises(CheckpointError, match=r"custom code.*\n.*\n.*trust_remote_code=True"):
        find_model(EngineOptions(tmp_path))
    tokenizer = find_model(EngineOptions(tmp_path, trust_remote_code=True)).tokenizer
    ids = tokenizer.encode("naïve")
    assert ids == [*"naïve".encode()]
    assert tokenizer.decode(ids) == "naïve"
    with pytest.raises(ValueError, match="tokenizers library, got OwnTokenizer, which is Python"):
        Grammars(tokenizer, 257, [256])
