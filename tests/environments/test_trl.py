"""Environments in TRL's GRPOTrainer: the class alone, and a training run of the real TRL."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ragen_apo.config.policy import SmallModelConfig
from ragen_apo.environments.base import TextEnvironment, make_environment
from ragen_apo.environments.shop import ShopEnvironment
from ragen_apo.environments.trl import OVER, ToolEnvironment, environment_factory, task_rows
from ragen_apo.errors import ConfigError
from ragen_apo.policy.language_model import build_small_model

SHOP = {"num_products": 60, "max_turns": 3}


@pytest.fixture
def shopper() -> ToolEnvironment:
    return environment_factory("shop", **SHOP)()


def test_a_row_has_the_rules_and_names_its_task() -> None:
    rows = task_rows("shop", split="test", **SHOP)
    environment = make_environment("shop", SHOP)
    assert [row["task_id"] for row in rows] == [t.task_id for t in environment.tasks("test")]
    assert rows[0]["prompt"][0]["role"] == "user"
    assert environment.properties.rules in rows[0]["prompt"][0]["content"]


def test_making_rows_leaves_no_environment_open(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    monkeypatch.setattr(
        ShopEnvironment, "close", lambda self: closed.append(id(self)), raising=False
    )
    task_rows("shop", **SHOP)
    assert len(closed) == 1


def test_actions_earn_what_they_earn_in_the_environment(shopper: ToolEnvironment) -> None:
    environment = make_environment("shop", SHOP)
    task = environment.tasks("train")[0]
    actions = ["search cotton", "nonsense", f"buy {task.payload['product_id']}"]
    first, _ = environment.reset(task, seed=0)
    steps = [environment.step(action) for action in actions]
    assert shopper.reset(task_id=task.task_id) == first
    seen = [shopper.act(action) for action in actions]
    assert seen[:2] == [step[0] for step in steps[:2]]
    assert seen[2] == f"{steps[2][0]}\n{OVER}"
    assert shopper.get_reward() == pytest.approx(sum(step[1] for step in steps))


def test_nothing_happens_after_the_end_and_before_a_start(shopper: ToolEnvironment) -> None:
    assert shopper.act("search cotton") == OVER
    row = task_rows("shop", **SHOP)[0]
    shopper.reset(**row)
    shopper.act("buy 1")
    earned = shopper.get_reward()
    assert shopper.act("buy 1") == OVER
    assert shopper.get_reward() == earned
    shopper.reset(**row)
    assert shopper.get_reward() == 0.0


def test_rows_of_another_environment_are_refused(shopper: ToolEnvironment) -> None:
    with pytest.raises(ConfigError, match=r"no task has the id 'x'; expected the task_id"):
        shopper.reset(task_id="x")
    with pytest.raises(ConfigError, match="has no tasks; expected train or test"):
        task_rows("shop", split="holdout", **SHOP)
    with pytest.raises(ConfigError, match="does not take these options"):
        environment_factory(lambda: make_environment("shop", SHOP), max_turns=3)()


def two_steps_of_trl(
    tokenizer: Any,
    folder: Path,
    environment: str,
    options: Mapping[str, Any],
    scripts: Sequence[Sequence[str]],
) -> tuple[list[float], list[str]]:
    """Mean rewards and prompts of two steps of the real GRPOTrainer on the first training task.

    The model says no random words but the actions of a script, one script a rollout of the group;
    then it is done. Its weights have to change.
    """
    trl = pytest.importorskip("trl", reason="TRL is not installed: pip install trl")
    from datasets import Dataset

    template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    sizes = SmallModelConfig(
        hidden_size=32, num_layers=2, num_heads=4, intermediate_size=64, max_position=16_384
    )
    model = build_small_model(tokenizer, sizes, seed=0).model
    told: list[str] = []

    def says(row: int, prompt: str) -> list[int]:
        said = prompt.count("<tool_response>")
        script = scripts[row % len(scripts)]
        words = "Done."
        if said < len(script):
            call = json.dumps({"name": "act", "arguments": {"action": script[said]}})
            words = f"<tool_call>\n{call}\n</tool_call>"
        return tokenizer.encode(f"{words}<|im_end|>", add_special_tokens=False)

    def generate(input_ids: torch.Tensor, **_: object) -> torch.Tensor:
        prompts = [tokenizer.decode(row) for row in input_ids]
        rows = range(len(prompts)) if len(prompts) == len(scripts) else [longest] * len(prompts)
        told.extend(prompts)
        said = [torch.tensor(says(row, prompt)) for row, prompt in zip(rows, prompts, strict=True)]
        padded = torch.nn.utils.rnn.pad_sequence(
            said, batch_first=True, padding_value=tokenizer.pad_token_id
        )
        return torch.cat([input_ids, padded], dim=1)

    longest = max(range(len(scripts)), key=lambda row: len(scripts[row]))
    model.generate = generate
    before = model.get_input_embeddings().weight.detach().clone()
    trainer = trl.GRPOTrainer(
        model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(task_rows(environment, **options)[:1]),
        environment_factory=environment_factory(environment, **options),
        args=trl.GRPOConfig(
            output_dir=str(folder),
            max_steps=2,
            per_device_train_batch_size=len(scripts),
            num_generations=len(scripts),
            max_completion_length=12_000,  # with all that the environment answers
            report_to=[],
            use_cpu=True,
            bf16=False,
            learning_rate=1e-3,
            logging_steps=1,
        ),
    )
    trainer.train()
    assert not torch.equal(model.get_input_embeddings().weight, before)
    rewards = [
        row["rewards/ToolEnvironment/mean"]
        for row in trainer.state.log_history
        if "rewards/ToolEnvironment/mean" in row
    ]
    return rewards, told


@pytest.mark.slow
def test_trl_trains_two_steps_with_the_tool(chatml_tokenizer, tmp_path: Path) -> None:
    # Returns that differ, so that there is something to learn.
    scripts = [["buy 7"], ["search cotton"]]
    rewards, told = two_steps_of_trl(chatml_tokenizer, tmp_path, "shop", SHOP, scripts)
    assert len(rewards) == 2
    assert any("Found " in prompt for prompt in told), "the tool's answer is what the model reads"
    assert any(OVER in prompt for prompt in told)


@pytest.mark.slow
def test_trl_trains_two_steps_on_webshop(chatml_tokenizer, tmp_path: Path) -> None:
    """One rollout does what the oracle does, one only looks."""
    options = {"data": "generated", "store": str(tmp_path / "store"), "max_turns": 6}
    bought = oracle_actions(make_environment("webshop", options))
    rewards, told = two_steps_of_trl(
        chatml_tokenizer, tmp_path, "webshop", options, [bought, bought[:1]]
    )
    assert rewards == [0.5, 0.5], "1 for the purchase, 0 for the look"
    assert any(OVER in prompt for prompt in told)


def oracle_actions(environment: TextEnvironment) -> list[str]:
    """What the oracle does on the first training task."""
    task = environment.tasks("train")[0]
    oracle = environment.scripted_policies()["oracle"]()
    observation, _ = environment.reset(task, seed=0)
    oracle.begin(task, seed=0)
    actions, over = [], False
    while not over:
        actions.append(oracle.act(observation).action)
        observation, _, terminated, truncated, _ = environment.step(actions[-1])
        over = terminated or truncated
    return actions
