"""The project's own tokenizer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ragen_apo.policy.tokenizer import SPECIAL_TOKENS, TAGS, text_of, train_tokenizer


def encode(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_every_product_id_is_one_token_the_same_everywhere(shop_tokenizer) -> None:
    for product_id in range(1, 498):
        token = encode(shop_tokenizer, str(product_id))
        assert len(token) == 1, product_id
        for text in (
            f"Running Shoe {product_id}; ",
            f"<answer>buy {product_id}</answer>",
            f"click {product_id}",
            f"{product_id}: red, ",
        ):
            assert encode(shop_tokenizer, text).count(token[0]) == 1, text


def test_numbers_that_the_texts_leave_out_are_one_token_too() -> None:
    tokenizer = train_tokenizer(["ids 7 and 250"] * 3, vocab_size=1000)
    assert all(len(encode(tokenizer, str(number))) == 1 for number in range(251))


def test_product_ids_have_distinct_tokens(shop_tokenizer) -> None:
    tokens = {encode(shop_tokenizer, str(product_id))[0] for product_id in range(1, 498)}
    assert len(tokens) == 497


@pytest.mark.parametrize("token", [*TAGS, *SPECIAL_TOKENS])
def test_tags_and_template_tokens_are_single_tokens(shop_tokenizer, token: str) -> None:
    for text in (token, f"a{token}b", f" {token} "):
        ids = encode(shop_tokenizer, text)
        assert ids.count(shop_tokenizer.convert_tokens_to_ids(token)) == 1


def test_tags_survive_decoding(shop_tokenizer) -> None:
    text = "<think>find mug</think><answer>search mug</answer>"
    assert shop_tokenizer.decode(encode(shop_tokenizer, text), skip_special_tokens=True) == text


@pytest.mark.slow
@given(text=st.text())
def test_any_text_survives_a_round_trip(shop_tokenizer, text: str) -> None:
    assert shop_tokenizer.decode(encode(shop_tokenizer, text)) == text


def test_spaces_before_punctuation_are_read_as_they_were_sampled() -> None:
    """A tokenizer may be set to leave them out, and then a link's text could not be said."""
    text = "click[men 's shoe , red .]"
    characters = [(letter, -1.0) for letter in sorted({*text, "\u2581"})]
    backend = Tokenizer(models.Unigram(characters))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True)
    token_ids = tokenizer.encode(text)
    assert tokenizer.decode(token_ids) != text
    assert text_of(tokenizer, token_ids) == text


def test_the_chat_template_puts_one_token_before_each_message(shop_tokenizer) -> None:
    messages = [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "page"},
        {"role": "assistant", "content": "reply"},
    ]
    rendered = shop_tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<|system|>rules<|user|>page<|assistant|>reply<|assistant|>"


def test_the_same_texts_give_the_same_tokenizer(shop_texts: list[str]) -> None:
    first, second = (train_tokenizer(shop_texts[:300], vocab_size=500) for _ in range(2))
    assert first.backend_tokenizer.to_str() == second.backend_tokenizer.to_str()


@pytest.mark.slow
def test_the_vocabulary_is_at_most_as_large_as_asked(shop_texts: list[str]) -> None:
    assert len(train_tokenizer(shop_texts, vocab_size=700)) == 700
    assert len(train_tokenizer(["a b"], vocab_size=700)) < 700
