"""Chat templates as pretrained models have them, written by hand, and tokenizers that use them."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

GEMMA = (
    "{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
"""No system role, and turns end with another token than texts do."""
PHI = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
"""The end of the text follows the end of the last turn."""
LLAMA_2 = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] + ' ' + eos_token }}{% else %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% endif %}{% endfor %}"
)
"""A space stands before the token that ends a turn."""
GLM = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Nothing ends a turn but the beginning of the next one, which the model is taught to write."""
R1 = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ '<|im_start|>' + message['content'].split('</think>')[-1] + '<|im_end|>' }}{% else %}"
    "{{ '<|im_start|>' + message['role'] + message['content'] + '<|im_end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<think>\n' }}{% endif %}"
)
"""Opens every response with a thought, as DeepSeek-R1's distilled models and Qwen3-Thinking do."""
UNTHINKING = R1.replace("<think>\n'", "<think>\n\n</think>\n\n'")
"""Writes an empty thought before every response, as Qwen3 with thinking switched off."""
LLAMA_3_2 = (
    "{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    '{%- set date_string = strftime_now("%d %b %Y") %}{%- else %}'
    '{%- set date_string = "26 Jul 2024" %}{%- endif %}{%- endif %}'
    "{{- '<|im_start|>system\nToday Date: ' + date_string + '<|im_end|>' }}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SMOLLM_3 = (
    "{%- macro today() -%}{{ strftime_now('%d %B %Y') }}{%- endmacro -%}"
    "<|im_start|>system\nToday Date: {{ today() }}<|im_end|>\n"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TOKENS = {
    GEMMA: ("<start_of_turn>", "<end_of_turn>"),
    PHI: ("<|user|>", "<|assistant|>", "<|end|>"),
    GLM: ("<|user|>", "<|assistant|>"),
}
"""The special tokens that a template needs besides those of the tokenizer."""


def with_template(
    tokenizer: PreTrainedTokenizerBase, template: str, *, tokens: Sequence[str] = ()
) -> PreTrainedTokenizerBase:
    """A copy of the tokenizer that renders this template and has its special tokens."""
    changed = copy.deepcopy(tokenizer)
    changed.add_tokens([*TOKENS.get(template, ()), *tokens], special_tokens=True)
    changed.chat_template = template
    return changed
