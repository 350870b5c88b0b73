"""What scripts written for vLLM say, said to jaxkv: the same names give the same things, and what
is not here is refused in one sentence.
"""

import argparse
import asyncio
import dataclasses
import inspect
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tqdm import tqdm

import jaxkv
from jaxkv import LLM, AsyncEngineArgs, AsyncLLM, EngineArgs, EngineDeadError, LoRARequest
from jaxkv.build.options import ABOUT
from jaxkv.build.vllm_arguments import ABSENT, ABSENT_FROM_ASYNC, ABSENT_FROM_LLM, FOREIGN
from jaxkv.inputs import PromptType, TextPrompt, TokensPrompt
from jaxkv.metrics import Counter, Gauge, Histogram
from jaxkv.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxkv.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from jaxkv.testing import engine_of

pytestmark = pytest.mark.usefixtures("quick_compile")

OPTIONS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 8,
    "dtype": "float32",
    "max_model_len": 128,
    "lazy_compile": True,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
IDS = [9, 8, 7]
OF_VLLM = json.loads(Path(__file__).with_name("vllm_names.json").read_text())
PAGE = Path(__file__).parents[2] / "docs/vllm.md"


@pytest.fixture(scope="module")
def llm(checkpoint) -> LLM:
    return LLM(checkpoint, **OPTIONS)


def ids_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_modules_have_the_classes_that_jaxkv_has():
    for module in ("inputs", "outputs", "sampling_params"):  # metrics are too plain for the package
        for name in (names := __import__(f"jaxkv.{module}", fromlist=["x"])).__all__:
            assert getattr(names, name) is getattr(jaxkv, name)
    assert PromptType


def test_prompts_in_every_form_are_one_prompt_or_as_many(llm):
    (want,) = ids_of(llm.generate({"prompt_token_ids": IDS}, GREEDY, use_tqdm=False))
    one = [IDS, tuple(IDS), np.array(IDS), TokensPrompt(prompt_token_ids=IDS), np.int32(IDS)]
    one += [TokensPrompt(prompt_token_ids=np.array(IDS), prompt="shown")]
    for prompt in one:
        assert ids_of(llm.generate(prompt, GREEDY, False)) == [want]
    many = [[IDS, IDS], np.array([IDS, IDS]), (np.array(IDS), {"prompt_token_ids": IDS})]
    for prompts in many:
        assert ids_of(llm.generate(prompts, GREEDY, use_tqdm=False)) == [want, want]
    texts = ["The end", TextPrompt(prompt="The end")]
    said = llm.generate(texts, GREEDY, use_tqdm=False)
    for given in (np.array(["The end"] * 2), {"prompt": "The end", "multi_modal_data": None}):
        assert ids_of(llm.generate(given, GREEDY, use_tqdm=False))[0] == ids_of(said)[0]
    with pytest.raises(ValueError, match=r"prompts: expected a prompt or a list .*, got generator"):
        llm.generate((text for text in texts), GREEDY)
    with pytest.raises(ValueError, match=r"prompt 1: expected a text, token ids, .*, got float"):
        llm.generate([IDS, 0.5], GREEDY)


def test_harmless_arguments_of_calls_are_taken_and_others_refused(llm):
    want = ids_of(llm.generate([IDS, IDS], GREEDY, use_tqdm=False))
    none = {"lora_request": None, "use_tqdm": False}
    assert ids_of(llm.generate([IDS, IDS], GREEDY, **none, priority=1)) == want
    assert ids_of(llm.generate([IDS, IDS], (GREEDY, GREEDY), False, None, np.array([1, 0]))) == want
    message = [{"role": "user", "content": "The end"}]
    chat = llm.chat(message, GREEDY, **none, chat_template_content_format="string")
    assert chat[0].outputs == llm.chat(message, GREEDY, use_tqdm=False)[0].outputs
    llm.beam_search(
        [TokensPrompt(prompt_token_ids=IDS)], BeamSearchParams(beam_width=1, max_tokens=2), **none
    )
    for index, refused in (
        (0, lambda: llm.generate(IDS, GREEDY, lora_request="mine")),
        (1, lambda: llm.generate([IDS, IDS], GREEDY, lora_request=[None, "mine"])),
        (0, lambda: llm.chat(message, GREEDY, lora_request=3)),
    ):
        with pytest.raises(ValueError, match=rf"^prompt {index}: lora_request: expected a LoRAReq"):
            refused()
    mine = LoRARequest("mine", 1, "somewhere")
    with pytest.raises(ValueError, match=r"^prompt 0: .* expected None without .*enable_lora=True"):
        llm.generate(IDS, GREEDY, lora_request=mine)
    with pytest.raises(ValueError, match=r"^prompt 0: .* expected None without .*enable_lora=True"):
        llm.beam_search([IDS], BeamSearchParams(beam_width=1, max_tokens=2), lora_request=mine)
    with pytest.raises(ValueError, match=r"^chat_template_content_format: expected one of auto, "):
        llm.chat(message, GREEDY, chat_template_content_format="list")


