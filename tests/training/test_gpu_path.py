"""What runs on CUDA, on a pretend GPU: the numbers of the CPU, and no tensor on another device."""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ragen_apo.errors import ModelError
from ragen_apo.policy import language_model
from ragen_apo.policy.conversation_probe import probe_conversation
from ragen_apo.policy.generation import GenerationEngine
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.policy.passes import seeded_torch
from ragen_apo.policy.ragged_cache import RaggedLayer
from ragen_apo.policy.scoring import score_tokens
from ragen_apo.session import Session
from ragen_apo.training.batching import collate, loss_mask_of
from ragen_apo.training.checkpoint import (
    Position,
    load_latest_checkpoint,
    load_moments,
    save_checkpoint,
)
from ragen_apo.training.optimization import Optimizer
from ragen_apo.training.rollouts import MicroBatch, row_of
from ragen_apo.training.trainer import StepResult, Trainer
from ragen_apo.types import TrainingSample, Trajectory
from ragen_apo.warm_start.supervised import SupervisedBatch, accumulate_supervised_gradients
from tests.factories import trainer_of, with_return
from tests.generating import respond
from tests.pretend_gpu import GPU, Graph, OnGpu, PretendGpu, WrongDeviceError

PROMPTS = [[5, 9, 12, 30], [7, 8]], [[3], [11, 4, 6]]


def copy_on_gpu(model: LanguageModel) -> LanguageModel:
    moved = copy.deepcopy(model)
    torch.nn.Module.to(moved.model, "cuda")
    return moved


def assert_same_weights(
    on_gpu: torch.nn.Module, on_cpu: torch.nn.Module, *, atol: float = 1e-7
) -> None:
    """To the last bits: a sum of squares, which clips gradients, is computed in another order."""
    for actual, expected in zip(on_gpu.parameters(), on_cpu.parameters(), strict=True):
        assert isinstance(actual, OnGpu)
        torch.testing.assert_close(actual.within, expected.data, rtol=1e-6, atol=atol)


class Names(TorchDispatchMode):
    """Notes the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def token_ids(device: torch.device | str = "cpu") -> torch.Tensor:
    return (torch.arange(40, device=device) * 7 % 300).reshape(2, 20)


def sampled_mask(device: torch.device | str = "cpu") -> torch.Tensor:
    """Rows that hold different numbers of sampled tokens [2, 20]."""
    position_T = torch.arange(20, device=device)
    return torch.stack([position_T > 8, position_T == 3])


# The pretend GPU


def test_an_operator_refuses_tensors_of_two_devices() -> None:
    with PretendGpu():
        there, here = torch.ones(3, device="cuda"), torch.ones(3)
        for mixed in (
            lambda: there + here,
            lambda: torch.where(here > 0, there, 0.0),
            lambda: torch.cat([there, here]),
            lambda: there.masked_fill(here > 0, 1.0),
            lambda: there.__iadd__(here),
            lambda: here.__setitem__(slice(2), there[:2] + here[:2]),
        ):
            with pytest.raises(WrongDeviceError, match="tensors of two devices"):
                mixed()
        with pytest.raises(RuntimeError, match="numpy"):
            there.numpy()
        assert (there * torch.tensor(2.0)).tolist() == [2.0, 2.0, 2.0], "a number may be anywhere"


def test_gradients_are_on_the_device_of_their_weights() -> None:
    layer = torch.nn.Linear(2, 3)
    with PretendGpu():
        moved = copy.deepcopy(layer).to("cuda")
        moved(torch.tensor([1.0, 2.0], device="cuda")).square().sum().backward()
        assert isinstance(moved.weight.grad, OnGpu)
        assert moved.weight.grad.device == GPU
    layer(torch.tensor([1.0, 2.0])).square().sum().backward()
    assert torch.equal(moved.weight.grad.within, layer.weight.grad)


def test_the_host_waits_for_numbers_sizes_and_copies() -> None:
    with PretendGpu() as gpu:
        row = torch.arange(3, device="cuda")
        row[row > 0], row[[0, 1]], row[:2], row + 1, row.sum()
        assert gpu.waits == {"mask": 1, "to gpu": 1}
        torch.ones(2).pin_memory().to("cuda", non_blocking=True)
        assert gpu.waits == {"mask": 1, "to gpu": 1}
        row[0].item(), row.cpu(), row.tolist(), bool(row.any()), row.nonzero(), row.unique()
        assert gpu.waits == {"mask": 1, "to gpu": 1, "item": 2, "to cpu": 2, "size": 2}


# Scoring and generation


def test_scores_and_their_gradients_are_those_of_the_cpu(tiny_model: LanguageModel) -> None:
    model = copy.deepcopy(tiny_model)
    expected = score_tokens(model, token_ids(), sampled_mask(), entropy_gradients=True)
    (expected.logprobs_BT.sum() + expected.entropy_BT.sum()).backward()
    with PretendGpu():
        moved = copy_on_gpu(tiny_model)
        actual = score_tokens(moved, token_ids(GPU), sampled_mask(GPU), entropy_gradients=True)
        (actual.logprobs_BT.sum() + actual.entropy_BT.sum()).backward()
    assert torch.equal(actual.logprobs_BT.within, expected.logprobs_BT)
    assert torch.equal(actual.entropy_BT.within, expected.entropy_BT)
    for left, right in zip(moved.model.parameters(), model.model.parameters(), strict=True):
        assert torch.equal(left.grad.within, right.grad)


def test_scores_in_pieces_wait_no_more_often_for_the_device(
    tiny_model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each way their numbers are those of the CPU."""
    waits, operators = [], []
    for num_targets in 12, 5:  # all, and pieces of 5, 5 and 2
        monkeypatch.setattr(language_model, "MAX_LOGITS", num_targets * tiny_model.vocabulary_size)
        model = copy.deepcopy(tiny_model)
        expected = score_tokens(model, token_ids(), sampled_mask())
        expected.logprobs_BT.sum().backward()
        with PretendGpu() as gpu:
            moved = copy_on_gpu(tiny_model)
            inputs = token_ids(GPU), sampled_mask(GPU)
            gpu.waits.clear()
            before = gpu.num_operators
            actual = score_tokens(moved, *inputs)
            actual.logprobs_BT.sum().backward()
            waits.append(Counter(gpu.waits))
            operators.append(gpu.num_operators - before)
        assert torch.equal(actual.logprobs_BT.within, expected.logprobs_BT)
        for left, right in zip(moved.model.parameters(), model.model.parameters(), strict=True):
            assert torch.equal(left.grad.within, right.grad)
    assert operators[1] > operators[0]
    assert waits[1] == waits[0]


