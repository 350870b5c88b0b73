"""The lm-evaluation-harness gets from jaxkv what it gets from its transformers backend: on a task
of every kind, offline, sample by sample.
"""

import json
from collections.abc import Callable
from functools import partial

import pytest

from jaxkv.api.llm import LLM
from jaxkv.config import SamplingParams

pytestmark = pytest.mark.slow
lm_eval = pytest.importorskip("lm_eval")
backend = pytest.importorskip("lm_eval.models.huggingface", exc_type=ImportError)
task_files = pytest.importorskip("lm_eval.tasks")
harness = pytest.importorskip("jaxkv.api.lm_eval")
JaxKV = harness.JaxKV

WINDOW = 126
SMALL = {
    "max_model_len": WINDOW + 2,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "block_size": 8,
    "dtype": "float32",
}
WORDS = "the quick brown fox jumps over a lazy dog and counted stars in the night sky one by one"
TASKS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "Q: {{question}}\nA:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "fewshot_split": "train",
        "num_fewshot": 2,
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "generation": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{question}}",
        "generation_kwargs": {"until": ["e ", "\n"], "max_gen_toks": 20},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> object:
    """Tasks of three kinds over local files. The longest texts take several windows, and some
    questions lose their beginning.
    """
    folder = tmp_path_factory.mktemp("tasks")
    words = WORDS.split()
    rows = [
        {
            "question": " ".join(words[(i + j) % len(words)] for j in range(3 + i)),
            "choices": [f" {words[i % 9]}", f" {words[i % 7]} {words[i % 5]}", " sky"],
            "answer": i % 3,
            "text": " ".join(words[(i * j) % len(words)] for j in range(5 + 12 * i)),
        }
        for i in range(12)
    ]
    for split in ("train", "test"):
        (folder / f"{split}.json").write_text("\n".join(map(json.dumps, rows)))
    files = {split: str(folder / f"{split}.json") for split in ("train", "test")}
    for name, task in TASKS.items():
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": files}}
        whole = {"task": f"local_{name}", "test_split": "test", **source, **task}
        (folder / f"{name}.yaml").write_text(json.dumps(whole))  # JSON is YAML
    return task_files.TaskManager(include_path=str(folder), include_defaults=False)


@pytest.fixture(scope="module")
def model(checkpoint) -> object:
    return JaxKV(LLM(checkpoint, **SMALL, lazy_compile=True))


@pytest.fixture(scope="module")
def reference(checkpoint) -> object:
    return backend.HFLM(
        pretrained=str(checkpoint), device="cpu", dtype="float32", batch_size=1, max_length=WINDOW
    )


@pytest.fixture
def evaluate(tasks, monkeypatch, tmp_path) -> Callable[..., dict]:
    for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return partial(
        lm_eval.simple_evaluate,
        tasks=[f"local_{name}" for name in TASKS],
        task_manager=tasks,
        bootstrap_iters=0,
        log_samples=True,
    )


def samples_of(results: dict) -> dict[tuple[str, int], object]:
    return {
        (name, sample["doc_id"]): sample["filtered_resps"]
        for name, samples in results["samples"].items()
        for sample in samples
    }


@pytest.mark.filterwarnings("ignore")  # of the harness and of what it imports
@pytest.mark.parametrize("chat", [False, True])
def test_scores_and_texts_are_those_of_the_transformers_backend(model, reference, evaluate, chat):
    options = {"apply_chat_template": True, "fewshot_as_multiturn": True} if chat else {}
    if chat:
        options["tasks"] = ["local_choice", "local_generation"]
    want, got = (evaluate(one, **options) for one in (reference, model))
    expected, found = samples_of(want), samples_of(got)
    assert expected.keys() == found.keys()
    assert len(expected) == (24 if chat else 36)
    worst = {"choice": 0.0, "rolling": 0.0}
    for (name, document), one in expected.items():
        other = found[name, document]
        if name == "local_generation":
            # A character that the last token leaves unfinished is shown by transformers only.
            assert other == [text.rstrip("\ufffd") for text in one]
        elif name == "local_choice":
            assert [greedy for _, greedy in other] == [greedy for _, greedy in one]
            differences = [abs(x[0] - y[0]) for x, y in zip(one, other, strict=True)]
            worst["choice"] = max(worst["choice"], *differences)
        else:  # sums over up to 500 tokens, which transformers adds up in float32
            worst["rolling"] = max(worst["rolling"], abs(other[0] - one[0]) / abs(one[0]))
    print(f"largest differences: {worst['choice']:.1e} absolute, {worst['rolling']:.1e} relative")
    assert worst["choice"] < 1e-4
    assert worst["rolling"] < 1e-6
    for name, result in want["results"].items():
        for metric, value in result.items():
            if isinstance(value, float):
                assert got["results"][name][metric] == pytest.approx(value, rel=1e-4), metric


@pytest.mark.filterwarnings("ignore")
def test_few_shot_prefixes_come_from_the_cache(model, evaluate):
    model.llm.reset_prefix_cache()

    def counted() -> dict[str, float]:
        metrics = model.llm.get_metrics("")
        return {one.name: one.value for one in metrics if one.name.startswith("prefix_cache_")}

    before = counted()
    evaluate(model, tasks=["local_choice"])
    hits, queries = (
        counted()[f"prefix_cache_{x}"] - before[f"prefix_cache_{x}"] for x in ("hits", "queries")
    )
    assert hits > 0.5 * queries > 0, (hits, queries)


def test_what_is_not_supported_is_named(model, checkpoint):
    with pytest.raises(ValueError, match="device: expected none"):
        JaxKV(model.llm, device="cuda")
    with pytest.raises(ValueError, match="dtype: expected nothing beside an LLM"):
        JaxKV(model.llm, dtype="float32")
    with pytest.raises(ValueError, match="generation_kwargs: not supported: num_beams"):
        model._generation({"until": "x", "num_beams": 2})
    assert model._generation(
        {"until": "x", "do_sample": False, "temperature": 1.0}
    ) == SamplingParams(temperature=0.0, max_tokens=256, stop=["x"])
    for given, want in (
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"temperature": 0.5}, {"temperature": 0.5}),
        ({"repetition_penalty": 2.0}, {"temperature": 0.0, "repetition_penalty": 2.0}),
        (
            {"do_sample": False, "repetition_penalty": 2.0},
            {"temperature": 0.0, "repetition_penalty": 2.0},
        ),
    ):
        assert model._generation(given) == SamplingParams(max_tokens=256, **want)
    for given, message in (
        ({"until": 3}, "until: expected a text or a list of texts"),
        ({"until": [None]}, "stop: expected a string or a list of strings"),
        ({"do_sample": "false"}, "do_sample: expected True or False"),
        ({"temperature": "hot"}, "temperature: expected a finite"),
        ({"max_gen_toks": "x"}, "max_tokens: expected None or a number"),
    ):
        with pytest.raises(ValueError, match=message):
            model._generation(given)
    with pytest.raises(ValueError, match="prefix_token_id: expected a token"):
        JaxKV(model.llm, prefix_token_id="x")
    with pytest.raises(ValueError, match="request 0: expected a context and a continuation"):
        model._loglikelihood_tokens([(None, [1], [2] * (WINDOW + 1))])
