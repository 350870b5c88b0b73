"""What scripts written for vLLM say, said to jaxkv: the same names give the same things, and what
is not here is refused in one sentence.
"""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

import jaxkv
from jaxkv import LLM, AsyncLLM, EngineDeadError
from jaxkv.inputs import PromptType, TextPrompt, TokensPrompt
from jaxkv.outputs import CompletionOutput, RequestOutput
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


@pytest.fixture(scope="module")
def llm(checkpoint) -> LLM:
    return LLM(checkpoint, **OPTIONS)


def ids_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_modules_have_the_classes_that_jaxkv_has():
    for module in ("inputs", "outputs", "sampling_params"):
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
    for refused in (
        lambda: llm.generate(IDS, GREEDY, lora_request="mine"),
        lambda: llm.generate([IDS, IDS], GREEDY, lora_request=[None, "mine"]),
        lambda: llm.chat(message, GREEDY, lora_request=3),
    ):
        with pytest.raises(ValueError, match=r"^lora_request: expected None"):
            refused()
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
    names += " multi_modal_placeholders kv_transfer_params"
    assert RequestOutput(**{name: getattr(output, name) for name in names.split()}) == output
    (one,) = output.outputs
    names = "index text token_ids cumulative_logprob logprobs finish_reason stop_reason"
    names += " lora_request"
    assert CompletionOutput(**{name: getattr(one, name) for name in names.split()}) == one


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


def test_an_engine_that_was_shut_down_has_given_its_memory_back(llm, checkpoint):
    with LLM(checkpoint, **OPTIONS) as mine:
        engine = engine_of(mine)
        engine.programs.executables = engine_of(llm).programs.executables
        stream = mine.stream(IDS, GREEDY)
        next(stream)
        assert mine.max_model_len == 128
    assert [output.outputs[0].finish_reason for output in stream] == ["abort"]
    assert engine.kv.stores[0].pages.is_deleted()
    mine.shutdown()
    for call in (lambda: mine.generate(IDS, GREEDY, use_tqdm=False), lambda: mine.session("x")):
        with pytest.raises(EngineDeadError, match="the engine has been shut down"):
            call()
