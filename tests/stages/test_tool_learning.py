"""A*-PO makes a model whose chat template knows tools better at a toy task, by its calls.

The agent has two guesses at a secret word, `say(word)`. The reference is trained on a teacher that
says any word; that one of them pays is in the returns alone.
"""

from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from ragen_apo.environments.base import EnvironmentProperties, Reply
from ragen_apo.environments.toolkit.game import Answer, GameEnvironment
from ragen_apo.environments.tools import Tool
from ragen_apo.files import read_json_lines
from ragen_apo.seeding import generator
from ragen_apo.types import Task
from tests import factories

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function.name }} "
    "{% endfor %}<|im_end|>\n{% endif %}{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Qwen's, with few words."""
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


SECRET, WORDS = "grape", ("apple", "brick", "cloud", "drum", "eagle", "flute", "grape", "horse")


class AnyWord:
    """Says any word."""

    def begin(self, task: Task, *, seed: int) -> None:
        self._draws = generator(seed, "any-word")

    def act(self, observation: str) -> Reply:
        return Reply(thought="", action=str(self._draws.choice(WORDS)))


class GuessGame:
    """A success when the secret word is said."""

    def __init__(self, task: Task, seed: int) -> None:
        del task, seed

    def first_observation(self) -> str:
        return "say a word"

    def play(self, text: str) -> Answer:
        found = text == SECRET
        return Answer("again", float(found), terminated=found, success=found)

    def key(self) -> str:
        return "guessing"


def make_guess_game() -> GameEnvironment:
    tasks = {
        split: [
            factories.task(name, environment="guess", split=split, category="word")
            for name in ("one", "two", "three", "four")
        ]
        for split in ("train", "test")
    }
    properties = EnvironmentProperties(
        name="guess",
        version="1",
        reward_version="1",
        deterministic=True,
        return_range=(0.0, 1.0),
        splits=("train", "test"),
        rules="Say the secret word.",
        tools=(Tool("say", "Say a word.", "{word}", {"word": {"type": "string"}}),),
    )
    return GameEnvironment(
        properties=properties,
        tasks=tasks,
        start=GuessGame,
        policies={"random": AnyWord},
        max_turns=2,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 whose tokenizer has the words of the toy and the tags of a call."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [f'say a word again {word}{{"name": "say", "arguments": "{word}"}}' for word in WORDS]
    tokenizer.train_from_iterator([*texts * 9, "system user tool assistant"], trainer=trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = TEMPLATE
    config = Qwen2Config(
        vocab_size=len(wrapped),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=wrapped.eos_token_id,
        pad_token_id=wrapped.pad_token_id,
    )
    path = tmp_path_factory.mktemp("models") / "caller"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen2ForCausalLM(config).save_pretrained(path)
    wrapped.save_pretrained(path)
    return path


CONFIG = """
seed: 0
machine: {num_threads: 1, device: cpu}
environment: {name: guess}
agent: {response_format: tool_call, max_response_tokens: 32, max_context_tokens: 160}
warm_start:
  copy: {max_steps: 0}
  demonstrations:
    teacher: random
    num_episodes_per_task: 60
    num_steps: 300
    batch_size: 16
    learning_rate: 5.0e-3
values: {num_samples: 4, beta1: 0.5}
algorithm: {beta2: 0.05}
optimizer: {learning_rate: 1.0e-3}
training:
  max_steps: 30
  tasks_per_step: 32
  micro_batch_size: 32
  num_rows: 32
  eval_every: null
"""


def test_success_rises_far_above_the_reference(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ragen_apo.agent.assembly.make_environment", lambda name, options: make_guess_game()
    )
    run = factories.run(factories.config(f"--policy.path={folder}", text=CONFIG), tmp_path / "run")
    rows = read_json_lines(run.metrics)
    # Two guesses among eight words: 1 - (7/8)^2 = 0.23, less what is lost by faulty calls.
    curve = [row["success_rate"] for row in rows]
    assert sum(curve[:5]) / 5 < 0.3
    assert sum(curve[-5:]) / 5 > 0.36  # more than three standard errors of 160 episodes above that
    calls = [turn["action"] for row in read_json_lines(run.rollouts) for turn in row["turns"]]
    assert SECRET in calls