def test_assigned_parameters_are_checked_when_used_and_apart_from_what_runs(llm):
    params = replace(GREEDY, max_tokens=3)
    stream = llm.stream(IDS, params)
    params.max_tokens = 5
    assert len(ids_of(llm.generate(IDS, params, use_tqdm=False))[0]) == 5
    assert sum(len(output.outputs[0].token_ids) for output in stream) == 3
    params.temperature = -1
    with pytest.raises(ValueError, match=r"^prompt 0: temperature: expected a finite"):
        llm.generate(IDS, params, use_tqdm=False)


def test_outputs_have_the_fields_that_wrappers_copy(llm):
    (output,) = llm.generate(IDS, GREEDY, use_tqdm=False)
    names = "request_id prompt prompt_token_ids prompt_logprobs outputs finished metrics"
    names += " lora_request encoder_prompt encoder_prompt_token_ids num_cached_tokens"
    names += " multi_modal_placeholders kv_transfer_params ec_transfer_params"
    assert RequestOutput(**{name: getattr(output, name) for name in names.split()}) == output
    (one,) = output.outputs
    names = "index text token_ids cumulative_logprob logprobs finish_reason stop_reason"
    names += " lora_request"
    assert CompletionOutput(**{name: getattr(one, name) for name in names.split()}) == one
    times = output.metrics
    assert times.queued_ts <= times.scheduled_ts <= times.first_token_ts <= times.last_token_ts
    assert times.first_token_latency == times.first_token_time - times.arrival_time
    assert (times.num_generation_tokens, times.num_preemptions) == (len(one.token_ids), 0)


def test_older_and_newer_scripts_give_the_same(llm):
    want = ids_of(llm.generate([IDS, IDS], GREEDY, use_tqdm=False))
    shown = []

    class Bar(tqdm):
        def update(self, n: float = 1) -> None:
            shown.append(n)

    assert ids_of(llm.generate(prompt_token_ids=[IDS, IDS], sampling_params=GREEDY)) == want
    assert ids_of(llm.generate([IDS, IDS], GREEDY, use_tqdm=Bar)) == want
    assert shown == [1, 1]
    off = {"flat_logprobs": False, "watermarking": None, "skip_clone": True}
    off |= {"stream_interval": None, "logprob_token_ids": [], "skip_reading_prefix_cache": False}
    assert ids_of(llm.generate([IDS, IDS], replace(GREEDY, **off), use_tqdm=False)) == want
    with pytest.raises(ValueError, match="prompt_token_ids: expected no prompts beside them"):
        llm.generate("x", prompt_token_ids=IDS)
    for field in ("flat_logprobs", "logprob_token_ids", "trace_decode_token_ids"):
        for value in (True, [3], 3, np.array([1, 2])):
            with pytest.raises(ValueError, match=f"{field}=.* is not supported yet"):
                SamplingParams(**{field: value})
    search = BeamSearchParams(beam_width=2, max_tokens=4)
    plain, skipping = (
        llm.beam_search([IDS], replace(search, skip_special_tokens=skips))[0].sequences[0]
        for skips in (False, True)
    )
    decode = llm.get_tokenizer().decode
    assert plain.tokens == skipping.tokens
    assert plain.text == decode(plain.tokens)
    assert skipping.text == decode(plain.tokens, skip_special_tokens=True)


def test_every_kind_of_output_of_async_llm_is_the_same_in_the_end(llm, checkpoint):
    params = SamplingParams(n=2, seed=1, max_tokens=20, ignore_eos=True, logprobs=0)
    params.prompt_logprobs = 0

    async def read(served: AsyncLLM, kind: RequestOutputKind) -> list[RequestOutput]:
        given = replace(params, output_kind=kind)
        return [output async for output in served.generate(IDS, given, lora_request=None)]

    async def main() -> list[list[RequestOutput]]:
        async with AsyncLLM(checkpoint, **OPTIONS) as served:
            engine_of(served).programs.executables = engine_of(llm).programs.executables
            return [await read(served, kind) for kind in RequestOutputKind]

    whole, new, final = asyncio.run(main())
    assert len(final) == 1
    assert [one.token_ids for one in final[0].outputs] == [
        one.token_ids for one in whole[-1].outputs
    ]
    assert len(new) > 1
    assert all(output.prompt_logprobs is None for output in new[1:])
    for index, one in enumerate(whole[-1].outputs):
        parts = [part for output in new for part in output.outputs if part.index == index]
        assert [token for part in parts for token in part.token_ids] == one.token_ids
        assert "".join(part.text for part in parts) == one.text
        assert [entry for part in parts for entry in part.logprobs] == one.logprobs
        assert [part.finish_reason for part in parts if part.finish_reason] == ["length"]


