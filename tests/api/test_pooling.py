"""Vectors and scores of prompts equal sentence-transformers' and transformers' arithmetic on the same
files.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from pathlib import Path
from unittest.mock import Mock

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from adapters import PREFIX, make_adapter, merged
from families import text_config
from jaxkv import (
    LLM,
    AsyncLLM,
    CheckpointError,
    EngineDeadError,
    LoRARequest,
    PoolingParams,
    SamplingParams,
)
from jaxkv.api.pooling import PoolingCall
from jaxkv.testing import engine_of, intake_of
from tiny import SMALL, make_checkpoint, tiny_config
from tokenizers_ import save_tokenizer

pytestmark = pytest.mark.usefixtures("quick_compile")

RNG = np.random.default_rng(3)
# Of one token, of several steps (32 tokens each), and as long as the model takes.
PROMPTS = [RNG.integers(3, 151, length).tolist() for length in (1, 9, 70, 128)]
TEXTS = ["The quick brown fox", "The end of the story is the beginning", "by one by one."]
TRANSFORMER = "sentence_transformers.models.Transformer"
TASKS = ("CAUSAL_LM", "FEATURE_EXTRACTION")
FLAGS = {
    "last": "pooling_mode_lasttoken",
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
}


@pytest.fixture(scope="module")
def torch():
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        yield torch


def rewrite(directory: Path, change) -> None:
    """Writes the checkpoint's tensors anew as `change` makes them."""
    file = directory / "model.safetensors"
    tensors = {name: np.array(x) for name, x in load_file(file).items()}
    save_file(change(tensors), file, metadata={"format": "pt"})


def write_modules(directory: Path, kind: str, *behind: str, size: int = 48) -> None:
    """Writes sentence-transformers' files: a pooling, and modules behind it."""
    names = ["Pooling", *behind]
    modules = [{"idx": 0, "name": "0", "path": "", "type": TRANSFORMER}]
    for index, name in enumerate(names, 1):
        path = f"{index}_{name}"
        type_ = f"sentence_transformers.models.{name}"
        modules.append({"idx": index, "name": str(index), "path": path, "type": type_})
        (directory / path).mkdir(exist_ok=True)
        if name == "Dense":
            config = {"in_features": size, "out_features": 20, "bias": True}
            config["activation_function"] = "torch.nn.modules.activation.Tanh"
            (directory / path / "config.json").write_text(json.dumps(config))
            dense = {
                "linear.weight": RNG.normal(size=(20, size)),
                "linear.bias": RNG.normal(size=20),
            }
            dense = {name: x.astype(np.float32) for name, x in dense.items()}
            save_file(dense, directory / path / "model.safetensors")
    (directory / "modules.json").write_text(json.dumps(modules))
    flags = {flag: name == kind for name, flag in FLAGS.items()} | {
        "pooling_mode_max_tokens": False
    }
    pooling = flags | {"word_embedding_dimension": size, "include_prompt": True}
    (directory / "1_Pooling/config.json").write_text(json.dumps(pooling))


def embedder(directory: Path, kind: str = "last", *behind: str, variant: str = "qwen3") -> Path:
    make_checkpoint(directory, tiny_config(variant))
    write_modules(directory, kind, *behind)
    return directory


def vectors(llm: LLM, prompts, **params) -> np.ndarray:
    given = PoolingParams(**params)
    outputs = llm.embed(prompts, pooling_params=given, use_tqdm=False)
    engine_of(llm).check()
    return np.array([output.outputs.embedding for output in outputs], np.float32)


