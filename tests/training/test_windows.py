"""Training in every context mode: what was sampled is what is scored, and nothing counts twice."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.session import Session
from ragen_apo.training.trainer import Trainer
from ragen_apo.types import Trajectory, Turn, TurnFlag, training_samples
from ragen_apo.values.regression import ValueRegression, fit_values
from ragen_apo.values.state_values import ReferenceValues
from tests import factories
from tests.factories import flat_gradient, step_without_update, with_keys

MODES = {
    "full": [],
    "last_turns": ["--agent.context.mode=last_turns", "--agent.context.num_turns=1"],
    "single_turn": ["--agent.context.mode=single_turn", "--agent.context.num_turns=2"],
}
TEMPERATURE = 0.8
KEYS = [
    "--environment.max_turns=5",
    "--agent.max_context_tokens=512",
    f"--sampling.temperature={TEMPERATURE}",
    "--training.micro_batch_size=7",
    "--training.num_rows=3",
]


@pytest.fixture(params=MODES)
def trainer(request: pytest.FixtureRequest, session: Session) -> Trainer:
    """A*-PO with a policy that differs from the reference, in episodes of up to five turns."""
    windowed = with_keys(session, *KEYS, *MODES[request.param])
    tasks = windowed.training_tasks()
    values = ReferenceValues({task.task_id: 0.1 * (i % 4) for i, task in enumerate(tasks)})
    return factories.trainer(windowed, values=values)


@pytest.mark.slow
def test_sampled_logprobs_equal_the_scored_ones(trainer: Trainer) -> None:
    # This policy is so decided that float32 alone differs by up to 1e-5 between two shapes.
    trainer.policy.model.double()
    seen = step_without_update(trainer)
    trajectories = seen.trajectories
    assert seen.rollouts.mask_BT.sum().item() == sum(t.num_response_tokens for t in trajectories)
    assert seen.result.metrics["logprob_gap_max"] < 1e-5
    # What this is about did occur: long episodes, cut responses, rows of different length.
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    truncated = [TurnFlag.RESPONSE_TRUNCATED.value in turn.flags for turn in turns]
    assert any(truncated) and not all(truncated)
    assert max(len(trajectory.turns) for trajectory in trajectories) == 5
    assert len({trajectory.num_response_tokens for trajectory in trajectories}) > 2
    is_full = trainer.config.agent.context.mode == "full"
    assert any(turn.restarts_context for turn in turns) is not is_full


@pytest.mark.slow
def test_every_context_fits_and_holds_the_task(trainer: Trainer) -> None:
    window = trainer.proxy.context.window.num_turns
    for trajectory in step_without_update(trainer, 1).trajectories:
        task_ids = trajectory.turns[0].prompt_token_ids[:-4]
        for index, turn in enumerate(trajectory.turns):
            assert turn.restarts_context is (window is not None and index > window)
            if turn.restarts_context:
                assert turn.prompt_token_ids[: len(task_ids)] == task_ids
        samples = training_samples(trajectory)
        assert all(len(sample.token_ids) <= 512 for sample in samples)
        sampled = [sum(sample.loss_mask) for sample in samples]
        assert sum(sampled) == trajectory.num_response_tokens


@pytest.mark.slow
def test_the_gradient_is_that_of_the_loss_written_down_turn_by_turn(trainer: Trainer) -> None:
    seen = step_without_update(trainer, 3)
    trainer.policy.model.zero_grad()
    loss = plain_loss(trainer, seen.trajectories)
    loss.backward()
    expected = flat_gradient(trainer)
    assert seen.result.metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert expected.norm() > 0.1
    assert (seen.gradient - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["apo", "ppo", "apo_turn"])
@pytest.mark.usefixtures("few_random_features")
def test_the_contexts_of_a_long_episode_are_read_a_few_at_a_time(
    algorithm: str, session: Session
) -> None:
    """Otherwise memory would grow with the number of turns, whatever is configured."""
    gradients = []
    for size in (2, 16):
        keys = [*KEYS, *MODES["single_turn"], f"--training.micro_batch_size={size}"]
        windowed = with_keys(session, *keys)
        values = ReferenceValues({task.task_id: 0.1 for task in windowed.training_tasks()})
        trainer = factories.trainer_of(windowed, algorithm, values=values)
        if algorithm == "apo_turn":
            fitted = replace(values, regression=regression_of_states(trainer.policy))
            trainer.take_reference(trainer.reference, tasks=trainer.tasks, values=fitted)
        sizes: list[int] = []

        def note(_: object, __: object, given: dict[str, Any], sizes: list[int] = sizes) -> None:
            if given.get("use_cache") is False:  # no rollout
                sizes.append(len(given["input_ids"]))

        models = [trainer.policy.model, trainer.reference.model, *trainer.algorithm.other_models]
        hooks = [
            module.register_forward_pre_hook(note, with_kwargs=True)
            for model in models
            for module in model.modules()
            if isinstance(module, type(trainer.policy.model.base_model))
        ]
        seen = step_without_update(trainer)
        for hook in hooks:
            hook.remove()
        assert max(len(training_samples(each)) for each in seen.trajectories) == 5
        assert max(sizes) == 2 if size == 2 else max(sizes) >= 5
        gradients.append(seen.gradient)
    few, many = gradients
    assert (few - many).norm() <= 1e-4 * many.norm()
    assert many.norm() > 0


def regression_of_states(model: LanguageModel) -> ValueRegression:
    """Of any: as large as a fit to this model's hidden states."""
    features = torch.randn(20, 2 * model.config.hidden_size, generator=torch.manual_seed(0))
    returns, each = features[:, 0].tolist(), range(20)
    return fit_values(features, returns, episodes=each, tasks=each, beta=1.0, held_out="episodes")


def plain_loss(trainer: Trainer, trajectories: list[Trajectory]) -> torch.Tensor:
    """(R - V* - beta2 Delta)^2 / (2 beta2), each turn read alone with the whole of its context."""
    beta2, loss = trainer.config.algorithm.beta2, torch.zeros(())
    for trajectory in trajectories:
        log_ratio = torch.zeros(())
        context: tuple[int, ...] = ()
        for turn in trajectory.turns:
            context = (
                turn.prompt_token_ids if turn.restarts_context else context + turn.prompt_token_ids
            )
            with torch.no_grad():
                reference = response_logprob(trainer.reference, context, turn)
            log_ratio = log_ratio + response_logprob(trainer.policy, context, turn) - reference
            context = context + turn.response_token_ids
        v_star = trainer.values.tasks[trajectory.task.task_id]
        residual = trajectory.episode_return - v_star - beta2 * log_ratio
        loss = loss + residual.square() / (2 * beta2) / len(trajectories)
    return loss


def response_logprob(model: LanguageModel, context: tuple[int, ...], turn: Turn) -> torch.Tensor:
    """log pi of a response after a context, from the logits of all its positions."""
    token_ids = torch.tensor([context + turn.response_token_ids])
    logprobs = (model.model(input_ids=token_ids).logits[0] / TEMPERATURE).log_softmax(-1)
    indices = range(len(context), token_ids.shape[1])
    return torch.stack([logprobs[index - 1, token_ids[0, index]] for index in indices]).sum()
