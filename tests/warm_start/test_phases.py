import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from ragen_apo.agent.assembly import build_context
from ragen_apo.agent.scripted import with_tokens
from ragen_apo.config.warm_start import CopyConfig
from ragen_apo.environments.base import Reply
from ragen_apo.environments.human.play import play
from ragen_apo.environments.human.recordings import Recording, append_recording
from ragen_apo.files import read_json_lines
from ragen_apo.plural import counted
from ragen_apo.policy.tokenizer import SPECIAL_TOKENS, train_tokenizer
from ragen_apo.progress import SilentProgress
from ragen_apo.session import Session
from ragen_apo.training.checkpoint import Position
from ragen_apo.types import StopReason, Task, TrainingSample, Trajectory, training_samples
from ragen_apo.warm_start import phases as supervised
from ragen_apo.warm_start.batches import (
    copy_batch,
    copyable_token_ids,
    number_token_ids,
    phrase_token_ids,
    play_demonstrations,
    play_for_tokenizer,
    relabel,
)
from ragen_apo.warm_start.phases import copy_phase, demonstrations_phase
from ragen_apo.warm_start.supervised import (
    SupervisedBatch,
    accumulate_supervised_gradients,
    run_supervised_phase,
)
from tests import factories
from tests.factories import Sayings, with_keys, with_progress

CONFIG = CopyConfig(batch_size=16, sequence_length=20)
TOKEN_IDS = range(100, 1100)


def batch(*, seed: int = 0, step: int = 0) -> SupervisedBatch:
    return copy_batch(CONFIG, token_ids=TOKEN_IDS, seed=seed, step=step)


def test_the_targets_of_a_copy_batch_are_exactly_the_repeats() -> None:
    drawn = batch()
    periods = []
    for tokens, targets in zip(
        drawn.token_ids_BT.tolist(), drawn.target_mask_BT.tolist(), strict=True
    ):
        period = targets.index(True)
        assert targets == [index >= period for index in range(20)]
        assert all(tokens[index] == tokens[index - period] for index in range(period, 20))
        periods.append(period)
    assert min(periods) >= 2
    assert max(periods) <= 10
    assert len(set(periods)) > 3
    assert set(drawn.token_ids_BT.flatten().tolist()) <= set(TOKEN_IDS)


def test_rows_of_a_copy_batch_have_small_and_large_alphabets() -> None:
    config = CopyConfig(batch_size=256, sequence_length=64)
    rows = copy_batch(config, token_ids=TOKEN_IDS, seed=0, step=0).token_ids_BT.tolist()
    sizes = [len(set(row[:32])) for row in rows]
    assert sum(size <= 6 for size in sizes) > 10
    assert sum(size > 20 for size in sizes) > 25


def test_a_copy_batch_is_a_function_of_seed_and_step() -> None:
    assert torch.equal(batch(seed=1, step=2).token_ids_BT, batch(seed=1, step=2).token_ids_BT)
    for other in (batch(seed=1, step=3), batch(seed=2, step=2)):
        assert not torch.equal(batch(seed=1, step=2).token_ids_BT, other.token_ids_BT)


def test_tokens_of_the_chat_template_are_not_copied(session: Session) -> None:
    model = session.load_model(session.run.initial)
    token_ids = copyable_token_ids(model)
    template = set(model.tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)))
    assert len(template) == len(SPECIAL_TOKENS)
    assert set(token_ids) | template == set(range(len(model.tokenizer)))
    assert not set(token_ids) & template