def states_of(torch, directory: Path) -> list[np.ndarray]:
    """The hidden states of each prompt behind the final norm, [T, D]."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return [model.eval()(torch.tensor([ids])).last_hidden_state[0].numpy() for ids in PROMPTS]


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def pooled(states: list[np.ndarray], kind: str) -> np.ndarray:
    pick = {"last": lambda x: x[-1], "cls": lambda x: x[0], "mean": lambda x: x.mean(0)}[kind]
    return np.stack([pick(x) for x in states])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["last", "mean", "cls"])
def test_vectors_are_those_of_sentence_transformers_files(torch, tmp_path, kind):
    behind = {"last": ("Normalize",), "mean": ("Dense", "Normalize"), "cls": ()}[kind]
    directory = embedder(tmp_path, kind, *behind)
    want = pooled(states_of(torch, directory), kind)
    if "Dense" in behind:
        dense = load_file(directory / "2_Dense/model.safetensors")
        want = np.tanh(want @ dense["linear.weight"].T + dense["linear.bias"])
    raw, want = want, unit(want) if "Normalize" in behind else want
    llm = LLM(directory, **SMALL)
    for _ in range(2):  # with an empty prefix cache, and with one that has it all
        np.testing.assert_allclose(vectors(llm, PROMPTS), want, rtol=0, atol=1e-5)
    found = engine_of(llm).scheduler.num_found
    assert (found > 0) == (kind == "last")
    half = vectors(llm, PROMPTS, dimensions=10, normalize=True)
    np.testing.assert_allclose(half, unit(raw[:, :10]), rtol=0, atol=1e-5)
    assert {name for name, _ in engine_of(llm).programs.executables} == {"step", "pool"}
    assert engine_of(llm).programs.num_programs == 2  # all that it may ever compile


def test_a_mean_is_of_the_states_of_all_tokens(tmp_path):
    """Which are the last ones of all prefixes."""
    prompt = PROMPTS[2][:40]
    prefixes = [prompt[:length] for length in range(1, 41)]
    directory = embedder(tmp_path, "last")
    states = vectors(LLM(directory, **SMALL), prefixes)
    write_modules(directory, "mean", "Dense", "Normalize")
    dense = load_file(directory / "2_Dense/model.safetensors")
    want = unit(np.tanh(dense["linear.weight"] @ states.mean(0) + dense["linear.bias"]))
    llm = LLM(directory, **SMALL)
    for _ in range(2):
        np.testing.assert_allclose(vectors(llm, prompt)[0], want, rtol=0, atol=1e-5)
    assert {name for name, _ in engine_of(llm).programs.executables} == {"step", "pool"}
    write_modules(directory, "cls")
    found = vectors(LLM(directory, **SMALL), prompt)[0]
    np.testing.assert_allclose(found, states[0], rtol=0, atol=1e-5)


def test_a_base_model_s_names_and_a_missing_head_make_no_difference(tmp_path):
    directory = embedder(tmp_path / "whole", "last", "Normalize")
    want = vectors(LLM(directory, **SMALL), PROMPTS)
    bare = embedder(tmp_path / "bare", "last", "Normalize")
    assert "lm_head.weight" in load_file(bare / "model.safetensors")

    def strip(tensors):
        return {k.removeprefix("model."): x for k, x in tensors.items() if k != "lm_head.weight"}

    rewrite(bare, strip)
    llm = LLM(bare, **SMALL)
    np.testing.assert_array_equal(vectors(llm, PROMPTS), want)
    plain = make_checkpoint(tmp_path / "plain", tiny_config("qwen3"))
    pooling = LLM(plain, **SMALL, runner="pooling")
    np.testing.assert_array_equal(vectors(pooling, PROMPTS), want)
    other = make_checkpoint(tmp_path / "other", tiny_config("qwen3"), seed=5)
    pooling.update_weights(load_file(other / "model.safetensors"))
    changed = vectors(pooling, PROMPTS)
    np.testing.assert_array_equal(changed, vectors(LLM(other, **SMALL, runner="pooling"), PROMPTS))
    assert not np.allclose(changed, want, atol=0.1)
    # A directory of weights alone is pooled as before, one that says otherwise is refused.
    llm.update_weights(other)
    np.testing.assert_array_equal(vectors(llm, PROMPTS), changed)
    write_modules(other, "mean")
    with pytest.raises(CheckpointError, match=r"modules.json: expected the pooling of the model"):
        llm.update_weights(other)


@pytest.mark.slow
def test_vectors_and_scores_of_adapters_are_those_of_merged_weights(tmp_path):
    """Several in a batch; one has the names of a model without its head, as it was trained."""
    directory = embedder(tmp_path / "model", "mean", "Normalize")
    loras, want = [], []
    for seed in range(2):
        path = make_adapter(tmp_path / str(seed), directory, seed=seed, task_type=TASKS[seed])
        after = merged(tmp_path / f"merged{seed}", directory, path)
        want.append(vectors(LLM(after, **SMALL), [PROMPTS[2]])[0])
        loras.append(LoRARequest(str(seed), seed + 1, path))
    own = load_file(Path(loras[1].path) / "adapter_model.safetensors")
    own = {name.replace(f"{PREFIX}model.", PREFIX): np.array(x) for name, x in own.items()}
    save_file(own, Path(loras[1].path) / "adapter_model.safetensors")
    llm = LLM(directory, **SMALL, enable_lora=True, max_loras=2)
    want.append(vectors(LLM(directory, **SMALL), [PROMPTS[2]])[0])
    given = {"lora_request": [*loras, None], "use_tqdm": False}
    got = llm.embed([PROMPTS[2]] * 3, **given)
    found = np.array([one.outputs.embedding for one in got])
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-5)
    assert not np.allclose(want[0], want[1], atol=0.1)
    asked = [(PROMPTS[2], None, lora) for lora in given["lora_request"]]
    for index, output in llm.embed_as_completed(asked):
        np.testing.assert_allclose(output.outputs.embedding, want[index], rtol=0, atol=1e-5)

    async def run() -> list[list[float]]:
        async with AsyncLLM(directory, **SMALL, enable_lora=True, max_loras=2) as served:
            outputs = await served.embed([PROMPTS[2]] * 3, lora_request=[*loras, None])
            return [output.outputs.embedding for output in outputs]

    np.testing.assert_allclose(asyncio.run(run()), want, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="lora_request: expected one for all, got several"):
        llm.score("a", "b", lora_request=loras)
    engine_of(llm).check()


def test_prompts_are_cut_only_where_that_is_asked_for(tmp_path):
    directory = embedder(tmp_path, "mean")
    llm = LLM(directory, **SMALL)
    long = RNG.integers(3, 151, 200).tolist()
    with pytest.raises(ValueError, match="the prompt has 200 tokens; expected at most max_model"):
        llm.embed(long)
    want = vectors(llm, [long[:128], long[:5]])
    for most in (-1, 2**31):
        np.testing.assert_array_equal(vectors(llm, [long], truncate_prompt_tokens=most), want[:1])
    bars = []
    (cut,) = llm.embed(
        [long],
        truncate_prompt_tokens=5,
        use_tqdm=lambda **options: bars.append(options) or contextlib.nullcontext(Mock()),
    )
    assert [bar["total"] for bar in bars] == [1]
    assert cut.prompt_token_ids == long[:5]
    np.testing.assert_array_equal(np.float32(cut.outputs.embedding), want[1])


def test_a_prompt_that_is_begun_anew_gives_the_same_vector(tmp_path):
    directory = embedder(tmp_path, "mean")
    llm = LLM(directory, **SMALL)
    want = vectors(llm, PROMPTS)
    engine, asked = engine_of(llm), [PoolingParams()] * len(PROMPTS)
    submissions = intake_of(llm).accept_pooling(PROMPTS, asked)
    for submission in submissions:
        engine.add(submission)
    for steps in range(100):
        if steps in (2, 4):
            llm.update_weights(directory)  # which preempts what is under way
        if not engine.has_work:
            break
        engine.step()
    assert any(submission.samples[0].record.num_preemptions for submission in submissions)
    found = np.stack([submission.samples[0].output.pooled_D for submission in submissions])
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-6)


def classifier(directory: Path, labels: int, **more) -> Path:
    config = tiny_config("llama") | {"architectures": ["LlamaForSequenceClassification"]}
    config |= {"id2label": {str(i): str(i) for i in range(labels)}, "pad_token_id": 0, **more}
    make_checkpoint(directory, config)
    head = {"score.weight": RNG.normal(size=(labels, 48)) / 48}
    head = {name: x.astype(np.float32) for name, x in head.items()}
    rewrite(directory, lambda x: {k: t for k, t in x.items() if k != "lm_head.weight"} | head)
    return directory


def test_numbers_of_a_regression_are_what_its_head_says(tmp_path):
    """As in transformers' pipeline, which applies no function to them."""
    llm = LLM(classifier(tmp_path, 1, problem_type="regression"), **SMALL)
    (raw,) = llm.reward(PROMPTS[:1], use_tqdm=False)
    (one,) = llm.classify(PROMPTS[:1], use_tqdm=False)
    np.testing.assert_array_equal(one.outputs.probs, raw.outputs.data)


