"""The project's own byte-level BPE tokenizer, for models that start from nothing.

Trained on texts of the environment. Numbers of up to three digits are one piece and carry no
leading space, so an id is the same token in an observation and in an action: copying it is one
step. The think and answer tags are single tokens. The chat template adds one token before each
message.
"""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD, SYSTEM, USER, ASSISTANT = "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
OPEN_THOUGHT, CLOSE_THOUGHT, OPEN_ANSWER, CLOSE_ANSWER = TAGS
SPECIAL_TOKENS = (PAD, SYSTEM, USER, ASSISTANT)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_TEXTS_PER_NUMBER = 100
"""Each number is added once per this number of texts, so it only precedes rare words."""
_NUMBER = re.compile(r"(?<![0-9])[0-9]{1,3}(?![0-9])")
_PIECES = Regex(r"\p{N}{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+")


def text_of(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """The text of these tokens, special ones included, with its spaces as they were sampled.

    Tokenizers may be set to leave out spaces before punctuation, which actions may need.
    """
    text = tokenizer.decode(
        list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    assert isinstance(text, str)
    return text


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of at most `vocab_size` tokens, the same for the same texts in the same order.

    Every number from 0 to the largest number in the texts (of up to three digits) gets a token, as
    far as `vocab_size` allows. So ids of held-out products have a token even if no text contains
    them.
    """
    texts = list(texts)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_PIECES, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL_TOKENS, *TAGS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts + _numbers(texts), trainer=trainer)
    # Tags are ordinary text with ids of their own: decoding must keep them.
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=CLOSE_ANSWER,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def tokenizer_contents(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """All that decides which tokens a text has and which text they have, as JSON values.

    That is the serialised tokenizer (normaliser, merges, vocabulary) without what a call leaves
    behind in it, its padding and truncation.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # one in Python, which has no form of its own
        contents: dict[str, Any] = {
            "class": type(tokenizer).__name__,
            "vocabulary": sorted(tokenizer.get_vocab().items()),
        }
    else:
        contents = json.loads(backend.to_str())
        del contents["padding"], contents["truncation"]
        # A folder that is read again marks the tokens with a role as special.
        special = set(tokenizer.all_special_tokens)
        for token in contents["added_tokens"]:
            token["special"] = token["special"] or token["content"] in special
    return contents | {"cleans_up": bool(tokenizer.clean_up_tokenization_spaces)}


def printed_tokens(tokenizer: PreTrainedTokenizerBase, config: Any) -> dict[str, str | None]:
    """The special tokens that the chat template names, without those that the model's
    configuration tells as well: they are part of its fingerprint already.
    """
    template, found = str(tokenizer.chat_template), {}
    named = {"bos_token": None, "eos_token": None, **tokenizer.special_tokens_map}
    for name, token in named.items():
        token_id = None if token is None else tokenizer.convert_tokens_to_ids(token)
        if name in template and token_id != getattr(config, f"{name}_id", None):
            found[name] = token
    return found


def _numbers(texts: Sequence[str]) -> list[str]:
    found = {int(number) for text in texts for number in _NUMBER.findall(text)}
    times = 1 + len(texts) // _TEXTS_PER_NUMBER
    return [" ".join([str(number)] * times) for number in range(max(found, default=0) + 1)]
