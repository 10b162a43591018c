"""What the agent reads and how its responses are read."""

import copy
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen_apo.agent.context import ContextManager, parse_response, render_response
from ragen_apo.errors import ContextError

OBSERVATIONS = [
    "TASK: User wants to buy blue mug.\nAvailable: 497 products across 8 categories.",
    "Found 2 results. Top 2: Blue Mug 17; Red Mug 18",
    "Answer with <think>...</think><answer>action</answer>.\n  Invalid action. ",
    "\N{SYMBOL FOR UNIT SEPARATOR} et voil\u00e0",
]
RESPONSES = [
    "<think>find blue mug</think><answer>search blue mug</answer>",
    "nonsense",
    "<think></think><answer>buy 17</answer>",
]


@pytest.fixture(params=["ours", "chatml"])
def tokenizer(request: pytest.FixtureRequest, shop_tokenizer, chatml_tokenizer):
    return {"ours": shop_tokenizer, "chatml": chatml_tokenizer}[request.param]


def encode(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def played(context: ContextManager, *, end: Sequence[int]) -> list[int]:
    """All tokens of a conversation, put together turn by turn."""
    token_ids = context.first_prompt(OBSERVATIONS[0])
    for response, observation in zip(RESPONSES, OBSERVATIONS[1:], strict=True):
        written = [*context.encode_response(response), *end]
        token_ids += written + context.next_prompt(observation, last_response=written)
    return token_ids


def rendered(tokenizer, *, system_prompt: str | None) -> list[int]:
    """All tokens of the same conversation from the template's own rendering."""
    messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
    messages.append({"role": "user", "content": OBSERVATIONS[0]})
    for response, observation in zip(RESPONSES, OBSERVATIONS[1:], strict=True):
        messages.append({"role": "assistant", "content": response})
        messages.append({"role": "user", "content": observation})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return encode(tokenizer, text)


@pytest.mark.parametrize("system_prompt", [None, "You shop for a user."])
def test_prompts_put_together_are_the_templates_rendering(
    tokenizer, system_prompt: str | None
) -> None:
    context = ContextManager(tokenizer, system_prompt=system_prompt)
    assert played(context, end=[]) == rendered(tokenizer, system_prompt=system_prompt)


def test_an_end_token_that_was_sampled_is_not_added_again(chatml_tokenizer) -> None:
    context = ContextManager(chatml_tokenizer, system_prompt=None)
    end = [chatml_tokenizer.eos_token_id]
    assert played(context, end=end) == rendered(chatml_tokenizer, system_prompt=None)


def test_an_end_token_inside_a_response_stays(chatml_tokenizer) -> None:
    context = ContextManager(chatml_tokenizer, system_prompt=None)
    end_id = chatml_tokenizer.eos_token_id
    assert context.next_prompt("page", last_response=[end_id, 40])[0] == end_id


def test_decoding_leaves_the_end_token_out(chatml_tokenizer) -> None:
    context = ContextManager(chatml_tokenizer, system_prompt=None)
    token_ids = encode(chatml_tokenizer, RESPONSES[0])
    assert context.decode([*token_ids, chatml_tokenizer.eos_token_id]) == RESPONSES[0]
    assert context.decode(token_ids) == RESPONSES[0]
    assert context.decode([]) == ""


def test_decoding_keeps_a_closing_tag_that_is_the_end_token(shop_tokenizer) -> None:
    context = ContextManager(shop_tokenizer, system_prompt=None)
    assert context.decode(encode(shop_tokenizer, RESPONSES[0])) == RESPONSES[0]


def test_a_template_that_drops_earlier_responses_is_refused(shop_tokenizer) -> None:
    forgetful = copy.deepcopy(shop_tokenizer)
    forgetful.chat_template = "<|user|>{{ messages[-1]['content'] }}<|assistant|>"
    context = ContextManager(forgetful, system_prompt=None)
    context.first_prompt("page")
    with pytest.raises(ContextError, match="leaves out an earlier assistant message"):
        context.next_prompt("page", last_response=[9])


TEXT_WITHOUT_TAGS = st.text().filter(
    lambda text: not any(f"{slash}{tag}>" in text for tag in ("think", "answer") for slash in "</")
)


@given(thought=TEXT_WITHOUT_TAGS, action=TEXT_WITHOUT_TAGS)
def test_parsing_inverts_rendering(thought: str, action: str) -> None:
    parsed = parse_response(render_response(thought=thought, action=action))
    assert parsed.is_valid
    assert (parsed.thought, parsed.action) == (thought.strip(), action.strip())


@given(text=st.text())
def test_any_text_can_be_parsed(text: str) -> None:
    for whole in (text, f"<think>{text}", f"<think>{text}</think><answer>{text}</answer>"):
        parsed = parse_response(whole)
        assert parsed.is_valid or (parsed.thought, parsed.action) == ("", "")


@pytest.mark.parametrize(
    "text",
    [
        "<think>a</think><answer>b</answer>",
        "  <think>a</think>\n\n<answer>b</answer>\n",
        "<think>\na\n</think><answer> b </answer>",
    ],
)
def test_white_space_around_the_parts_is_allowed(text: str) -> None:
    parsed = parse_response(text)
    assert (parsed.thought, parsed.action, parsed.is_valid) == ("a", "b", True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "buy 3",
        "<answer>b</answer>",
        "<think>a</think>",
        "<think>a</think><answer>b",
        "<think>a<answer>b</answer>",
        "<answer>b</answer><think>a</think>",
        "<think>a</think> so <answer>b</answer>",
        "<think>a</think><answer>b</answer> and more",
        "well <think>a</think><answer>b</answer>",
        "<THINK>a</THINK><ANSWER>b</ANSWER>",
        "<think>a</think><answer>b</answer><answer>c</answer>",
        "<think>a</think>c</think><answer>b</answer>",
        "<think>a<think>c</think><answer>b</answer>",
        "<think>a</think><answer>b<answer>c</answer>",
        "<think>a</think><answer>b</think></answer>",
    ],
)
def test_anything_else_is_a_format_error(text: str) -> None:
    parsed = parse_response(text)
    assert (parsed.thought, parsed.action, parsed.is_valid) == ("", "", False)