@pytest.mark.slow
@pytest.mark.parametrize("labels", [1, 3])
def test_classifiers_score_as_transformers(torch, tmp_path, labels):
    from transformers import AutoModelForSequenceClassification

    directory = classifier(tmp_path, labels)
    model = AutoModelForSequenceClassification.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    logits = torch.stack([model(torch.tensor([ids])).logits[0] for ids in PROMPTS])
    llm = LLM(directory, **SMALL)
    rewards = [output.outputs.data for output in llm.reward(PROMPTS, use_tqdm=False)]
    np.testing.assert_allclose(np.stack(rewards), logits.numpy(), rtol=0, atol=1e-5)
    want = (torch.sigmoid(logits) if labels == 1 else torch.softmax(logits, -1)).numpy()
    outputs = llm.classify(PROMPTS, use_tqdm=False)
    np.testing.assert_allclose([one.outputs.probs for one in outputs], want, rtol=0, atol=1e-5)
    assert outputs[0].outputs.num_classes == labels
    plain = PoolingParams(activation=False)
    raw = llm.classify(PROMPTS[0], pooling_params=plain, use_tqdm=False)
    np.testing.assert_allclose(raw[0].outputs.probs, logits[0].numpy(), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_pairs_are_scored_by_a_head_by_two_tokens_or_by_the_angle(tmp_path):
    options = SMALL | {"skip_tokenizer_init": False}
    config = tiny_config("llama", vocab_size=420)
    directory = make_checkpoint(tmp_path, config)
    save_tokenizer(directory)
    tokenizer_words = {"classifier_from_token": ["a", "b"]}
    asked = LLM(directory, **options, hf_overrides=tokenizer_words)
    ids = asked.get_tokenizer().get_vocab()
    scores = asked.score(TEXTS[0], TEXTS[1:], use_tqdm=False)
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=420)
    generating = LLM(directory, **options, max_logprobs=-1)
    for second, output in zip(TEXTS[1:], scores, strict=True):
        prompt = asked.get_tokenizer().encode(TEXTS[0], text_pair=second)
        assert output.prompt_token_ids == prompt
        (said,) = generating.generate([prompt], params, use_tqdm=False)
        logprobs = said.outputs[0].logprobs[0]
        no, yes = (np.exp(logprobs[ids[word]].logprob) for word in "ab")
        assert output.outputs.score == pytest.approx(yes / (yes + no), abs=1e-5)
    short, tokenizer = PoolingParams(truncate_prompt_tokens=5), asked.get_tokenizer()
    (cut,) = asked.score(TEXTS[0], TEXTS[1], pooling_params=short, use_tqdm=False)
    own_cut = {"truncation": True, "max_length": 5}
    assert cut.prompt_token_ids == tokenizer.encode(TEXTS[0], text_pair=TEXTS[1], **own_cut)
    for second, message in (("", "empty"), ("\ud800", "Unicode")):
        with pytest.raises(ValueError, match=message):
            asked.score(TEXTS[0], second)
    before = asked.reward(TEXTS[1], use_tqdm=False)[0].outputs.data
    arrays = {name: np.array(x) for name, x in load_file(directory / "model.safetensors").items()}
    arrays["lm_head.weight"] *= 2
    asked.update_weights(arrays)
    after = asked.reward(TEXTS[1], use_tqdm=False)[0].outputs.data
    np.testing.assert_allclose(after, 2 * before, rtol=1e-5)
    asked.update_weights(directory)
    again = asked.reward(TEXTS[1], use_tqdm=False)[0].outputs.data
    np.testing.assert_array_equal(again, before)
    vector = LLM(directory, **options, runner="pooling")
    embedded = [np.array(one.outputs.embedding) for one in vector.embed(TEXTS, use_tqdm=False)]
    angles = vector.score(TEXTS[:1] * 2, TEXTS[1:], use_tqdm=False)
    want = [embedded[0] @ other for other in embedded[1:]]
    np.testing.assert_allclose([one.outputs.score for one in angles], want, rtol=0, atol=1e-6)


