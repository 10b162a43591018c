"""The form of a tool call in the chat templates of real models, which TRL brings along."""

from collections.abc import Callable

import pytest

from ragen_apo.errors import ModelError
from ragen_apo.policy.call_form import CallForm, read_call_form
from ragen_apo.policy.chat_template import read_chat_template
from tests.chat_templates import R1, with_template
from tests.fixtures import CHATML

TOOL = {
    "type": "function",
    "function": {
        "name": "move",
        "description": "Move.",
        "parameters": {
            "type": "object",
            "properties": {"direction": {"type": "string"}},
            "required": ["direction"],
        },
    },
}
QWEN, LLAMA = CallForm(), CallForm("", "", "parameters")


@pytest.mark.parametrize(
    ("model", "form"),
    [
        ("qwen2_5", QWEN),
        ("qwen3", QWEN),
        ("qwen3_instruct_2507", QWEN),
        ("llama3_1", LLAMA),
        ("llama3_2", LLAMA),
    ],
)
def test_a_call_is_written_as_the_model_s_own_template_writes_it(
    real_template: Callable, model: str, form: CallForm
) -> None:
    template = read_chat_template(real_template(model), tools=[TOOL])
    assert template.answer_role == "tool"
    assert read_call_form(template) == form
    call = {"name": "move", "arguments": {"direction": 'Größe "L"'}}
    rendered = template.render(
        [
            {"role": "user", "content": "Where?"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": call}]},
            {"role": "tool", "content": "There."},
        ]
    )
    written = form.write("move", '{"direction": "Größe \\"L\\""}')
    assert f"{written}{template.between_responses('There.')}" in rendered


def test_a_template_without_the_role_tool_answers_as_the_user(chatml_tokenizer) -> None:
    only = "{% if m['role'] == 'tool' %}{{ raise_exception('no') }}{% endif %}"
    shown = (
        "{{ tools | tojson }}{% for m in messages %}" + only + "<|im_start|>{{ m['role'] }}\n"
        "{{ m['content'] }}{% for c in m['tool_calls'] %}{{ c['function'] | tojson }}{% endfor %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    template = read_chat_template(with_template(chatml_tokenizer, shown), tools=[TOOL])
    assert template.answer_role == "user"
    assert read_call_form(template) == CallForm("", "", "arguments")


@pytest.mark.parametrize("template", [CHATML, R1])
def test_a_template_that_ignores_tools_is_refused(chatml_tokenizer, template: str) -> None:
    found = read_chat_template(with_template(chatml_tokenizer, template), tools=[TOOL])
    with pytest.raises(ModelError, match=r"does not show the tools \(move\).*think_answer"):
        read_call_form(found)


@pytest.mark.parametrize(
    ("model", "written"),
    [("qwen3_5_nothink", "<function=probe>"), ("lfm2_2_5", r"\[probe\(of='it'\)\]")],
)
def test_a_call_that_is_no_json_is_refused(
    real_template: Callable, model: str, written: str
) -> None:
    template = read_chat_template(real_template(model), tools=[TOOL])
    with pytest.raises(ModelError, match=f"writes a call as .*{written}.*think_answer"):
        read_call_form(template)


@pytest.mark.parametrize(
    ("form", "text", "parts"),
    [
        (QWEN, 'so <tool_call>{"a": 1}</tool_call>\n', ("so ", ['{"a": 1}'])),
        (QWEN, "<tool_call>\n{}\n</tool_call> and", ("", [""])),
        (QWEN, "<tool_call>{}", ("", [""])),
        (QWEN, "{}", ("{}", [])),
        (QWEN, "a<tool_call>{}</tool_call>\n<tool_call>[]</tool_call>", ("a", ["{}", "[]"])),
        (QWEN, "<tool_call>{}</tool_call> <tool_call>[]", ("", [""])),
        (
            QWEN,
            "<tool_call>{}</tool_call>,<tool_call>[]</tool_call>",
            ("", ["{}</tool_call>,<tool_call>[]"]),
        ),
        (LLAMA, '<|python_tag|>{"name": "c"}', ("<|python_tag|>", ['{"name": "c"}'])),
        (LLAMA, "Hello", ("Hello", [])),
        (LLAMA, '{"a": "name"}', ('{"a": "name"}', [])),
        (LLAMA, '{"a": {"name": "b"}}', ('{"a": {"name": "b"}}', [])),
        (LLAMA, '{"a": {"name": "b"}', ('{"a": ', ['{"name": "b"}'])),
        (LLAMA, 'Of {"a": 1} {"b": {}, "name": "c"}', ('Of {"a": 1} ', ['{"b": {}, "name": "c"}'])),
        (LLAMA, r"\boxed{2}", (r"\boxed{2}", [])),
        (LLAMA, 'So { "name": "a"}', ("So ", ['{ "name": "a"}'])),
        (
            LLAMA,
            '{"name": "a"}\n{"name": "b"}; {"name": "c"}',
            ("", ['{"name": "a"}', '{"name": "b"}', '{"name": "c"}']),
        ),
        (LLAMA, '{"name": "a"} and {"name": "b"}', ("", ['{"name": "a"} and {"name": "b"}'])),
        (LLAMA, '{"name": "a"', ("", ['{"name": "a"'])),
    ],
)
def test_a_text_is_split_where_its_calls_begin(
    form: CallForm, text: str, parts: tuple[str, list[str]]
) -> None:
    before, calls = form.split(text)
    assert (before, [call.strip() for call in calls]) == parts