def test_an_engine_that_was_shut_down_has_given_its_memory_back(llm, checkpoint, tmp_path):
    with LLM(checkpoint, **OPTIONS) as mine:
        engine = engine_of(mine)
        engine.programs.executables = engine_of(llm).programs.executables
        session = mine.session(IDS)
        session.save(tmp_path / "session")
        stream = mine.stream(IDS, GREEDY)
        next(stream)
        assert mine.max_model_len == 128
    assert [output.outputs[0].finish_reason for output in stream] == ["abort"]
    assert engine.kv.stores[0].pages.is_deleted()
    mine.shutdown()
    for call in (
        lambda: mine.generate(IDS, GREEDY, use_tqdm=False),
        lambda: mine.session("x"),
        lambda: mine.restore(tmp_path / "session"),
        lambda: session.save(tmp_path / "again"),
        lambda: mine.update_weights(tmp_path / "nothing is read of these"),
        mine.sleep,
        mine.wake_up,
        mine.identity,
        mine.reset_prefix_cache,
        mine.wait_until_compiled,
    ):
        with pytest.raises(EngineDeadError, match="the engine has been shut down"):
            call()


def test_an_end_that_fails_gives_the_memory_back_too(llm, checkpoint, monkeypatch):
    mine = LLM(checkpoint, **OPTIONS)

    def fail() -> None:
        raise OSError("no disk")

    monkeypatch.setattr(engine_of(mine), "leave_disk", fail)
    with pytest.raises(OSError, match="no disk"):
        mine.shutdown()
    assert engine_of(mine).kv.stores[0].pages.is_deleted()


# --- the stored list of vLLM's names, and the page that tells of them


def test_every_name_of_vllm_s_is_here_or_known_to_be_absent(llm):
    for owner, names, absent in (
        (jaxkv, "package", ABSENT),
        (LLM, "llm", ABSENT_FROM_LLM),
        (AsyncLLM, "async_llm", ABSENT_FROM_ASYNC),
    ):
        for name in OF_VLLM[names]:
            assert (name in absent) != (name in dir(owner) or name in getattr(owner, "__all__", ()))
    for method, arguments in OF_VLLM["llm_arguments"].items():
        assert inspect.signature(getattr(LLM, method)).parameters.keys() >= set(arguments)
    fields = {
        "sampling_params": SamplingParams,
        "beam_search_params": BeamSearchParams,
        "completion_output": CompletionOutput,
        "request_output": RequestOutput,
    }
    for name, kind in fields.items():
        missing = set(OF_VLLM[name]) - {field.name for field in dataclasses.fields(kind)}
        assert missing <= {"output_text_buffer_length"}
    missing = set(OF_VLLM["request_metrics"]) - set(dir(RequestMetrics()))
    assert missing == {"is_corrupted", "is_watermarked", "is_watermark_skipped"}