def test_what_such_a_model_does_not_do_is_refused(tmp_path):
    directory = embedder(tmp_path, "last")
    llm = LLM(directory, **SMALL)
    generating = LLM(directory, **SMALL, runner="generate")
    for call in (
        lambda: llm.generate(PROMPTS[0]),
        lambda: llm.session(PROMPTS[0]),
        lambda: next(llm.stream(PROMPTS[0])),
    ):
        with pytest.raises(ValueError, match="expected a model that generates, got one that pools"):
            call()
    for call, message in (
        (lambda: generating.embed(PROMPTS[0]), r"expected LLM\(runner=.pooling.\)"),
        (lambda: generating.embed_as_completed([]), r"expected LLM\(runner=.pooling.\)"),
        (lambda: llm.embed_as_completed(5), "requests: expected an iterable .*PoolingParams"),
        (lambda: generating.classify(PROMPTS[0]), r"expected LLM\(runner=.pooling.\)"),
        (lambda: llm.classify(PROMPTS[0]), "expected a model with a classifier's head"),
        (lambda: llm.reward(PROMPTS[0]), "expected a model with a classifier's head"),
        (lambda: llm.embed([[1], [151]]), "prompt 1: .* from 0 to 150"),
        (lambda: llm.embed([1], pooling_params=PoolingParams(dimensions=49)), "at most 48"),
        (lambda: llm.embed([1], pooling_params=3), "pooling_params: expected PoolingParams"),
        (lambda: llm.score(["a", "b"], ["a", "b", "c"]), "expected one text or as many"),
        (lambda: PoolingParams(dimensions=0), "dimensions: expected None, a number >= 1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_head_by_two_tokens_is_refused_where_logits_are_more_than_its_rows(tmp_path):
    words = {"hf_overrides": {"classifier_from_token": ["a", "b"]}, "runner": "pooling"}
    for variant in ("gemma2", "granite", "phi"):
        directory = make_checkpoint(tmp_path / variant, text_config(variant) | {"vocab_size": 420})
        save_tokenizer(directory)
        options = SMALL | {"skip_tokenizer_init": False}
        with pytest.raises(CheckpointError, match=r"classifier_from_token: .*no bias, factor"):
            LLM(directory, **options, **words)


def test_a_head_of_any_name_is_left_out(tmp_path):
    directory = make_checkpoint(tmp_path, text_config("gpt_neox"))
    assert "embed_out.weight" in load_file(directory / "model.safetensors")
    (one,) = LLM(directory, **SMALL, runner="pooling").embed(PROMPTS[:1], use_tqdm=False)
    assert np.isfinite(one.outputs.embedding).all()


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("modules.json", lambda x: x[1:], "expected a Transformer in this folder and a Pooling"),
        ("modules.json", lambda x: [*x, x[0]], "expected Dense and then Normalize behind"),
        ("modules.json", lambda x: [x[0], x[1] | {"path": "../x"}], "expected a type and a folder"),
        ("modules.json", lambda _: [], "expected a list of 1 to 16 objects"),
        ("1_Pooling/config.json", lambda x: x | {"pooling_mode_max_tokens": True}, "to be true"),
        ("1_Pooling/config.json", lambda x: x | {"include_prompt": False}, "include_prompt"),
        ("1_Pooling/config.json", lambda x: x | {"word_embedding_dimension": 7}, "word_embedding"),
        ("config.json", lambda x: x | {"is_causal": False}, "is_causal"),
        ("sentence_bert_config.json", lambda x: x | {"do_lower_case": True}, "do_lower_case"),
    ],
)
def test_files_that_ask_for_something_else_are_refused(tmp_path, file, change, message):
    path = embedder(tmp_path, "last") / file
    given = json.loads(path.read_text()) if path.is_file() else {"max_seq_length": 9}
    path.write_text(json.dumps(change(given)))
    with pytest.raises(CheckpointError, match=message):
        LLM(tmp_path, **SMALL)


