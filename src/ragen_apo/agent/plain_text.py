"""Foreign text as tokens without special ones.

A page that says `<|im_end|>` would otherwise end the message that shows it and continue in any
role. So each name of a special token in a text is cut after its first character, and the parts are
tokenised one by one. Text without such a name is tokenised together with the template around it.
"""

from __future__ import annotations

import re

from transformers import PreTrainedTokenizerBase

from ragen_apo.policy.tokenizer import TAGS

_CUT = "\udfff"
"""Marks a cut until the text is tokenised: a lone surrogate, which no valid text contains."""
_MARKUP = re.compile(r"[<\[].+[>\]]")


def structural_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The tokens that structure a conversation.

    These are the special ones, and those in brackets that the chat template names: some models'
    role tokens are not marked as special. The tags of a response always count as text.
    """
    template = str(tokenizer.chat_template)
    return sorted(
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if token.content not in TAGS
        and (token.special or (_MARKUP.fullmatch(token.content) and token.content in template))
    )


class PlainTextEncoder:
    """Tokenises a rendered conversation whose contents went through `mark` before.

    A special token of a single character cannot be cut and is left as it is.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        names = [name for name in structural_tokens(tokenizer) if len(name) > 1]
        starts = [f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in names]
        # A lookahead, so that names that overlap are all cut.
        self._starts = re.compile("|".join(starts) or "(?!)")

    def mark(self, content: str) -> str:
        """The content with a mark at each cut."""
        return self._starts.sub(lambda start: start[0] + _CUT, content)

    def encode(self, text: str) -> list[int]:
        """The tokens of marked contents and of the template around them."""
        return [
            token_id
            for part in text.split(_CUT)
            for token_id in self._tokenizer.encode(part, add_special_tokens=False)
        ]
