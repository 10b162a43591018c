"""What the agent reads and how its responses are read."""

import copy
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen_apo.agent.context import ContextManager, ContextWindow, system_prompt
from ragen_apo.agent.responses import parse_response, render_response
from ragen_apo.errors import ModelError
from ragen_apo.types import Turn
from tests import factories
from tests.chat_templates import GEMMA, GLM, LLAMA_2, PHI, R1, UNTHINKING, with_template
from tests.factories import NO_LIMITS
from tests.fixtures import CHATML
from tests.sweeps import quick_first

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
    context = ContextManager(tokenizer, system_prompt=system_prompt, limits=NO_LIMITS)
    assert played(context, end=[]) == rendered(tokenizer, system_prompt=system_prompt)


def test_an_end_token_that_was_sampled_is_not_added_again(chatml_tokenizer) -> None:
    context = ContextManager(chatml_tokenizer, system_prompt=None, limits=NO_LIMITS)
    end = [chatml_tokenizer.eos_token_id]
    assert played(context, end=end) == rendered(chatml_tokenizer, system_prompt=None)


def test_an_end_token_inside_a_response_stays(chatml_tokenizer) -> None:
    context = ContextManager(chatml_tokenizer, system_prompt=None, limits=NO_LIMITS)
    end_id = chatml_tokenizer.eos_token_id
    assert context.next_prompt("page", last_response=[end_id, 40])[0] == end_id


def test_decoding_leaves_the_end_token_out(chatml_tokenizer) -> None:
    context = ContextManager(chatml_tokenizer, system_prompt=None, limits=NO_LIMITS)
    token_ids = encode(chatml_tokenizer, RESPONSES[0])
    assert context.decode([*token_ids, chatml_tokenizer.eos_token_id]) == RESPONSES[0]
    assert context.decode(token_ids) == RESPONSES[0]
    assert context.decode([]) == ""


def test_decoding_keeps_a_closing_tag_that_is_the_end_token(shop_tokenizer) -> None:
    context = ContextManager(shop_tokenizer, system_prompt=None, limits=NO_LIMITS)
    assert context.decode(encode(shop_tokenizer, RESPONSES[0])) == RESPONSES[0]


TWO_TURNS = {
    GEMMA: (
        "<start_of_turn>user\npage<end_of_turn>\n<start_of_turn>model\nbuy<end_of_turn>\n"
        "<start_of_turn>user\nnext<end_of_turn>\n<start_of_turn>model\n"
    ),
    PHI: "<|user|>\npage<|end|>\n<|assistant|>\nbuy<|end|>\n<|user|>\nnext<|end|>\n<|assistant|>\n",
    LLAMA_2: "[INST] page [/INST]buy{end}[INST] next [/INST]",
    GLM: "<|user|>\npage<|assistant|>buy<|user|>\nnext<|assistant|>",
}
"""Two turns, as the context holds them. Llama's space before a response is not in its prompt."""
TURN_ENDS = {GEMMA: "<end_of_turn>", PHI: "<|end|>", LLAMA_2: "<|im_end|>", GLM: "<|user|>"}


@pytest.mark.parametrize("template", TWO_TURNS, ids=["gemma", "phi", "llama 2", "glm"])
@pytest.mark.parametrize("sampled", [True, False])
def test_the_token_that_ends_a_turn_stands_in_the_context_once(
    chatml_tokenizer, template: str, sampled: bool
) -> None:
    """Also where it is not `tokenizer.eos_token`; GLM's is named by generation_config.json."""
    tokenizer = with_template(chatml_tokenizer, template)
    end_id = tokenizer.convert_tokens_to_ids(TURN_ENDS[template])
    context = ContextManager(
        tokenizer, system_prompt=None, end_ids=[tokenizer.eos_token_id, end_id], limits=NO_LIMITS
    )
    written = [*encode(tokenizer, "buy"), *([end_id] if sampled else [])]
    token_ids = [
        *context.first_prompt("page"),
        *written,
        *context.next_prompt("next", last_response=written),
    ]
    # What was sampled stays; the template puts a space before the token only where it writes it.
    end = "<|im_end|>" if sampled else " <|im_end|>"
    assert tokenizer.decode(token_ids) == TWO_TURNS[template].format(end=end)
    assert context.decode(written) == "buy"


