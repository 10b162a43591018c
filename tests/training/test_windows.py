"""Training in every context mode: what was sampled is what is scored, and nothing counts twice."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from ragen_apo.agent.assembly import build_environments, build_proxy
from ragen_apo.config import parse_config
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.session import Session
from ragen_apo.training.algorithms import make_algorithm
from ragen_apo.training.optimization import Optimizer
from ragen_apo.training.rollouts import gather_rollouts
from ragen_apo.training.trainer import Trainer
from ragen_apo.types import StopReason, Trajectory, Turn, TurnFlag, make_task, training_samples
from ragen_apo.values.reference_values import ReferenceValues

MODES = {
    "full": [],
    "last_turns": ["--agent.context.mode=last_turns", "--agent.context.num_turns=1"],
    "single_turn": ["--agent.context.mode=single_turn", "--agent.context.num_turns=2"],
}
TEMPERATURE = 0.8
KEYS = [
    "--environment.max_turns=5",
    "--agent.max_context_tokens=512",
    f"--apo.temperature={TEMPERATURE}",
    "--training.micro_batch_size=7",
    "--training.num_rows=3",
]


@pytest.fixture(params=MODES)
def trainer(request: pytest.FixtureRequest, session: Session, tiny_config: str) -> Trainer:
    """A*-PO with a policy that differs from the reference, in episodes of up to five turns."""
    keys = [*KEYS, *MODES[request.param]]
    config = parse_config(tiny_config, source="tiny", overrides=keys)
    environments = build_environments(config)
    policy = session.load_model(session.run.reference(1))
    reference = session.load_model(session.run.reference(0))
    tasks = environments.tasks("train")
    return Trainer(
        config,
        policy=policy,
        reference=reference,
        proxy=build_proxy(config, policy, environments),
        tasks=tasks,
        values=ReferenceValues({task.task_id: 0.1 * (i % 4) for i, task in enumerate(tasks)}),
        algorithm=make_algorithm(config, reference),
        optimizer=Optimizer(policy.model),
    )


def test_sampled_logprobs_equal_the_scored_ones(trainer: Trainer) -> None:
    # This policy is so decided that float32 alone differs by up to 1e-5 between two shapes.
    trainer.policy.model.double()
    trajectories = trainer._roll_out(0)
    rollouts = trainer._gather(trajectories, 0)
    assert rollouts.mask_BT.sum().item() == sum(t.num_response_tokens for t in trajectories)
    for micro in rollouts.micro_batches(range(len(rollouts)), size=7):
        scores = trainer._scores(trainer.policy, micro)
        torch.testing.assert_close(
            scores.logprobs_BT.float(), micro.tokens.sampled_logprobs_BT, atol=1e-5, rtol=0
        )
    # What this is about did occur: long episodes, cut responses, rows of different length.
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    truncated = [TurnFlag.RESPONSE_TRUNCATED.value in turn.flags for turn in turns]
    assert any(truncated) and not all(truncated)
    assert max(len(trajectory.turns) for trajectory in trajectories) == 5
    assert len({trajectory.num_response_tokens for trajectory in trajectories}) > 2
    is_full = trainer.config.agent.context.mode == "full"
    assert any(turn.restarts_context for turn in turns) is not is_full


def test_every_context_fits_and_holds_the_task(trainer: Trainer) -> None:
    window = trainer.proxy.context.window.num_turns
    for trajectory in trainer._roll_out(1):
        task_ids = trajectory.turns[0].prompt_token_ids[:-4]
        for place, turn in enumerate(trajectory.turns):
            assert turn.restarts_context is (window is not None and place > window)
            if turn.restarts_context:
                assert turn.prompt_token_ids[: len(task_ids)] == task_ids
        samples = training_samples(trajectory)
        assert all(len(sample.token_ids) <= 512 for sample in samples)
        sampled = [sum(sample.loss_mask) for sample in samples]
        assert sum(sampled) == trajectory.num_response_tokens


def test_the_gradient_is_that_of_the_loss_written_down_turn_by_turn(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer.optimizer, "update", lambda **_: 1.0)
    result = trainer.step(3)
    parameters = list(trainer.policy.model.parameters())
    actual = flat_gradient(parameters)
    trainer.policy.model.zero_grad()
    loss = plain_loss(trainer, result.trajectories)
    loss.backward()
    expected = flat_gradient(parameters)
    assert result.metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert expected.norm() > 0.1
    assert (actual - expected).norm() <= 1e-4 * expected.norm()


def plain_loss(trainer: Trainer, trajectories: list[Trajectory]) -> torch.Tensor:
    """(R - V* - beta2 Delta)^2 / (2 beta2), each turn read alone with the whole of its context."""
    beta2, loss = trainer.apo.beta2, torch.zeros(())
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
    places = range(len(context), token_ids.shape[1])
    return torch.stack([logprobs[place - 1, token_ids[0, place]] for place in places]).sum()


def flat_gradient(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    return torch.cat([p.grad.flatten().double() for p in parameters if p.grad is not None])


@pytest.fixture
def turn() -> Callable[..., Turn]:
    def turn(prompt: tuple[int, ...], response: tuple[int, ...], reward: float, **kwargs) -> Turn:
        logprobs = tuple(-0.1 * token for token in response)
        return Turn("", prompt, response, logprobs, "", "", "", reward, **kwargs)

    return turn


def test_a_row_holds_the_sampled_tokens_of_all_samples_in_their_order(
    turn: Callable[..., Turn],
) -> None:
    turns = (
        turn((10, 11), (12,), 0.1),
        turn((13,), (14, 15), 0.2),
        turn((10, 16, 17), (18, 19), 0.4, restarts_context=True),
    )
    task = make_task(environment="e", instruction="i", split="s", category="c", payload={})
    episode = Trajectory(task, turns, True, False, StopReason.TERMINATED, True, "", "v", 0)
    one = replace(episode, turns=turns[:1])
    rollouts = gather_rollouts(
        [one, episode],
        step=0,
        group_size=1,
        returns_B=torch.tensor([each.episode_return for each in (one, episode)]),
        values=ReferenceValues(),
        pad_id=0,
        device=torch.device("cpu"),
    )
    # Row 1: 10 11 12 13 14 15 of the first sample, then 18 19 of the second.
    assert rollouts.tokens.token_ids_BT.tolist() == [
        [10, 11, 12, 0, 0, 0, 0, 0],
        [10, 11, 12, 13, 14, 15, 18, 19],
    ]
    assert rollouts.turn_index_BT.tolist() == [
        [-1, -1, 0, -1, -1, -1, -1, -1],
        [-1, -1, 0, -1, 1, 1, 2, 2],
    ]
    assert rollouts.rewards_BT[1].tolist() == pytest.approx([0, 0, 0.1, 0, 0, 0.2, 0, 0.4])
    (micro,) = rollouts.micro_batches([1, 0], size=8)
    assert micro.places.tolist() == [0, 1]
    assert micro.samples.token_ids_BT.tolist() == [
        [10, 11, 12, 0, 0, 0],
        [10, 11, 12, 13, 14, 15],
        [10, 16, 17, 18, 19, 0],
    ]
    assert (micro.num_sequences, micro.num_tokens) == (2, 6)
    values_SL = micro.samples.token_ids_BT.float().requires_grad_()
    rows_BT = micro.in_rows(values_SL)
    expected = [[0, 0, 12, 0, 0, 0, 0, 0], [0, 0, 12, 0, 14, 15, 18, 19]]
    assert rows_BT.tolist() == expected
    rows_BT.sum().backward()
    assert values_SL.grad is not None
    assert torch.equal(values_SL.grad, micro.samples.loss_mask_BT.float())
