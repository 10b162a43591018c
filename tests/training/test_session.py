from dataclasses import replace

import pytest

from ragen_apo.errors import ConfigError
from ragen_apo.training.session import Session


def limited(session: Session, max_tasks: int, *, seed: int = 0) -> Session:
    training = session.config.training.model_copy(update={"max_tasks": max_tasks})
    config = session.config.model_copy(update={"training": training, "seed": seed})
    return replace(session, config=config)


def test_training_tasks_are_a_part_of_the_split_that_depends_on_the_seed(session: Session) -> None:
    every = session.training_tasks()
    assert every == list(session.environments.tasks("train"))
    parts = [limited(session, 5, seed=seed).training_tasks() for seed in (0, 0, 1)]
    assert parts[0] == parts[1] != parts[2]
    for part in parts:
        assert len(part) == 5
        assert [task for task in every if task in part] == part, "in the split's order"


def test_a_model_that_is_too_short_for_an_episode_is_refused_when_it_is_loaded(
    session: Session,
) -> None:
    agent = session.config.agent.model_copy(update={"max_context_tokens": 513})
    longer = replace(session, config=session.config.model_copy(update={"agent": agent}))
    with pytest.raises(ConfigError, match="at most 512 tokens"):
        longer.load_model(session.run.initial)


def test_a_limit_above_the_split_takes_all_of_it(session: Session) -> None:
    assert limited(session, 10_000).training_tasks() == session.training_tasks()


def test_an_environment_without_training_tasks_gets_no_advice_on_the_shop(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session.environments, "tasks", lambda split: ())
    with pytest.raises(ConfigError, match="no task in the split 'train'") as refused:
        session.training_tasks()
    assert "num_products" not in str(refused.value)