def play(model: LanguageModel, *, temperature: float) -> list[tuple[int, float]]:
    """Two turns of two rows, the second of which is copied: tokens and log-probabilities."""
    engine = GenerationEngine(model, num_rows=3, capacity=80)
    rows = [engine.open_row(np.random.default_rng(seed)) for seed in range(2)]
    found = []
    with engine.rollout():
        for prompts in PROMPTS:
            found += respond(engine, rows, prompts, max_new_tokens=9, temperature=temperature)
        rows[1] = engine.copy_row(rows[1], np.random.default_rng(9))
        found += respond(engine, rows, [[1], [2]], max_new_tokens=9, temperature=temperature)
    return [pair for each in found for pair in zip(each.token_ids, each.logprobs, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_several_turns_are_those_of_the_cpu(tiny_model: LanguageModel, temperature: float) -> None:
    expected = play(tiny_model, temperature=temperature)
    with PretendGpu():
        actual = play(copy_on_gpu(tiny_model), temperature=temperature)
    assert [token for token, _ in actual] == [token for token, _ in expected]
    # A CPU reads one new token by another kernel.
    assert [each for _, each in actual] == pytest.approx([each for _, each in expected], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_pass_of_one_new_token_waits_for_its_result_alone(
    tiny_model: LanguageModel, temperature: float, deterministic: bool
) -> None:
    """Once for all rows. CUDA has no deterministic cumulative sum, so that it is the CPU's."""
    with PretendGpu() as gpu:
        engine = writing(copy_on_gpu(tiny_model))
        gpu.waits.clear()
        torch.use_deterministic_algorithms(deterministic)
        try:
            engine.step(temperature=temperature)
        finally:
            torch.use_deterministic_algorithms(False)
    assert gpu.waits == {"to cpu": 1}


def test_prompts_and_rows_that_move_wait_for_nothing_besides(tiny_model: LanguageModel) -> None:
    """Each pass waits for its tokens, and no copy in the cache waits."""
    as_ever = {"autospec": True, "side_effect": RaggedLayer.rearrange}
    with PretendGpu() as gpu, patch.object(RaggedLayer, "rearrange", **as_ever) as rearrange:
        engine = GenerationEngine(copy_on_gpu(tiny_model), num_rows=6, capacity=80)
        rows = [engine.open_row(np.random.default_rng(seed)) for seed in range(4)]
        gpu.waits.clear()
        for row in rows:
            engine.submit(row, [7, 8, 9], max_new_tokens=9 if row is rows[-1] else 1)
        engine.step(temperature=1.0)
        assert gpu.waits == {"to cpu": 1}, "prompts"
        engine.step(temperature=1.0)
        assert (rows[-1].slot, rearrange.call_count) == (0, len(engine.layers)), "it moved forward"
        assert gpu.waits == {"to cpu": 2}
        engine.submit(rows[0], list(range(20)), max_new_tokens=1)
        engine.step(temperature=1.0)
        gpu.waits.clear()
        begun = engine.open_row(np.random.default_rng(9))
        engine.submit(begun, [*rows[0].read, 3], max_new_tokens=1)
        engine.copy_row(rows[1], np.random.default_rng(9))
        engine.step(temperature=1.0)
        assert rearrange.call_count == 3 * len(engine.layers), "a prefix and a row were copied"
        assert gpu.waits == {"to cpu": 1}


def writing(model: LanguageModel) -> GenerationEngine:
    """Two rows that have one token of their responses."""
    engine = GenerationEngine(model, num_rows=2, capacity=200)
    for seed, prompt in enumerate(PROMPTS[0]):
        row = engine.open_row(np.random.default_rng(seed))
        engine.submit(row, prompt, max_new_tokens=90)
    engine.step(temperature=1.0)
    return engine


@pytest.mark.slow
def test_a_recorded_pass_is_started_as_one(tiny_model: LanguageModel) -> None:
    """Its kernels are not asked for again, until the cache moves."""
    operators, lengths = [], []
    with PretendGpu() as gpu:
        engine = writing(copy_on_gpu(tiny_model))
        for _ in range(70):
            before = gpu.num_operators
            engine.step(temperature=1.0)
            operators.append(gpu.num_operators - before)
            lengths.append(engine.layers[0].keys.shape[2])
    moved = lengths.index(128)
    assert lengths == [64] * moved + [128] * (70 - moved)
    steps = range(70)
    # Computed as ever, then recorded.
    computed = [step for step in steps if operators[step] > 3 * min(operators)]
    assert computed == [0, 1, moved, moved + 1]


@pytest.mark.slow
def test_prompts_of_many_rows_are_as_many_operators_as_those_of_two(
    tiny_model: LanguageModel,
) -> None:
    operators = []
    for num_rows in 2, 8:
        with PretendGpu() as gpu:
            engine = GenerationEngine(copy_on_gpu(tiny_model), num_rows=8, capacity=80)
            for seed in range(num_rows):
                row = engine.open_row(np.random.default_rng(seed))
                engine.submit(row, [5 + seed] * (1 + seed % 3), max_new_tokens=2)
            before = gpu.num_operators
            engine.step(temperature=1.0)
            operators.append(gpu.num_operators - before)
    assert operators[0] == operators[1]


@pytest.mark.slow
def test_weights_that_have_changed_are_those_of_the_next_rollout(tiny_model: LanguageModel) -> None:
    def play_twice(model: LanguageModel) -> list[float]:
        engine = GenerationEngine(model, num_rows=2, capacity=80)
        found = []
        for _ in range(2):
            with engine.rollout():
                row = engine.open_row(np.random.default_rng(0))
                (response,) = respond(engine, [row], [[5, 9]], max_new_tokens=9, temperature=0.0)
            found += response.logprobs
            with torch.no_grad():
                for parameter in model.model.parameters():
                    parameter.mul_(0.5)
        return found

    expected = play_twice(copy.deepcopy(tiny_model))
    with PretendGpu():
        assert play_twice(copy_on_gpu(tiny_model)) == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_a_recording_that_gives_other_numbers_is_found_at_load(tiny_model: LanguageModel) -> None:
    replay = Graph.replay

    def wrong(graph: Graph) -> None:
        replay(graph)
        graph.output.neg_()

    with PretendGpu():
        moved = copy_on_gpu(tiny_model)
        probe_conversation(moved)
        with (
            patch.object(Graph, "replay", wrong),
            pytest.raises(ModelError, match="sampling and training here compute different"),
        ):
            probe_conversation(moved)


@pytest.mark.slow
def test_a_model_that_cannot_be_recorded_plays_as_ever(tiny_model: LanguageModel) -> None:
    expected = play(tiny_model, temperature=0.0)
    hidden_states = LanguageModel.hidden_states

    def reading(model: LanguageModel, *arguments: torch.Tensor, **kwargs: object) -> torch.Tensor:
        assert int(arguments[0].max()) >= 0  # the host waits for a number, as some models do
        return hidden_states(model, *arguments, **kwargs)

    with (
        PretendGpu(),
        patch.object(LanguageModel, "hidden_states", reading),
        pytest.warns(UserWarning, match="cannot be recorded as CUDA graphs.*not permitted") as told,
    ):
        actual = play(copy_on_gpu(tiny_model), temperature=0.0)
    assert len(told) == 1
    assert [token for token, _ in actual] == [token for token, _ in expected]


# Updates and files


def supervised_update(model: LanguageModel, optimizer: Optimizer) -> tuple[object, float]:
    device = model.device
    batches = [
        SupervisedBatch(
            token_ids(device),
            sampled_mask(device),
            weights_BT=torch.linspace(0.1, 1.0, 40, device=device).reshape(2, 20),
            sampled_logprobs_BT=torch.full((2, 20), -3.0, device=device),
        )
    ]
    with seeded_torch(3, device=device):
        result = accumulate_supervised_gradients(model, batches, temperature=0.8)
    return result, optimizer.update(learning_rate=1e-2, max_grad_norm=0.5)


@pytest.mark.slow
def test_supervised_updates_and_a_checkpoint_are_those_of_the_cpu(
    tiny_model: LanguageModel, tmp_path: Path
) -> None:
    model = copy.deepcopy(tiny_model)
    optimizer = Optimizer(model.model, fused=False)
    expected = [supervised_update(model, optimizer) for _ in range(3)]
    position = Position("demonstrations", 2)
    with PretendGpu():
        moved = copy_on_gpu(tiny_model)
        moved_optimizer = Optimizer(moved.model, fused=False)
        actual = [supervised_update(moved, moved_optimizer) for _ in range(2)]
        save_checkpoint(
            tmp_path, position=position, model=moved.model, optimizer=moved_optimizer, keep=1
        )
        again = copy_on_gpu(tiny_model)
        assert load_latest_checkpoint(tmp_path, model=again.model) == position
        restored = Optimizer(again.model, fused=False)
        load_moments(tmp_path / position.name, restored)
        actual.append(supervised_update(again, restored))
        assert all(
            isinstance(value, OnGpu) or name.endswith("/step")
            for name, value in restored.state_tensors().items()
        )
    for (result, norm), (expected_result, expected_norm) in zip(actual, expected, strict=True):
        assert vars(result) == pytest.approx(vars(expected_result), rel=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-5)
    assert_same_weights(again.model, model.model)


def test_adamw_is_one_kernel_on_a_gpu_unless_told_otherwise() -> None:
    """It counts its steps there, and makes the update of a CPU."""
    layers = [torch.nn.Linear(3, 2) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    on_cpu, several = Optimizer(layers[0]), []
    with PretendGpu():
        moved = layers[1].to("cuda")
        on_gpu, apart = Optimizer(moved), Optimizer(moved, fused=False)
        counts = [each.state_tensors()["weight/step"] for each in (on_gpu, apart, on_cpu)]
        for layer, optimizer, device in ((layers[0], on_cpu, "cpu"), (moved, on_gpu, "cuda")):
            layer(torch.ones(3, device=device)).square().sum().backward()
            with Names() as names:
                optimizer.update(learning_rate=0.1, max_grad_norm=9.0)
            several.append("_fused_adamw_" in names.seen)
    assert [isinstance(each, OnGpu) for each in counts] == [True, False, False]
    assert several == [False, True]
    assert_same_weights(moved, layers[0])


# Steps of the trainer


def step_of(trainer: Trainer, trajectories: Sequence[Trajectory]) -> StepResult:
    """A step that trains on these episodes."""
    with patch.object(trainer.proxy, "rollout", lambda *_, **__: list(trajectories)):
        return trainer.step(0)


Played = Callable[[Trainer], list[Trajectory]]


@pytest.fixture(scope="module")
def played() -> Played:
    """The episodes of a step, with returns that differ.

    They are the same for all algorithms that play a task equally often, and played once a seed.
    """
    episodes: dict[tuple[int, int], list[Trajectory]] = {}

    def played(trainer: Trainer) -> list[Trajectory]:
        kind = trainer.config.algorithm.rollouts_per_task, trainer.config.seed
        if kind not in episodes:
            episodes[kind] = [
                with_return(each, float(number % 3))
                for number, each in enumerate(trainer.step(0).trajectories)
            ]
        return episodes[kind]

    return played


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "keys"),
    [
        ("apo", ["--algorithm.center_residuals=true"]),
        ("apo_turn", ["--algorithm.min_visits=1", "--algorithm.center_residuals=true"]),
        ("apo_turn", ["--values.estimator=regression", "--algorithm.fit_values=true"]),
        (
            "ppo",
            [
                # In the minibatches of seed 0 a key's bias has a gradient near 0, whose rounding
                # AdamW makes an update of its own.
                "--seed=1",
                "--algorithm.num_minibatches=2",
                "--algorithm.kl_in=reward",
                "--algorithm.kl_coefficient=0.01",
                "--algorithm.bi_level_gae=true",
            ],
        ),
        ("grpo", ["--algorithm.kl_coefficient=0.01", "--rollout_filter.strategy=top_p"]),
    ],
)
@pytest.mark.usefixtures("few_random_features", "fewest_passes")
def test_a_step_is_that_of_the_cpu(
    session: Session, played: Played, algorithm: str, keys: list[str]
) -> None:
    trajectories = played(trainer_of(session, algorithm, *keys))
    on_cpu = trainer_of(session, algorithm, *keys)
    expected = step_of(on_cpu, trajectories)
    with PretendGpu():
        on_gpu = trainer_of(replace(session, device=torch.device("cuda")), algorithm, *keys)
        before = [each.within.clone() for each in on_gpu.policy.model.parameters()]
        actual = step_of(on_gpu, trajectories)
    # AdamW divides a gradient by its size, so where it is nearly 0 its rounding is an update's.
    assert_same_weights(on_gpu.policy.model, on_cpu.policy.model, atol=1e-6)
    moved = zip(on_gpu.policy.model.parameters(), before, strict=True)
    assert any(not torch.equal(after.within, each) for after, each in moved)
    without_clock = [
        {name: value for name, value in each.metrics.items() if not name.endswith("seconds")}
        for each in (actual, expected)
    ]
    assert without_clock[0] == pytest.approx(without_clock[1], rel=1e-5, abs=1e-7)
    assert actual.kept_episodes == expected.kept_episodes


def waits_of_a_step(
    session: Session,
    algorithm: str,
    trajectories: list[Trajectory],
    *others: str,
    micro_batch_size: int,
) -> Counter[str]:
    keys = [f"--training.micro_batch_size={micro_batch_size}", "--monitors.every_steps=null"]
    keys += others
    with PretendGpu() as gpu:
        trainer = trainer_of(replace(session, device=torch.device("cuda")), algorithm, *keys)
        gpu.waits.clear()
        step_of(trainer, trajectories)
    return gpu.waits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "others"),
    [
        *((name, []) for name in ("apo", "apo_turn", "oapl", "ppo", "grpo", "gigpo")),
        ("apo_turn", ["--values.estimator=regression"]),
    ],
)
@pytest.mark.usefixtures("few_random_features")
def test_no_micro_batch_waits_for_the_device(
    session: Session, played: Played, algorithm: str, others: list[str]
) -> None:
    """Of four times as many as one update needs, none does; a step does some times."""
    episodes = played(trainer_of(session, algorithm))
    whole, in_parts = (
        waits_of_a_step(session, algorithm, episodes, *others, micro_batch_size=size)
        for size in (len(episodes), len(episodes) // 4)
    )
    assert whole["to cpu"] > 0
    assert in_parts == whole


def test_several_samples_of_an_episode_are_moved_into_rows_without_waiting() -> None:
    """Two samples of one episode, as a window makes them that has moved."""
    sampled = [[False, True, True], [False, False, True]]
    samples = [TrainingSample((5, 6, 7), tuple(mask), (0.0,) * 3) for mask in sampled]
    device = torch.device("cuda")
    with PretendGpu() as gpu:
        rows = collate([row_of(samples)], pad_id=0, device=device)
        micro = MicroBatch(
            rows=torch.zeros(1, dtype=torch.int64, device=device),
            samples=collate(samples, pad_id=0, device=device),
            targets_ML=loss_mask_of(samples, num_positions=3),
            tokens=rows,
            old_logprobs_BT=rows.sampled_logprobs_RT,
            reference_logprobs_BT=rows.sampled_logprobs_RT,
            num_sequences=1,
            num_tokens=3,
        )
        values_ML = torch.tensor([[9.0, 1.0, 2.0], [9.0, 9.0, 3.0]], device=device)
        gpu.waits.clear()
        found = micro.in_rows(values_ML)
        assert not gpu.waits
        assert found.tolist() == [[0.0, 1.0, 2.0, 3.0]]