def test_an_end_of_the_text_is_no_end_of_the_turn_and_both_stand_in_the_context(
    chatml_tokenizer,
) -> None:
    tokenizer = with_template(chatml_tokenizer, GEMMA)
    context = ContextManager(tokenizer, system_prompt=None, limits=NO_LIMITS)
    written = [*encode(tokenizer, "buy"), tokenizer.eos_token_id]
    following = tokenizer.decode(context.next_prompt("next", last_response=written))
    assert following.startswith("<end_of_turn>\n<start_of_turn>user\nnext")
    assert context.decode(written) == "buy"


def test_a_system_prompt_without_a_system_role_stands_before_the_first_observation_only(
    chatml_tokenizer,
) -> None:
    context = ContextManager(
        with_template(chatml_tokenizer, GEMMA), system_prompt="You shop.", limits=NO_LIMITS
    )
    first = context.tokenizer.decode(context.first_prompt("page"))
    assert first.startswith("<start_of_turn>user\nYou shop.\n\npage<end_of_turn>")
    following = context.tokenizer.decode(context.next_prompt("next", last_response=[40]))
    assert "<start_of_turn>user\nnext<end_of_turn>" in following


def test_a_thought_that_the_template_opened_is_read_and_not_written_again(
    chatml_tokenizer,
) -> None:
    context = ContextManager(
        with_template(chatml_tokenizer, R1), system_prompt=None, limits=NO_LIMITS
    )
    assert context.tokenizer.decode(context.first_prompt("page")).endswith("<think>\n")
    text = context.write_response(thought="find mug", action="search mug")
    assert text == "find mug</think><answer>search mug</answer>"
    parsed = context.parse(text)
    assert (parsed.thought, parsed.action, parsed.is_valid) == ("find mug", "search mug", True)
    for faulty in (f"<think>{text}", "search mug", "<answer>search mug</answer>"):
        assert not context.parse(faulty).is_valid, faulty


def test_after_an_empty_thought_of_the_template_a_response_may_think_or_not(
    chatml_tokenizer,
) -> None:
    context = ContextManager(
        with_template(chatml_tokenizer, UNTHINKING), system_prompt=None, limits=NO_LIMITS
    )
    written = {
        "": "<answer>buy 3</answer>",
        "the mug": "<think>the mug</think><answer>buy 3</answer>",
    }
    for thought, text in written.items():
        assert context.write_response(thought=thought, action="buy 3") == text
        parsed = context.parse(text)
        assert (parsed.thought, parsed.action, parsed.is_valid) == (thought, "buy 3", True)
    assert not context.parse("the mug</think><answer>buy 3</answer>").is_valid


@pytest.mark.parametrize("template", quick_first([CHATML, GEMMA, R1, UNTHINKING]))
@given(thought=st.text("ab <>/\n"), action=st.text("ab <>/\n"))
def test_a_context_reads_what_it_writes(
    chatml_tokenizer, template: str, thought: str, action: str
) -> None:
    context = ContextManager(
        with_template(chatml_tokenizer, template), system_prompt=None, limits=NO_LIMITS
    )
    parsed = context.parse(context.write_response(thought=thought, action=action))
    assert (parsed.thought, parsed.action) == (thought.strip(), action.strip())


def test_a_template_that_drops_earlier_responses_is_refused(shop_tokenizer) -> None:
    forgetful = copy.deepcopy(shop_tokenizer)
    forgetful.chat_template = "<|user|>{{ messages[-1]['content'] }}<|assistant|>"
    with pytest.raises(ModelError, match="leaves out an earlier assistant message"):
        ContextManager(forgetful, system_prompt=None, limits=NO_LIMITS)


def turns(context: ContextManager, *, actions: Sequence[str], cut: int | None = None) -> list[Turn]:
    """Turns in which the agent read OBSERVATIONS and did this; a response may be cut off."""
    played: list[Turn] = []
    for observation, action in zip(OBSERVATIONS, actions, strict=False):
        response = render_response(thought="t", action=action)
        written = context.encode_response(response)[:cut]
        prompt = context.prompt(played, observation)
        played.append(
            factories.turn(
                observation=observation,
                prompt_token_ids=prompt.token_ids,
                response_token_ids=written,
                response=response,
                thought="t",
                action=action,
                restarts_context=prompt.restarts,
            )
        )
    return played


