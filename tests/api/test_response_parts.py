"""Answers are taken apart into what was put together: reasoning, content and calls of tools, however
the text is cut; a call that cannot be read stays content.
"""

import json

import jsonschema
import pytest
from transformers import AutoTokenizer

from jaxkv.api.response_parts import (
    TEMPLATES,
    Arguments,
    Behind,
    Call,
    Forced,
    Listed,
    Marked,
    Plain,
    parser_of,
    reader_of,
)
from jaxkv.structured import is_reasoning
from tokenizers_ import save_tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "integer"}, "where": {"$ref": "#/$defs/place"}},
                "required": ["x"],
                "additionalProperties": False,
                "$defs": {"place": {"type": "string"}},
            },
        },
    }
    for name in ("look", "go-to")
]
CALLS = [("look", {"x": 3, "where": "a <b> }] é"}), ("go-to", {"x": -1})]
REASONING, CONTENT = "Is 1 < 2?\nYes.", "It is, <i>so</i> I look."


def in_json(name: str, arguments: dict) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def in_xml(name: str, arguments: dict) -> str:
    given = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{given}</function>\n</tool_call>"


def in_harmony(reasoning: str, content: str, calls: list) -> str:
    said = [f"<|channel|>analysis<|message|>{reasoning}<|end|>"]
    said += [f"<|start|>assistant<|channel|>commentary<|message|>{content}<|end|>"] * bool(content)
    for number, (name, arguments) in enumerate(calls):
        head = (
            f"<|channel|>commentary to=functions.{name} ",
            f" to=functions.{name}<|channel|>commentary ",
        )[number % 2]
        body = f"<|constrain|>json<|message|>{json.dumps(arguments)}<|call|>"
        said.append(f"<|start|>assistant{head}{body}")
    return "".join(said).removesuffix("<|call|>")


def in_tags(write, reasoning: str, content: str, calls: list) -> str:
    return f"<think>\n{reasoning}</think>\n\n{content}" + "\n".join(write(*call) for call in calls)


