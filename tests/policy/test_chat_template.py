"""What is found out about a chat template by rendering it."""

import copy
import datetime

import pytest
from transformers.utils import chat_template_utils

from ragen_apo.errors import ModelError
from ragen_apo.policy.chat_template import TEMPLATE_DATE, read_chat_template
from tests import chat_templates
from tests.chat_templates import with_template
from tests.fixtures import CHATML

CONVERSATION = [{"role": "system", "content": "Rules."}, {"role": "user", "content": "Which?"}]


@pytest.mark.parametrize(
    ("template", "opening"),
    [
        (CHATML, ""),
        (chat_templates.R1, "<think>\n"),
        (chat_templates.UNTHINKING, "<think>\n\n</think>\n\n"),
    ],
)
def test_what_a_template_writes_of_a_response_is_found(
    chatml_tokenizer, template: str, opening: str
) -> None:
    assert read_chat_template(with_template(chatml_tokenizer, template)).opening == opening


@pytest.mark.parametrize(
    ("template", "closing"),
    [
        (CHATML, ["<|im_end|>"]),
        (chat_templates.GEMMA, ["<end_of_turn>"]),
        (chat_templates.PHI, ["<|end|>"]),
        (chat_templates.LLAMA_2, ["\u0120", "<|im_end|>"]),
        (chat_templates.GLM, []),
    ],
)
def test_the_tokens_that_end_a_turn_come_from_the_rendered_template(
    chatml_tokenizer, template: str, closing: list[str]
) -> None:
    tokenizer = with_template(chatml_tokenizer, template)
    found = read_chat_template(tokenizer)
    assert tokenizer.convert_ids_to_tokens(list(found.closing_ids)) == closing
    ends = {tokenizer.eos_token_id, *found.closing_ids[-1:]}
    assert found.end_ids == ends


def test_our_own_template_ends_no_turn(shop_tokenizer) -> None:
    template = read_chat_template(shop_tokenizer)
    assert (template.opening, template.closing_ids) == ("", ())
    assert template.end_ids == {shop_tokenizer.eos_token_id}


def test_without_a_system_role_its_text_stands_before_the_first_message(chatml_tokenizer) -> None:
    template = read_chat_template(with_template(chatml_tokenizer, chat_templates.GEMMA))
    assert not template.has_system_role
    assert template.render(CONVERSATION) == (
        "<start_of_turn>user\nRules.\n\nWhich?<end_of_turn>\n<start_of_turn>model\n"
    )


def test_a_template_that_leaves_a_system_message_out_has_no_system_role(chatml_tokenizer) -> None:
    deaf = CHATML.replace("in messages %}", "in messages if message['role'] != 'system' %}")
    template = read_chat_template(with_template(chatml_tokenizer, deaf))
    assert not template.has_system_role
    assert "Rules.\n\nWhich?" in template.render(CONVERSATION)
    assert read_chat_template(chatml_tokenizer).has_system_role


class Clock:
    """Stands in for `datetime.datetime` where transformers reads the time."""

    def __init__(self, year: int) -> None:
        self.year = year

    def now(self) -> datetime.datetime:
        return datetime.datetime(self.year, 1, 1)


@pytest.mark.parametrize(
    ("template", "printed"),
    [
        (chat_templates.LLAMA_3_2, "Today Date: 26 Jul 2024<"),
        (chat_templates.SMOLLM_3, "Today Date: 26 July 2024<"),
    ],
)
def test_a_template_that_prints_the_date_prints_the_same_every_day(
    chatml_tokenizer, template: str, printed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = with_template(chatml_tokenizer, template)
    texts: list[str] = []
    for year in (2030, 2031):
        monkeypatch.setattr(chat_template_utils, "datetime", Clock(year))
        assert f"{year}" in str(tokenizer.apply_chat_template(CONVERSATION, tokenize=False))
        texts.append(read_chat_template(tokenizer).render(CONVERSATION))
    assert texts[0] == texts[1]
    assert printed in texts[0]
    assert str(TEMPLATE_DATE.year) in printed


def in_form(form: str) -> str:
    return f"{{{{ strftime_now('{form}') }}}}{CHATML}"


@pytest.mark.parametrize("form", ["%F %T", "%e.%D|%R", "%G-W%V", "%-d/%-m %H%z%Z", "100%% %%d"])
def test_a_date_of_another_form_is_written_as_the_clock_would_write_it(
    chatml_tokenizer, form: str
) -> None:
    template = read_chat_template(with_template(chatml_tokenizer, in_form(form)))
    assert template.render(CONVERSATION).startswith(TEMPLATE_DATE.strftime(form) + "<|im_start|>")


def test_a_date_of_a_form_that_is_not_known_is_refused(chatml_tokenizer) -> None:
    with pytest.raises(ModelError, match="knows no date of the form at %s"):
        read_chat_template(with_template(chatml_tokenizer, in_form("at %s")))


@pytest.mark.parametrize("of_all", [CHATML, chat_templates.SMOLLM_3], ids=["plain", "with a date"])
def test_tools_get_the_template_that_is_named_for_them(chatml_tokenizer, of_all: str) -> None:
    tokenizer = with_template(chatml_tokenizer, CHATML)
    tokenizer.chat_template = {"default": of_all, "tool_use": f"WITH TOOLS {of_all}"}
    tool = {"type": "function", "function": {"name": "buy", "parameters": {"type": "object"}}}
    assert "WITH TOOLS" in read_chat_template(tokenizer, tools=[tool]).render(CONVERSATION)
    assert "WITH TOOLS" not in read_chat_template(tokenizer).render(CONVERSATION)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "has no chat template"),
        ("{{ raise_exception('no') }}", "fails on a conversation of two turns.*no"),
        ("<|im_start|>{{ messages[-1]['content'] }}", "leaves out an earlier assistant message"),
        (
            "{% for m in messages %}{{ m['content'] }}{% endfor %}"
            "{% if messages | length == 1 %}<think>{% endif %}",
            "opens the first response with '<think>' and the second with ''",
        ),
    ],
)
def test_a_template_that_no_episode_can_be_played_with_is_refused(
    chatml_tokenizer, template: str | None, reason: str
) -> None:
    tokenizer = copy.deepcopy(chatml_tokenizer)
    tokenizer.chat_template = template
    with pytest.raises(ModelError, match=reason):
        read_chat_template(tokenizer)