@pytest.mark.skipif(not PAGE.is_file(), reason="docs are in the checkout only")
def test_the_page_has_every_name_and_says_of_metrics_what_is_true(llm):
    text = PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w.]+)`", text))
    lists = [names for kind, names in OF_VLLM.items() if kind not in ("versions", "llm_arguments")]
    lists += [
        *OF_VLLM["llm_arguments"].values(),
        FOREIGN,
        ABSENT,
        ABSENT_FROM_LLM,
        ABSENT_FROM_ASYNC,
    ]
    assert not {name for names in lists for name in names} - named
    assert all(f"vLLM {version}" in text for version in OF_VLLM["versions"])
    works, not_here = text.split("## What differs")[0], text.split("## What is not here")[1]
    there = {metric.name for metric in llm.get_metrics("")} | {"request_success"}
    for name in OF_VLLM["metrics"]:
        assert f"`{name}`" in (works if name in there else not_here)
    for name in set(OF_VLLM["engine_args"]) & ABOUT.keys():
        assert f"`{name}`" in works


# --- what vLLM's examples say, written anew


def test_an_offline_script_runs(llm, checkpoint):
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int)
    group.add_argument("--temperature", type=float)
    line = [
        "--model",
        str(checkpoint),
        "--max-tokens",
        "4",
        "--temperature",
        "0",
        "--enforce-eager",
    ]
    args = vars(parser.parse_args([*line, "--dtype", "float32", "--max-model-len", "128"]))
    max_tokens, temperature = args.pop("max_tokens"), args.pop("temperature")
    mine = LLM(**args | OPTIONS)
    engine_of(mine).programs.executables = engine_of(llm).programs.executables
    params = mine.get_default_sampling_params()
    if max_tokens is not None:
        params.max_tokens = max_tokens
    if temperature is not None:
        params.temperature = temperature
    outputs = mine.generate(["The end of", "One by one"], params)
    assert [output.prompt for output in outputs] == ["The end of", "One by one"]
    assert all(output.outputs[0].text is not None for output in outputs)
    conversation = [
        {"role": "user", "content": [{"type": "text", "text": "The end"}]},
        {"role": "assistant", "content": "of"},
        {"role": "user", "content": "the story"},
    ]
    assert len(mine.chat([conversation] * 3, params, use_tqdm=False)) == 3
    (parts,) = mine.chat(conversation, params, use_tqdm=False)
    assert "<|user|>The end<|end|>" in parts.prompt


def test_a_script_on_prefix_caching_and_metrics_runs(llm):
    llm.reset_prefix_cache()
    prefix = "Once upon a time there was a little robot who counted the stars. "
    prompts = [prefix + name for name in ("The quick", "The lazy")]
    cold = llm.generate(prompts[0], GREEDY)
    warm = llm.generate(prompts, GREEDY)
    assert warm[0].outputs == cold[0].outputs
    assert all(output.num_cached_tokens > 0 for output in warm)
    for metric in llm.get_metrics("vllm:"):
        if isinstance(metric, Gauge | Counter):
            assert metric.value >= 0
        elif isinstance(metric, Histogram):
            assert metric.buckets["+Inf"] == metric.count
            assert metric.sum >= 0


def test_an_asynchronous_script_streams(llm, checkpoint):
    async def main() -> str:
        args = AsyncEngineArgs(model=str(checkpoint), enforce_eager=True)
        for name, value in OPTIONS.items():
            setattr(args, name, value)
        engine = AsyncLLM.from_engine_args(args)
        engine_of(engine).programs.executables = engine_of(llm).programs.executables
        params = replace(GREEDY, output_kind=RequestOutputKind.DELTA)
        text = ""
        try:
            async for output in engine.generate(
                request_id="one", prompt="The end of", sampling_params=params
            ):
                text += "".join(completion.text for completion in output.outputs)
                if output.finished:
                    break
        finally:
            engine.shutdown()
        return text

    (want,) = llm.generate("The end of", GREEDY, use_tqdm=False)
    assert asyncio.run(main()) == want.outputs[0].text


def test_what_is_absent_is_said_in_one_sentence(llm):
    for import_, message in {
        "from jaxkv.sampling_params import GuidedDecodingParams": "nearest: StructuredOutputsParams",
        "from jaxkv.inputs import EmbedsPrompt": "has no 'EmbedsPrompt' yet, which vLLM has",
        "from jaxkv.metrics import Vector": "nearest: Counter",
        "from jaxkv import LLMEngine": r"nearest: LLM.as_completed and LLM.stream",
    }.items():
        with pytest.raises(ImportError, match=message):
            exec(import_)  # noqa: S102
    for call, message in {
        lambda: SamplingParams(guided_decoding={"choice": ["a"]}): "nearest: structured_outputs",
        lambda: SamplingParams(logits_processors=[print]): "nearest: logit_bias",
        lambda: llm.generate({"prompt": "x", "multi_modal_data": {"image": 1}}): "multi_modal_data",
        lambda: LLM(speculative_config={"method": "ngram", "model": "x"}): "the keys .*got 'model'",
        lambda: LLM(fully_sharded_loras=True): "fully_sharded_loras: expected False .a vLLM argu",
        lambda: LLM(tokenizer_mode=np.array([1, 2])): "tokenizer_mode: expected 'auto' or 'hf'",
        lambda: LLM(attention_backend="FLASH_ATTN"): "attention_backend: .*nearest: backend",
        lambda: SamplingParams(best_of=np.array([1, 1])): "best_of: expected None or n=1",
        lambda: llm.chat(
            [{"role": "user", "content": "x"}], mm_processor_kwargs={"a": 1}
        ): "mm_pro",
    }.items():
        with pytest.raises(ValueError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
    with pytest.raises(AttributeError, match=r"^LLM has no 'apply_model' yet, which vLLM has$"):
        llm.apply_model("x")
    assert not hasattr(llm, "llm_engine")