def test_a_classifier_without_its_head_is_refused(tmp_path):
    directory = classifier(tmp_path, 2)
    rewrite(directory, lambda x: {k: t for k, t in x.items() if k != "score.weight"})
    with pytest.raises(CheckpointError, match=r"missing tensor score\.weight"):
        LLM(directory, **SMALL)


def test_a_classifiers_head_is_of_floats(tmp_path):
    """Numbers of a quantised one have a scale beside them."""
    directory = classifier(tmp_path, 2)
    want = LLM(directory, **SMALL).classify(PROMPTS[1], use_tqdm=False)[0].outputs.probs

    def stored_as(dtype):
        rewrite(directory, lambda x: x | {"score.weight": x["score.weight"].astype(dtype)})
        return LLM(directory, **SMALL)

    got = stored_as(ml_dtypes.bfloat16).classify(PROMPTS[1], use_tqdm=False)[0].outputs.probs
    np.testing.assert_allclose(got, want, rtol=0, atol=0.02)
    for dtype in (np.int8, ml_dtypes.float8_e4m3fn):
        with pytest.raises(CheckpointError, match=r"score.weight: expected one of float32"):
            stored_as(dtype)


def test_tasks_of_an_event_loop_get_what_llm_returns(tmp_path, monkeypatch):
    config = tiny_config("llama", vocab_size=420)
    directory = make_checkpoint(tmp_path, config)
    save_tokenizer(directory)
    options = SMALL | {
        "skip_tokenizer_init": False,
        "hf_overrides": {
            "classifier_from_token": ["a", "b"],
            "is_original_qwen3_reranker": True,  # as vLLM's documentation has it
        },
    }
    llm = LLM(directory, **options)
    cut = {"truncate_prompt_tokens": 50}

    makers, results = set[threading.Thread](), PoolingCall.results

    def noted(*given):
        makers.add(threading.current_thread())
        return results(*given)

    kind, readers = type(llm.get_tokenizer()), set[str]()
    encode = kind.encode

    def read(*given, **options):
        readers.add(threading.current_thread().name)
        return encode(*given, **options)

    async def main() -> None:
        async with AsyncLLM(directory, **options) as served:
            engine_of(served).programs.executables = engine_of(llm).programs.executables
            assert served.pools
            monkeypatch.setattr(PoolingCall, "results", noted)
            monkeypatch.setattr(kind, "encode", read)
            vectors, rewards, labels, scores, short = await asyncio.gather(
                served.embed(PROMPTS),
                served.reward(PROMPTS),
                served.classify(TEXTS),
                served.score(TEXTS[0], TEXTS[1:]),
                served.embed(PROMPTS[3], pooling_params=PoolingParams(dimensions=5), **cut),
            )
            assert threading.current_thread() not in makers  # which it would hold up
            assert readers == {"jaxkv-tokenizer_0"}  # not the engine's
            for got, want in (
                (vectors, llm.embed(PROMPTS, use_tqdm=False)),
                (labels, llm.classify(TEXTS, use_tqdm=False)),
                (scores, llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)),
            ):
                assert [one.outputs for one in got] == [one.outputs for one in want]
                assert [x.prompt_token_ids for x in got] == [x.prompt_token_ids for x in want]
            heads = [x.outputs.data for x in llm.reward(PROMPTS, use_tqdm=False)]
            np.testing.assert_array_equal([x.outputs.data for x in rewards], heads)
            (want,) = llm.embed(PROMPTS[3][:50], use_tqdm=False)
            first = np.float32(want.outputs.embedding[:5])
            np.testing.assert_allclose(short[0].outputs.embedding, unit(first), atol=1e-6)
            for bad, message in (
                (served.embed([[1], [999]]), "prompt 1"),
                (served.score(["a", "b"], ["c"] * 3), "expected one text or as many"),
            ):
                with pytest.raises(ValueError, match=message):
                    await bad
            # One that is cancelled before its prompts are added, and one with some of them done.
            for turns in (0, 5):
                task = asyncio.create_task(served.embed([PROMPTS[3][i:] for i in range(60)]))
                for _ in range(turns):
                    await served.is_sleeping()
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                await served.is_sleeping()
                assert not engine_of(served).has_work
                engine_of(served).check()
            left = asyncio.create_task(served.embed([PROMPTS[3][i:] for i in range(60)]))
            await served.is_sleeping()
        for late in (left, served.embed(PROMPTS)):
            with pytest.raises(EngineDeadError, match="shut down"):
                await late

    asyncio.run(main())
