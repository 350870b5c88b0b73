"""Contents reach a chat template in the form that it reads; no part is dropped, or printed as a
Python object.
"""

import pytest

from jaxkv.build.tokenizer import load_tokenizer
from jaxkv.requests.chats import Chats
from jaxkv.requests.contents import Form, RefusedChatError, form_of, read_messages
from tokenizers_ import save_tokenizer

# The forms in which published templates write content, each reduced to what matters here.
LLAMA3 = (
    "{% for message in messages %}<|start|>{{ message['role'] }}<|end|>\n\n"
    "{{ message['content'] | trim }}<|eot|>{% endfor %}"
)
QWEN25 = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
)
QWEN3 = (  # what is no string becomes nothing
    "{% for message in messages %}{% if message.content is string %}"
    "{% set content = message.content %}{% else %}{% set content = '' %}{% endif %}"
    "{% if message.role == 'assistant' %}{% set content = content.split('</think>')[-1] %}"
    "{% endif %}{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{% endfor %}"
)
MISTRAL = (  # loops over parts of users, but takes the first of a system
    "{% if messages[0].role == 'system' %}{% if messages[0]['content'] is string %}"
    "{% set system = messages[0]['content'] %}{% else %}"
    "{% set system = messages[0]['content'][0]['text'] %}{% endif %}[SYS]{{ system }}[/SYS]"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}{% if message['content'] is string %}"
    "[INST]{{ message['content'] }}[/INST]{% else %}[INST]{% for block in message['content'] %}"
    "{% if block['type'] == 'text' %}{{ block['text'] }}{% endif %}{% endfor %}[/INST]{% endif %}"
    "{% endfor %}"
)
VISION = (  # prints the list of a system
    "{% for message in messages %}{% if message.role == 'system' %}<s>{{ message.content | trim }}"
    "{% elif message.content is string %}<u>{{ message.content }}{% else %}<u>"
    "{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)
PARTS_ONLY = (  # would go through the characters of a text
    "{% macro write(content) %}{% for item in content | selectattr('type', 'equalto', 'text') %}"
    "{{ item.text }}{% endfor %}{% endmacro %}"
    "{% for message in messages %}{% generation %}{{ message.role }}: {{ write(message.content) }};"
    "{% endgeneration %}{% if loop.index > 9 %}{% break %}{% endif %}{% endfor %}"
)
ALIAS = (
    "{% for message in messages %}{% set body = message['content'] %}{% set said = body %}"
    "{% for part in said %}{{ part['text'] }}{% endfor %}{% endfor %}"
)
FORMS = {
    LLAMA3: Form.TEXT,
    QWEN25: Form.TEXT,
    QWEN3: Form.TEXT,
    MISTRAL: Form.BOTH,
    VISION: Form.BOTH,
    PARTS_ONLY: Form.PARTS,
    ALIAS: Form.PARTS,
}
A, B = {"type": "text", "text": "The end"}, {"type": "text", "text": "of"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return load_tokenizer(directory)


def rendered(tokenizer, template: str, *messages: tuple[str, object]) -> str:
    chats = Chats(tokenizer, None, {"chat_template": template})
    listed = [{"role": role, "content": content} for role, content in messages]
    return chats.render(listed, lambda text: [len(text)])["prompt"]


@pytest.mark.parametrize("template", FORMS)
def test_parts_are_what_their_text_is_in_every_template(tokenizer, template):
    assert form_of(template) is FORMS[template]
    text = rendered(tokenizer, template, ("system", "Be kind."), ("user", "The end"))
    assert "Be kind." in text
    assert "The end" in text
    hinted = A | {"name": None, "cache_control": {"type": "ephemeral"}}
    for parts in ([A], (A,), ["The end"], [hinted]):
        system = [{"type": "text", "text": "Be kind."}]
        assert rendered(tokenizer, template, ("system", system), ("user", parts)) == text
    two = rendered(tokenizer, template, ("user", [A, B]))
    if FORMS[template] is Form.TEXT:
        assert two == rendered(tokenizer, template, ("user", "The end\nof"))
    else:  # as transformers gives them to the template
        messages = [{"role": "user", "content": [A, B]}]
        own = tokenizer.apply_chat_template(messages, tokenize=False, chat_template=template)
        assert two == own
        assert "The endof" in two
    rendered(tokenizer, LLAMA3, ("user", "x"), ("assistant", None))  # with tool_calls


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (MISTRAL, "message 0: content part 1: the chat template leaves it out"),
        (VISION, 'message 0: the chat template prints a list of parts of a message "system"'),
    ],
)
def test_what_a_template_drops_or_prints_as_a_list_is_refused(tokenizer, template, message):
    with pytest.raises(RefusedChatError, match=message):
        rendered(tokenizer, template, ("system", [A, B]), ("user", "one by one"))