def test_demonstrations_are_the_same_for_the_same_seed_and_of_training_tasks(
    session: Session,
) -> None:
    tasks = session.environments.tasks("train")
    teacher = session.environments.scripted_policies()["teacher"]
    first, again, other = (
        play_demonstrations(
            teacher, session.environments, None, tasks, num_episodes_per_task=2, seed=seed
        )
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
    assert [episode.task for episode in first] == [task for task in tasks for _ in range(2)]
    assert {episode.task.split for episode in first} == {"train"}


@pytest.mark.parametrize(
    ("key", "cuts_off"),
    [
        ("--agent.context={mode: full}", False),
        ("--agent.context={mode: last_turns, num_turns: 1}", False),
        ("--agent.max_context_tokens=110", True),
    ],
)
def test_what_was_played_for_the_tokenizer_is_what_is_imitated(
    session: Session, key: str, cuts_off: bool
) -> None:
    model, told = session.load_model(session.run.initial), with_keys(session, key)
    context = build_context(told.config.agent, model, told.environments)
    settings, teacher = told.config.warm_start.demonstrations, told.environments.scripted_policies()
    played = play_for_tokenizer(settings, told.environments, seed=told.config.seed)
    expected = play_demonstrations(
        teacher[settings.teacher],
        told.environments,
        context,
        told.environments.tasks("train"),
        num_episodes_per_task=settings.num_episodes_per_task,
        seed=told.config.seed,
    )
    cut = [each.stop_reason is StopReason.CONTEXT_LIMIT for each in expected]
    assert any(cut) is cuts_off
    assert [with_tokens(each, context) for each in played] == [
        replace(each, metrics={}) if is_cut else each
        for each, is_cut in zip(expected, cut, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("is_warm", [True, False])
def test_a_run_plays_its_demonstrations_once_and_counts_their_seconds_as_such(
    is_warm: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases: list[str] = []
    timed: list[set[str]] = []

    def train(*texts: Any, **options: Any) -> PreTrainedTokenizerFast:
        timed.append(set(json.loads((tmp_path / "run" / "run.json").read_text()).get("phases", {})))
        return train_tokenizer(*texts, **options)

    monkeypatch.setattr("ragen_apo.stages.pipeline.train_tokenizer", train)

    class Phases(SilentProgress):
        def start(self, phase: str, total: int) -> None:
            phases.append(phase)

    keys = () if is_warm else ("--warm_start.enabled=false",)
    factories.run(factories.config(*keys), tmp_path / "run", progress=Phases())
    assert (phases.count("tokenizer"), phases.count("teacher")) == (1, 0)
    assert timed == [{"loading", "demonstrations"} if is_warm else set()]


def test_the_console_hears_how_many_demonstrations_are_played(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[str | int, ...]] = []
    monkeypatch.setattr(session.progress, "start", lambda *phase: heard.append(phase))
    monkeypatch.setattr(session.progress, "update", lambda done, note="": heard.append((done,)))
    demonstrations_phase(session, session.load_model(session.run.initial))
    settings = session.config.warm_start.demonstrations
    number = len(session.environments.tasks("train")) * settings.num_episodes_per_task
    assert heard == [("teacher", number), *((done,) for done in range(1, number + 1))]


def test_a_phase_has_the_same_batch_at_the_same_step(session: Session) -> None:
    model = session.load_model(session.run.initial)
    for make_phase in (copy_phase, demonstrations_phase):
        left, right = make_phase(session, model).batch(7), make_phase(session, model).batch(7)
        for one, two in zip(left, right, strict=True):
            assert torch.equal(one.token_ids_BT, two.token_ids_BT)
            assert torch.equal(one.target_mask_BT, two.target_mask_BT)


def test_demonstrations_train_on_the_teachers_responses_only(session: Session) -> None:
    model = session.load_model(session.run.initial)
    for part in demonstrations_phase(session, model).batch(0):
        for tokens, targets in zip(part.token_ids_BT, part.target_mask_BT, strict=True):
            text = model.tokenizer.decode(tokens[targets], skip_special_tokens=False)
            assert text.startswith("<think>")
            assert text.endswith("</answer>")
            assert "TASK" not in text
            assert "<|user|>" not in text


def record_episodes(session: Session, path: Path) -> None:
    """A person searches until there are no turns left, once for each of four tasks."""
    for task in session.environments.tasks("train")[:4]:
        environment, _ = session.environments.start(task, seed=0)
        typed = iter(["search mug", "search blue", "dance"])
        episode = play(
            environment, task, read=lambda _, typed=typed: next(typed), write=lambda text: None
        )
        assert episode.final_observation != episode.turns[-1].observation
        version = session.environments.properties.version
        append_recording(path, Recording(version, 0, episode))


@pytest.mark.parametrize("recorded", [False, True])
def test_a_demonstration_that_does_not_fit_ends_early_and_this_is_said(
    recorded: bool, session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if recorded:
        record_episodes(session, tmp_path / "mine.jsonl")
    model = session.load_model(session.run.initial)

    def demonstrated(max_context_tokens: int, notes: Sayings) -> list[Trajectory]:
        keys = [f"--agent.max_context_tokens={max_context_tokens}", "--agent.max_response_tokens=1"]
        if recorded:
            keys.append(f"--warm_start.demonstrations.recordings={tmp_path / 'mine.jsonl'}")
        told = with_progress(with_keys(session, *keys), notes)
        used: list[Trajectory] = []
        with monkeypatch.context() as patch:
            patch.setattr(
                supervised, "training_samples", lambda t: used.append(t) or training_samples(t)
            )
            demonstrations_phase(told, model)
        return used

    notes = Sayings()
    whole = demonstrated(512, notes)
    assert not any("context was full" in sentence for sentence in notes.lines)
    lengths = [len(training_samples(episode)[0].token_ids) for episode in whole]
    capacity = max(lengths) - 1
    num_longest = lengths.count(max(lengths))
    for episode, full in zip(demonstrated(capacity, notes), whole, strict=True):
        assert len(training_samples(episode)[0].token_ids) <= capacity
        if episode != full:
            assert episode.stop_reason is StopReason.CONTEXT_LIMIT
            assert episode.turns == full.turns[:-1]
            num_longest -= 1
    assert num_longest == 0
    fewest = (
        min(
            len(each.turns) for each in whole if len(training_samples(each)[0].token_ids) > capacity
        )
        - 1
    )
    num_cut = lengths.count(max(lengths))
    early = f"{num_cut} of {len(whole)}, after {counted(fewest, 'turn')} or more"
    assert f"because the context was full: {early}. " in notes.lines[-1]
    assert f"max_context_tokens is {capacity}: raise it" in notes.lines[-1]


def test_responses_that_the_policy_could_not_write_are_counted(session: Session) -> None:
    model = session.load_model(session.run.initial)

    def said(max_response_tokens: int) -> list[str]:
        notes = Sayings()
        short = with_keys(session, f"--agent.max_response_tokens={max_response_tokens}")
        demonstrations_phase(with_progress(short, notes), model)
        return [sentence for sentence in notes.lines if "demonstrated responses" in sentence]

    assert said(200) == []
    (all_of_them,) = said(1)
    num_long, num_all, longest = re.findall(r"\d+", all_of_them)[:3]
    assert num_long == num_all
    (longest_only,) = said(int(longest) - 1)
    assert 0 < int(re.findall(r"\d+", longest_only)[0]) < int(num_all)
    assert said(int(longest)) == []


@pytest.mark.parametrize("action", [None, "search mug"])
def test_a_teacher_that_solves_nothing_is_named(
    action: str | None, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Searches:
        def begin(self, task: Task, *, seed: int) -> None: ...

        def act(self, observation: str) -> Reply:
            return Reply("look", str(action))

    if action:
        policies = {"teacher": Searches}
        monkeypatch.setattr(session.environments, "scripted_policies", lambda: policies)
    notes = Sayings()
    demonstrations_phase(with_progress(session, notes), session.load_model(session.run.initial))
    said = [line for line in notes.lines if "failures are imitated" in line]
    assert [re.sub(r"\d+", "N", line)[:61] for line in said] == (
        ["The teacher (teacher) solved none of its N demonstrations, so"] if action else []
    )


def test_demonstrations_whose_action_no_one_could_read_are_counted(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They teach a form of answer that earns the format penalty."""

    class Quotes:
        is_mistake = False

        def begin(self, task: Task, *, seed: int) -> None: ...

        def act(self, observation: str) -> Reply:
            return Reply("look", "search '</answer>'", is_mistake=self.is_mistake)

    class Errs(Quotes):
        is_mistake = True

    model = session.load_model(session.run.initial)
    for teacher, says in ((Quotes, True), (Errs, False)):
        monkeypatch.setattr(
            session.environments, "scripted_policies", lambda made=teacher: {"teacher": made}
        )
        notes = Sayings()
        demonstrations_phase(with_progress(session, notes), model)
        said = [line for line in notes.lines if "no action can be read" in line]
        assert len(said) == says
        if says:
            assert "search '</answer>'" in said[0]
            num_unreadable, num_all = re.findall(r"\d+", said[0])[:2]
            assert num_unreadable == num_all


def test_the_supervised_gradient_does_not_depend_on_how_a_batch_is_cut(session: Session) -> None:
    model = session.load_model(session.run.reference(0))
    ids = torch.randint(8, 200, (6, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(12)[None, :] >= torch.tensor([[2], [3], [5], [7], [9], [11]])
    gradients, results = [], []
    for size in (6, 2):
        model.model.zero_grad()
        parts = [
            SupervisedBatch(ids[start : start + size], mask[start : start + size])
            for start in range(0, 6, size)
        ]
        results.append(accumulate_supervised_gradients(model, parts))
        gradients.append(torch.cat([p.grad.flatten() for p in model.model.parameters()]))
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-6)
    assert results[0].accuracy == results[1].accuracy
    # The mean over targets of -log p, computed from the whole model's own logits.
    with torch.no_grad():
        logprobs = model.model(input_ids=ids).logits.log_softmax(-1)
    chosen = logprobs[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)[mask[:, 1:]]
    assert results[0].loss == pytest.approx(-chosen.mean().item(), rel=1e-5)


@pytest.mark.slow
def test_no_checkpoint_is_written_twice(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[str] = []

    def save(directory: Path, *, position: Position, **_: object) -> None:
        saved.append(position.name)

    monkeypatch.setattr("ragen_apo.warm_start.supervised.save_checkpoint", save)
    model = session.load_model(session.run.initial)
    phase = demonstrations_phase(session, model)
    run_supervised_phase(session, model, phase, start=0)
    assert saved == [f"2-demonstrations-0000{step}" for step in (10, 20, 30, 40)]


@pytest.mark.slow
def test_copying_ends_once_it_is_as_accurate_as_asked_for(session: Session) -> None:
    keys = ("--warm_start.copy.target_accuracy=0.5", "--warm_start.copy.max_steps=500")
    patient = with_keys(session, *keys)
    model = session.load_model(session.run.initial)
    phase = copy_phase(patient, model)
    first = phase.batch(0)  # one batch again and again is soon known by heart
    phase = replace(phase, batch=lambda _: first, peak_learning_rate=3e-3)
    run_supervised_phase(patient, model, phase, start=0)
    last = read_json_lines(session.run.warm_start)[-1]
    assert last["phase"] == "copy" and last["step"] < 500
    assert last["accuracy"] >= 0.5


@pytest.mark.slow
@pytest.mark.parametrize("has_dropout", [True, False])
def test_dropout_acts_unless_the_phase_has_none(session: Session, has_dropout: bool) -> None:
    """What is distilled was sampled without it."""
    model = session.load_model(session.run.initial)
    modes: set[bool] = set()
    model.model.register_forward_pre_hook(lambda module, _: modes.add(module.training))
    model.model.base_model.register_forward_pre_hook(lambda module, _: modes.add(module.training))
    phase = replace(copy_phase(session, model), num_steps=2, has_dropout=has_dropout)
    run_supervised_phase(session, model, phase, start=0)
    assert modes == {has_dropout}


def test_the_curves_have_both_phases_in_order(finished_run: Path) -> None:
    rows = read_json_lines(finished_run / "warm_start.jsonl")
    assert [(row["phase"], row["step"]) for row in rows] == [
        *(("copy", step) for step in (10, 12)),
        *(("demonstrations", step) for step in (10, 20, 30, 40)),
    ]
    losses = [row["loss"] for row in rows if row["phase"] == "demonstrations"]
    assert np.diff(losses).max() < 0.5
    assert losses[-1] < losses[0] - 1


def test_relabelled_numbers_stay_the_same_number_within_an_episode_and_nothing_else_moves() -> None:
    numbers = [10, 11, 12, 13, 14, 15, 16, 17]
    sample = TrainingSample(
        token_ids=(1, 10, 2, 11, 3, 10, 4),
        loss_mask=(False, False, False, False, True, True, True),
        logprobs=(0.0,) * 7,
    )
    seen = set()
    for step in range(20):
        ((changed,),) = relabel([[sample]], token_ids=numbers, seed=0, step=step)
        ids = changed.token_ids
        assert [ids[index] for index in (0, 2, 4, 6)] == [1, 2, 3, 4]
        assert ids[1] == ids[5] != ids[3]
        assert {ids[1], ids[3]} <= set(numbers)
        assert changed.loss_mask == sample.loss_mask
        assert relabel([[sample]], token_ids=numbers, seed=0, step=step) == [[changed]]
        seen.add(ids[1])
    assert len(seen) > 4, "the same number gets other names in other steps"


def test_a_share_of_the_samples_is_relabelled() -> None:
    numbers = list(range(10, 40))
    samples = [[TrainingSample((1, 10, 11, 12, 13), (True,) * 5, (0.0,) * 5)]] * 200
    changed = relabel(samples, token_ids=numbers, share=0.3, seed=0, step=0)
    num_changed = sum(new != old for new, old in zip(changed, samples, strict=True))
    assert 30 <= num_changed <= 90  # mean 60, standard deviation 6.5
    assert samples[0] not in relabel(samples, token_ids=numbers, seed=0, step=0)


@pytest.mark.slow
def test_keys_say_which_share_of_the_demonstrations_is_relabelled_and_what_it_spares(
    session: Session,
) -> None:
    model = session.load_model(session.run.initial)

    def rows(*keys: str) -> list[list[int]]:
        """The demonstrations of the first step, in the order in which they were drawn."""
        written = [f"--warm_start.demonstrations.{key}" for key in ("batch_size=24", *keys)]
        told = with_keys(session, *written, "--training.micro_batch_size=24")
        batches = demonstrations_phase(told, model).batch(0)
        return [row for batch in batches for row in batch.token_ids_BT.tolist()]

    plain = rows()
    changed = {
        share: sum(a != b for a, b in zip(plain, rows("relabel=copied", share), strict=True))
        for share in ("relabel_share=1", "relabel_share=0.3")
    }
    assert 0 < changed["relabel_share=0.3"] < changed["relabel_share=1"] == 24
    exchanged = {
        spares: sum(
            sum(np.not_equal(a, b))
            for a, b in zip(plain, rows("relabel=copied", spares), strict=True)
        )
        for spares in ("relabel_spares=1", "relabel_spares=0.1")
    }
    assert 0 < exchanged["relabel_spares=0.1"] < exchanged["relabel_spares=1"]


def demonstration_of(*parts: tuple[str, bool]) -> list[TrainingSample]:
    """One context of one token a word; a word is known by its first letter."""
    words = [(word, is_said) for text, is_said in parts for word in text.split()]
    sample = TrainingSample(
        token_ids=tuple(ord(word[0]) for word, _ in words),
        loss_mask=tuple(is_said for _, is_said in words),
        logprobs=(0.0,) * len(words),
    )
    return [sample]


def test_phrases_are_what_is_common_and_what_is_said_unread() -> None:
    samples = [
        demonstration_of(("task red", False), ("click red", True)),
        demonstration_of(("task blue", False), ("click blue", True)),
        demonstration_of(("task green lime", False), ("has no green", True)),
        demonstration_of(("task yellow", False), ("has yellow", True), ("odd", False)),
        demonstration_of(("task violet", False), ("has no violet", True)),
    ]
    # t is in every sample; c, h and n are said unread
    assert phrase_token_ids(samples, share=0.95) == set(map(ord, "tchn"))
    assert phrase_token_ids([], share=0.95) == set()


def test_a_name_that_most_demonstrations_have_is_no_phrase() -> None:
    """Single letters, `large` and `color` are in most pages of a shop, and have to be copied."""
    black, white = (
        demonstration_of(("task b", False), ("say b", True)),
        demonstration_of(("task w", False)),
    )
    assert phrase_token_ids([*[black] * 90, *[white] * 10], share=0.95) == set(map(ord, "ts"))
    assert phrase_token_ids([*[black] * 90, *[white] * 10], share=0.9) == set(map(ord, "tsb"))
    assert phrase_token_ids([*[black] * 96, *[white] * 4], share=0.95) == set(map(ord, "tsb"))


def test_a_name_that_is_seldom_said_unread_is_no_phrase() -> None:
    read = [
        demonstration_of((f"task {letter}", False), (f"say {letter}", True)) for letter in "abc"
    ]
    unread = demonstration_of(("task", False), ("say a", True))
    assert ord("a") not in phrase_token_ids([*read * 400, unread], share=0.95)
    assert ord("a") in phrase_token_ids([*read * 100, unread], share=0.95)


def test_number_tokens_are_the_ids_of_the_shop(tiny_model) -> None:
    numbers = number_token_ids(tiny_model)
    texts = [tiny_model.tokenizer.decode([token]) for token in numbers]
    assert all(text.isdecimal() for text in texts)
    assert {"1", "42"} <= set(texts)
