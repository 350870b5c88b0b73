"""Inspect gets from its provider what `LLM.chat` gives, on a local task and offline."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from jaxkv.api.llm import LLM
from jaxkv.config import SamplingParams
from tiny import make_checkpoint, tiny_config
from tokenizers_ import save_tokenizer

inspect_ai = pytest.importorskip("inspect_ai")
dataset = pytest.importorskip("inspect_ai.dataset")
models = pytest.importorskip("inspect_ai.model")
scorer = pytest.importorskip("inspect_ai.scorer")
solver = pytest.importorskip("inspect_ai.solver")
tools = pytest.importorskip("inspect_ai.tool")

pytestmark = [
    pytest.mark.usefixtures("quick_compile"),
    pytest.mark.filterwarnings("default"),  # those of Inspect's own parts are not ours
]
SMALL = {
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 8,
    "dtype": "float32",
    "lazy_compile": True,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
CONFIG = models.GenerateConfig(temperature=0.0, max_tokens=8)
QUESTIONS = ("The end", "Once upon a time", "One by one")


@pytest.fixture(scope="module")
def llm(checkpoint) -> Iterator[LLM]:
    with LLM(checkpoint, **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def model(checkpoint) -> Iterator[object]:
    """The provider as Inspect finds it: by its entry point."""
    model = inspect_ai.model.get_model(f"jaxkv/{checkpoint}", memoize=False, **SMALL)
    yield model
    model.api.close()


def answer(model: object, messages: object, **config: object) -> object:
    given = CONFIG.model_copy(update=config)
    return asyncio.run(model.generate(messages, config=given))


def chat(llm: LLM, messages: list[dict], params: SamplingParams = GREEDY) -> object:
    (output,) = llm.chat(messages, params, use_tqdm=False)
    return output


def user(content: object) -> dict:
    return {"role": "user", "content": content}


def test_a_local_task_is_answered_and_scored_as_chat_answers(llm, model, tmp_path):
    wanted = [chat(llm, [user(text)]).outputs[0].text for text in QUESTIONS]
    samples = [
        dataset.Sample(input=text, target=target[-4:] if i else "something else \0")
        for i, (text, target) in enumerate(zip(QUESTIONS, wanted, strict=True))
    ]
    task = inspect_ai.Task(
        dataset=samples, solver=solver.generate(), scorer=scorer.includes(), config=CONFIG
    )
    (log,) = inspect_ai.eval(task, model=model, display="none", log_dir=str(tmp_path))
    assert log.status == "success", log.error
    assert [sample.output.completion for sample in log.samples] == wanted
    assert [sample.scores["includes"].value for sample in log.samples] == ["I", "C", "C"]


def test_parts_stop_strings_seeds_and_samples_are_those_of_chat(llm, model):
    message = models.ChatMessageUser(
        content=[models.ContentText(text="The end"), models.ContentText(text="of")]
    )
    want = chat(llm, [user("The end\nof")]).outputs[0].text
    assert answer(model, [message]).completion == want
    stop = want[3]
    output = answer(model, [message], stop_seqs=[stop])
    assert output.completion == want[: want.index(stop)]
    assert output.stop_reason == "stop"
    drawn = {"temperature": 1.5, "seed": 7, "num_choices": 3}
    got = [choice.message.text for choice in answer(model, "The end", **drawn).choices]
    params = SamplingParams(temperature=1.5, seed=7, n=3, max_tokens=8)
    assert got == [one.text for one in chat(llm, [user("The end")], params).outputs]
    assert len(set(got)) > 1


def test_log_probabilities_and_usage_are_those_of_the_engine(llm, model):
    output = answer(model, "The end", logprobs=True, top_logprobs=2)
    want = chat(llm, [user("The end")], replace(GREEDY, logprobs=2))
    entries = output.choices[0].logprobs.content
    done = want.outputs[0]
    assert len(entries) == len(done.token_ids) == output.usage.output_tokens
    for entry, token, scores in zip(entries, done.token_ids, done.logprobs, strict=True):
        assert entry.logprob == pytest.approx(scores[token].logprob, abs=1e-5)
        assert [one.logprob for one in entry.top_logprobs] == pytest.approx(
            sorted((one.logprob for one in scores.values()), reverse=True)[:2], abs=1e-5
        )
    usage = output.usage
    assert usage.input_tokens + usage.input_tokens_cache_read == len(want.prompt_token_ids)
    assert output.stop_reason == ("max_tokens" if done.finish_reason == "length" else "stop")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"best_of": 2}, "best_of: not supported"),
        ({"reasoning_effort": "low"}, "reasoning_effort: expected what the chat template reads"),
        ({"reasoning_tokens": 7}, "thinking_token_budget: expected the texts around reasoning"),
        ({"prompt_logprobs": 1}, "prompt_logprobs: not supported"),
        ({"extra_body": {"wizard": 1}}, "wizard: unknown, or not supported"),
        ({"extra_body": {"temperature": 1}}, "extra_body: expected other keys than temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_logprobs": 2}, "top_logprobs: expected logprobs to be true with it"),
    ],
    ids=str,
)
def test_what_would_be_ignored_is_refused_by_name(model, config, message):
    with pytest.raises(ValueError, match=message):
        answer(model, "The end", **config)


def test_images_and_tools_that_nobody_could_call_are_refused_by_name(model):
    image = models.ChatMessageUser(content=[models.ContentImage(image="data:image/png;base64,")])
    with pytest.raises(ValueError, match=r"message 0: content part 0: expected .*got type 'image'"):
        asyncio.run(model.api.generate([image], [], "none", CONFIG))
    with pytest.raises(ValueError, match=r"^tools: expected -M response_template="):
        asyncio.run(model.api.generate([ASKED], [ADD], "auto", CONFIG))


ASKED = models.ChatMessageUser(content="Add.")
ADD = tools.ToolInfo(
    name="add",
    description="Adds.",
    parameters=tools.ToolParams(
        properties={"x": tools.ToolParam(type="integer", enum=[1, 2])}, required=["x"]
    ),
)
TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool.function.name }}{{ tool.function.parameters | tojson }}"
    "{% endfor %}{% for m in messages %}<|{{ m.role }}|>{{ m.reasoning_content }}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}={{ call.function.arguments.x }}{% endfor %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_tools_are_called_and_their_results_are_told(tmp_path):
    directory = make_checkpoint(tmp_path / "model", tiny_config("llama", vocab_size=420))
    save_tokenizer(directory, chat_template=TEMPLATE)
    given = {**SMALL, "max_model_len": 256, "response_template": "qwen3"}
    model = models.get_model(f"jaxkv/{directory}", memoize=False, **given)
    with closing(model.api):
        text = '<think>Hm.</think>So<tool_call>{"name": "add", "arguments": {"x": 7}}</tool_call>'
        config = models.GenerateConfig(
            temperature=0.0,
            max_tokens=100,
            extra_body={"structured_outputs": {"choice": [text]}},
        )
        output = asyncio.run(model.api.generate([ASKED], [ADD], "auto", config))
        message = output.message
        assert (output.stop_reason, message.text) == ("tool_calls", "So")
        assert [part.type for part in message.content] == ["reasoning", "text"]
        (call,) = message.tool_calls
        assert (call.function, call.arguments, call.parse_error) == ("add", {"x": 7}, None)
        told = models.ChatMessageTool(content="8", tool_call_id=call.id, function="add")
        output = asyncio.run(model.api.generate([ASKED, message, told], [ADD], "none", CONFIG))
        prompt = "<|user|>Add.<|end|><|assistant|>Hm.So=7<|end|><|tool|>8<|end|><|assistant|>"
        tokens = asyncio.run(model.api.tokenize(prompt))
        usage = output.usage
        assert usage.input_tokens + usage.input_tokens_cache_read == len(tokens)
        drawn = models.GenerateConfig(temperature=1.0, seed=1, max_tokens=90)
        for choice in ("any", tools.ToolFunction(name="add")):
            output = asyncio.run(model.api.generate([ASKED], [ADD], choice, drawn))
            assert {call.function for call in output.message.tool_calls} == {"add"}
            assert all(call.arguments["x"] in (1, 2) for call in output.message.tool_calls)


def test_tokens_are_counted_by_the_model_s_tokenizer(llm, model):
    tokens = llm.get_tokenizer()("The end of").input_ids
    assert asyncio.run(model.api.tokenize("The end of")) == tokens
    assert asyncio.run(model.api.count_text_tokens("The end of")) == len(tokens)


def test_where_the_model_runs_is_not_for_the_caller_to_say(checkpoint):
    for name in ("base_url", "api_key"):
        with pytest.raises(ValueError, match=f"{name}: expected none"):
            models.get_model(f"jaxkv/{checkpoint}", memoize=False, **{name: "x"})