@pytest.mark.parametrize("template", [QWEN25, MISTRAL, PARTS_ONLY])
def test_a_developer_is_a_system_for_a_template_that_never_names_one(tokenizer, template):
    rest = ("user", "The end")
    text = rendered(tokenizer, template, ("system", "Be kind."), rest)
    assert rendered(tokenizer, template, ("developer", "Be kind."), rest) == text
    named = template + "{% if messages[0].role == 'developer' %}!{% endif %}"
    assert rendered(tokenizer, named, ("developer", "Be kind."), rest).endswith("!")


def test_a_template_may_write_the_messages_in_another_order(tokenizer):
    template = (
        "{% for m in messages | reverse %}{% for p in m.content %}{{ p.text }}{% endfor %}"
        "{% endfor %}"
    )
    assert rendered(tokenizer, template, ("system", [A]), ("user", [B])) == "ofThe end"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([A, {"type": "image_url", "image_url": {}}], "part 1: expected .*, got type 'image_url'"),
        ([{"type": "text"}], "part 0: expected .*, got text of NoneType"),
        ([A, B, 3], "part 2: expected .*, got int"),
        ([A | {"citations": {}}], "part 0: expected .*, got also citations"),
        (A, "expected a text or a list of parts, got dict"),
        (7, "expected a text or a list of parts, got int"),
    ],
)
@pytest.mark.parametrize("template", [LLAMA3, MISTRAL])
def test_other_contents_are_refused_by_name(tokenizer, template, content, message):
    with pytest.raises(RefusedChatError, match=f"^message 1: content.*{message}"):
        rendered(tokenizer, template, ("system", "Be kind."), ("user", content))


CALLS = (  # GLM's loop over arguments, and Qwen's way to write them
    "{% for call in messages[0].tool_calls %}{% for k, v in call.function.arguments.items() %}"
    "{{ k }}={{ v }};{% endfor %}{{ call.function.arguments | tojson }}{% endfor %}"
)


def calling(arguments: object) -> list[dict[str, object]]:
    return [{"role": "assistant", "tool_calls": [{"function": {"arguments": arguments}}]}]


@pytest.mark.parametrize("arguments", ['{"x": 7}', {"x": 7}])
def test_arguments_of_calls_are_objects_for_templates_whatever_was_given(tokenizer, arguments):
    messages = calling(arguments)
    chats = Chats(tokenizer, None, {"chat_template": CALLS})
    assert chats.render(read_messages(messages), lambda text: [])["prompt"] == 'x=7;{"x": 7}'
    assert messages == calling(arguments)  # the caller's stay as they were
    assert chats.render(read_messages(calling("")), lambda text: [])["prompt"] == "{}"


@pytest.mark.parametrize("given", ["reasoning", "reasoning_content"])
def test_templates_read_what_was_reasoned_by_either_name(tokenizer, given):
    messages = [{"role": "assistant", "content": "b", given: "a"}, {"role": "user", "reasoning": 1}]
    for read in ("reasoning", "reasoning_content"):
        template = "{% for m in messages %}{{ m.NAME or '-' }}{{ m.content }}{% endfor %}"
        chats = Chats(tokenizer, None, {"chat_template": template.replace("NAME", read)})
        assert chats.render(read_messages(messages[:1]), lambda text: [])["prompt"] == "ab"
    assert read_messages(messages)[1] == messages[1]


def test_arguments_of_calls_that_are_no_json_are_refused_by_their_message():
    with pytest.raises(RefusedChatError, match=r"^message 0: expected JSON in the arguments"):
        read_messages(calling("{"))