def conversation(tokenizer, *contents: str) -> list[int]:
    """The template's own rendering of a system prompt and messages of user and agent in turns."""
    messages = [{"role": "system", "content": "You shop."}]
    for index, content in enumerate(contents):
        messages.append({"role": ("user", "assistant")[index % 2], "content": content})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return encode(tokenizer, text)


def windowed(tokenizer, **window: int) -> ContextManager:
    return ContextManager(
        tokenizer, system_prompt="You shop.", window=ContextWindow(**window), limits=NO_LIMITS
    )


ACTIONS = ["search blue mug", "", "buy\n 17"]
WRITTEN = [render_response(thought="t", action=action) for action in ACTIONS]


@pytest.mark.parametrize("num_turns", [1, 2])
def test_the_last_turns_follow_the_task_and_the_rest_is_left_out(tokenizer, num_turns: int) -> None:
    context = windowed(tokenizer, num_turns=num_turns)
    first, *others = OBSERVATIONS
    prompt = context.prompt(turns(context, actions=ACTIONS), others[2])
    messages = {
        1: [f"{first}\n...\n{others[1]}", WRITTEN[2], others[2]],
        2: [f"{first}\n...\n{others[0]}", WRITTEN[1], others[1], WRITTEN[2], others[2]],
    }
    assert prompt.restarts
    assert list(prompt.token_ids) == conversation(tokenizer, *messages[num_turns])


@pytest.mark.parametrize(
    ("num_actions", "memory"),
    [
        (9, "1. search blue mug\n2. (none)\n3. buy 17"),
        (2, "2. (none)\n3. buy 17"),
        (1, "3. buy 17"),
    ],
)
def test_a_single_turn_remembers_its_last_actions_one_a_line(
    tokenizer, num_actions: int, memory: str
) -> None:
    context = windowed(tokenizer, num_turns=0, num_actions=num_actions)
    prompt = context.prompt(turns(context, actions=ACTIONS), OBSERVATIONS[3])
    opening = f"{OBSERVATIONS[0]}\nActions so far:\n{memory}\nNow:\n{OBSERVATIONS[3]}"
    assert prompt.restarts
    assert list(prompt.token_ids) == conversation(tokenizer, opening)


def test_a_window_that_holds_all_turns_is_the_full_context(tokenizer) -> None:
    full, wide = windowed(tokenizer), windowed(tokenizer, num_turns=3)
    expected = turns(full, actions=ACTIONS)
    assert turns(wide, actions=ACTIONS) == expected
    prompts = [context.prompt(expected, OBSERVATIONS[3]) for context in (full, wide)]
    assert prompts[0] == prompts[1]
    assert not any(turn.restarts_context for turn in expected) and not prompts[0].restarts
    restarts = [
        turn.restarts_context for turn in turns(windowed(tokenizer, num_turns=1), actions=ACTIONS)
    ]
    assert restarts == [False, False, True]


def test_a_response_in_the_window_stays_as_it_was_sampled(chatml_tokenizer) -> None:
    context = windowed(chatml_tokenizer, num_turns=1)
    played = turns(context, actions=ACTIONS, cut=3)
    last = played[-1].response_token_ids
    assert len(last) == 3
    token_ids = list(context.prompt(played, OBSERVATIONS[3]).token_ids)
    opening = f"{OBSERVATIONS[0]}\n...\n{OBSERVATIONS[2]}"
    following = context.next_prompt(OBSERVATIONS[3], last_response=last)
    assert following[0] == chatml_tokenizer.eos_token_id
    assert token_ids == [*context.first_prompt(opening), *last, *following]


TEXT_WITHOUT_TAGS = st.text().filter(
    lambda text: not any(f"{slash}{tag}>" in text for tag in ("think", "answer") for slash in "</")
)


@pytest.mark.slow
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


def test_rules_and_format_state_the_form_that_the_parser_reads() -> None:
    text = system_prompt("rules_and_format", rules="Push boxes.")
    assert text is not None
    assert text.startswith("Push boxes.\n\nAnswer every message in this form")
    assert parse_response(text.splitlines()[-1]).is_valid
    assert system_prompt("rules", rules="Push boxes.") == "Push boxes."
    assert system_prompt("none", rules="Push boxes.") is None
    assert system_prompt("Be quick.", rules="Push boxes.") == "Be quick."