WRITTEN = {
    "qwen3": lambda *parts: in_tags(in_json, *parts),
    "qwen3_coder": lambda *parts: in_tags(in_xml, *parts),
    "deepseek_r1": lambda *parts: in_tags(in_json, *parts),
    "gpt_oss": in_harmony,
}
PROMPTS = {"gpt_oss": "<|start|>assistant", "deepseek_r1": "<｜Assistant｜>"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return AutoTokenizer.from_pretrained(directory)


def read(reader, text: str, width: int, end: str = "stop") -> tuple[str, str, list]:
    """Feeds a text in pieces. Returns all that the reader says."""
    reasoning = content = ""
    calls: list[list[str]] = []
    for start in range(0, len(text), width):
        said = reader.feed(text[start : start + width], end if start + width >= len(text) else None)
        reasoning, content = reasoning + said.reasoning, content + said.content
        for call in said.calls:
            if call.name is not None:
                assert call.number == len(calls)
                calls.append([call.name, ""])
            calls[call.number][1] += call.arguments
    return reasoning, content, [(name, json.loads(text)) for name, text in calls]


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_parts_of_an_answer_are_those_it_was_made_of_however_it_comes(name, tokenizer):
    assert {file.stem for file in TEMPLATES.glob("*.json")} == set(WRITTEN)
    parser, prompt = parser_of(tokenizer, name), PROMPTS.get(name, "<|im_start|>assistant\n")
    calls = [] if name == "deepseek_r1" else CALLS
    text = WRITTEN[name](REASONING, CONTENT, calls)
    whole = tokenizer.parse_response(
        text, json.loads((TEMPLATES / f"{name}.json").read_text()), prefix=prompt, tools=TOOLS
    )
    assert (whole["reasoning"], len(whole.get("tool_calls", []))) == (REASONING, len(calls))
    for width in (len(text), 7, 1):
        found = read(Marked(parser(prompt, TOOLS), with_calls=True), text, width)
        assert found == (REASONING, CONTENT, calls)
    # Cut off anywhere, what has been read is as before; parts of a mark or a call are text.
    for end in range(text.index(REASONING), len(text), 5):
        for width in (end, 1):
            reader = Marked(parser(prompt, TOOLS), with_calls=True)
            reasoning, content, some = read(reader, text[:end], width, "length")
            assert reasoning.startswith(REASONING[: len(reasoning)])
            assert some == calls[: len(some)]
            assert content.startswith(CONTENT[: len(content)])


def test_reasoning_may_have_begun_in_the_prompt_or_be_over_there(tokenizer):
    parser = parser_of(tokenizer, "qwen3")
    for prompt, want in (
        ("<|im_start|>assistant\n", ("", "a</think>b")),
        ("<|im_start|>assistant\n<think>\n", ("a", "b")),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", ("", "a</think>b")),
        ("<|im_start|>user\n<think>", ("a", "b")),
    ):
        assert read(Marked(parser(prompt), with_calls=False), "a</think>b", 2)[:2] == want


def test_what_cannot_be_read_is_content(tokenizer):
    parser = parser_of(tokenizer, "qwen3")
    for body in ("{x: 1}", "[1]", '{"arguments": {}}', "[" * 5000, '{"name": 1}'):
        text = f"One{in_json(*CALLS[1])}<tool_call>{body}</tool_call>two"
        for width in (len(text), 3, 1):
            reader = Marked(parser("", TOOLS), with_calls=True)
            _, content, calls = read(reader, text, width)
            is_json = body != "{x: 1}"  # behind which the parser does not go on
            assert is_json or content.endswith("{x: 1}</tool_call>two")
            assert [content.count(one) for one in ("One", body, "two")] == [1, 1, 1]
            assert content.startswith("One")
            assert content.endswith("two")
            assert (calls == CALLS[1:]) is ("go-to" not in content)
    prompt = "<|im_start|>assistant\n<tool_call>{</tool_call>"
    assert read(reader_of(parser, prompt, TOOLS), "a</think>b", 1) == ("", "a</think>b", [])
    parser = parser_of(tokenizer, "gpt_oss")
    assert read(reader_of(parser, PROMPTS["gpt_oss"], TOOLS), '{"x": 1}', 3) == ("", '{"x": 1}', [])
    parser = parser_of(tokenizer, "qwen3")
    # Nobody may call: what looks like a call is content.
    _, content, calls = read(Marked(parser(""), with_calls=False), f"One{in_json(*CALLS[1])}", 3)
    assert (json.loads(content.removeprefix("One"))["name"], calls) == ("go-to", [])


def test_forced_calls_have_a_schema_and_are_read_as_they_come():
    any_of, one = Forced(), Forced(is_single=True)
    for forced in (any_of, one):
        schema = forced.schema(TOOLS)
        listed = [{"name": name, "parameters": arguments} for name, arguments in CALLS]
        check = jsonschema.Draft202012Validator(schema).is_valid
        assert check(listed[:1])
        assert check(listed) is (forced is any_of)
        for wrong in ([], listed[0], [{"name": "other", "parameters": {"x": 1}}]):
            assert not check(wrong)
        for arguments in ({}, {"x": "1"}, {"x": 1, "y": 2}, {"x": 1, "where": 2}):
            assert not check([{"name": "look", "parameters": arguments}])
    text = json.dumps(listed, ensure_ascii=False)
    for width in (len(text), 1, 5):
        assert read(Listed(), text, width) == ("", "", CALLS)
    for end in range(1, len(text)):
        _, content, calls = read(Listed(), text[:end], 3)
        assert calls == CALLS[: len(calls)]
        assert content in text[:end]
    assert Forced("look").schema(TOOLS) == TOOLS[0]["function"]["parameters"]


def test_behind_reasoning_is_what_was_asked_for(tokenizer):
    """Its text may look like marks."""
    listed = json.dumps([{"name": name, "parameters": x} for name, x in CALLS], ensure_ascii=False)
    form = '{"x": "<think>a</think><tool_call>"}'
    marks, final = ("<think>", "</think>"), "<|channel|>final<|message|>"
    for name, pair, prompt, text, reasons in (
        ("qwen3", marks, "", "<think>\nHm.</think>", True),
        ("qwen3", marks, "", "", False),
        ("qwen3", marks, "<think>\n", "Hm.</think>", True),
        ("qwen3", marks, "<think></think>\n\n", "", False),
        ("gpt_oss", ("", final), "", f"<|channel|>analysis<|message|>Hm.<|end|>{final}", True),
    ):
        parser = parser_of(tokenizer, name)
        prompt = PROMPTS.get(name, "<|im_start|>assistant\n") + prompt
        for reader, told, want in (
            (Plain, form, (form, [])),
            (Listed, listed, ("", CALLS)),
            (lambda: Arguments("look"), form, ("", [("look", json.loads(form))])),
        ):
            for width in (len(text + told), 7, 1):
                first = reader_of(parser, prompt, ())
                behind = Behind(pair, is_reasoning(prompt, pair), first, reader())
                assert read(behind, text + told, width) == ("Hm." * reasons, *want)
            for end in range(len(pair[0]), len(text)):  # cut off while it reasons
                first = reader_of(parser, prompt, ())
                behind = Behind(pair, is_reasoning(prompt, pair), first, reader())
                assert read(behind, text[:end], 2, "length")[2] == []


def test_marks_that_a_grammar_waits_for_are_tokens(tokenizer, tmp_path):
    assert parser_of(tokenizer, "qwen3").marks is None
    tokenizer.add_tokens(["<think>", "</think>", "<|channel|>", "<|message|>"])
    assert parser_of(tokenizer, "qwen3").marks == ("<think>", "</think>")
    assert parser_of(tokenizer, "gpt_oss").marks == ("", "<|channel|>final<|message|>")
    # With several ends it might wait for one that never comes.
    for closes, want in ((["</think>"], ("<think>", "</think>")), (["</think>", "<s>"], None)):
        reasoning = {"open": "<think>", "close": closes}
        template = {"start_anchor": "<s>", "fields": {"reasoning": reasoning, "content": {}}}
        (tmp_path / "t.json").write_text(json.dumps(template))
        assert parser_of(tokenizer, str(tmp_path / "t.json")).marks == want


@pytest.mark.parametrize(
    ("forced", "tools", "message"),
    [
        (Forced(), [], "tool_choice: expected tools with it, got none"),
        (Forced("other"), TOOLS, "tool_choice: expected one of the tools: look, go-to"),
        (Forced(), [{"name": "look"}], "tools: expected .*, got {"),
        (Forced(), [{"function": {"name": "a", "parameters": 1}}], "tools: expected .*, got {"),
        (
            Forced(),
            [{"function": {"name": "a", "parameters": {"$defs": [1]}}}],
            "tools: .defs: expected an object, got .1",
        ),
        (
            Forced(),
            [
                {"function": {"name": name, "parameters": {"$defs": {"p": {"type": kind}}}}}
                for name, kind in (("a", "string"), ("b", "object"))
            ],
            "tools: expected one schema named 'p' in .defs, got two",
        ),
    ],
)
def test_tools_that_cannot_be_forced_are_refused(forced, tools, message):
    with pytest.raises(ValueError, match=rf"^{message}"):
        forced.schema(tools)


def test_templates_that_are_none_are_refused(tokenizer, tmp_path):
    for content, message in (
        ("{", "expected JSON"),
        ("[]", "must be a dict"),
        ('{"fields": {"content": {}}}', "must define 'start_anchor'"),
        ('{"start_anchor": "a", "fields": {"other": {}}}', "expected fields of .*, got 'other'"),
    ):
        file = tmp_path / "template.json"
        file.write_text(content)
        with pytest.raises(ValueError, match=rf"^response_template: .*{message}"):
            parser_of(tokenizer, str(file))
    with pytest.raises(ValueError, match=r"^response_template: expected checkpoint, .* or a file"):
        parser_of(tokenizer, "other")
    with pytest.raises(ValueError, match=r"^response_template: expected transformers >= 5.13"):
        parser_of(object(), "qwen3")
    with pytest.raises(ValueError, match=r"^response_template: the checkpoint's .* has none"):
        parser_of(tokenizer, "checkpoint")
    tokenizer.response_template = json.loads((TEMPLATES / "qwen3.json").read_text())
    said = Marked(parser_of(tokenizer, "checkpoint")("", TOOLS), with_calls=True).feed(
        in_json(*CALLS[1]), "stop"
    )
    assert said.calls == [Call(0, "go-to", '{"x": -1}')]
