"""The batches of the copy curriculum and of the demonstrations.

1. Copy curriculum. Shopping is copying: words of the task into the search, ids of the page into the
   action. A model from nothing forms that circuit (induction heads) in a sudden transition, quickly
   on tiled random segments and very slowly on demonstrations alone, so copying comes first.
2. Demonstrations. Supervised training on episodes of a scripted teacher, at its responses only.

Both phases are plain next-token training. A batch is a function of (seed, phase, step), so a
resumed phase sees the batches it would have seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from ragen_apo.agent.context import ContextManager
from ragen_apo.agent.environment_manager import EnvironmentManager
from ragen_apo.agent.proxy import EpisodeRequest
from ragen_apo.agent.scripted import play_scripted_episodes
from ragen_apo.choices import Relabel
from ragen_apo.config.warm_start import CopyConfig, DemonstrationsConfig
from ragen_apo.distributed.ranks import ALONE, Ranks
from ragen_apo.environments.base import ScriptedPolicy
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.policy.tokenizer import TAGS
from ragen_apo.progress import Progress, SilentProgress
from ragen_apo.seeding import derive_seed, generator
from ragen_apo.training.batching import collate, micro_batches, pass_cost
from ragen_apo.types import Task, TrainingSample, Trajectory
from ragen_apo.warm_start.supervised import SupervisedBatch

SMALLEST_ALPHABET = 4
"""Different tokens in a row of the copy curriculum, at least."""
UNREAD_EXCEPTIONS = 0.001
"""In which share of the demonstrations a token that is a name may be said unread."""

Demonstration = Sequence[TrainingSample]
"""The contexts of an episode: one, or with windows one for each turn."""


def copy_batch(
    config: CopyConfig, *, token_ids: Sequence[int], seed: int, step: int
) -> SupervisedBatch:
    """Rows of a random segment repeated to the end; targets are the repeats.

    Each row has its own period between 2 and half the length, so the distance to copy over varies.
    Each row also has its own alphabet, from 4 tokens up to all of them. With few tokens, a single
    token does not say where to copy from; only the last two or three tokens together do.
    """
    draws = generator(seed, "copy-curriculum", step)
    rows, length = config.batch_size, config.sequence_length
    vocabulary = np.asarray(token_ids, dtype=np.int64)
    periods = draws.integers(2, length // 2, size=rows, endpoint=True)
    smallest = min(SMALLEST_ALPHABET, len(vocabulary))
    log_sizes = draws.uniform(np.log(smallest), np.log(len(vocabulary)), size=(rows, 1))
    alphabets = vocabulary[draws.integers(0, len(vocabulary), size=(rows, length))]
    num_letters = np.minimum(np.exp(log_sizes).astype(np.int64), length)
    letters = draws.integers(0, num_letters, size=(rows, length))
    segments = np.take_along_axis(alphabets, letters, axis=1)
    indices = np.arange(length)[None, :] % periods[:, None]
    token_ids_BT = np.take_along_axis(segments, indices, axis=1)
    target_mask_BT = np.arange(length)[None, :] >= periods[:, None]
    return SupervisedBatch(torch.from_numpy(token_ids_BT), torch.from_numpy(target_mask_BT))


def copyable_token_ids(model: LanguageModel) -> list[int]:
    """Every token id that ordinary text can have, our tags among them, and that has an embedding.

    Tokens that were added to a tokenizer are those of a chat template, or mean an end of the text.
    """
    added = model.tokenizer.added_tokens_decoder.items()
    no_text = {index for index, token in added if token.content not in TAGS}
    size = min(len(model.tokenizer), model.vocabulary_size)
    return [index for index in range(size) if index not in no_text]


def number_token_ids(model: LanguageModel) -> list[int]:
    """The tokens that are nothing but digits."""
    vocabulary = model.tokenizer.get_vocab()
    return sorted(index for token, index in vocabulary.items() if token.isdecimal())


def phrase_token_ids(demonstrations: Sequence[Demonstration], *, share: float) -> set[int]:
    """The tokens of these demonstrations that are no names: those of what is always said and read.

    They are in at least this share of the demonstrations, or are said without having been read, but
    for a few exceptions. What else is said was read before, and only that it is the same matters.
    """
    num_with: Counter[int] = Counter()
    num_unread: Counter[int] = Counter()
    for samples in demonstrations:
        seen: set[int] = set()
        unread: set[int] = set()
        for sample in samples:
            read: set[int] = set()
            for token, is_said in zip(sample.token_ids, sample.loss_mask, strict=True):
                if is_said and token not in read:
                    unread.add(token)
                read.add(token)
            seen |= read
        num_with.update(seen)
        num_unread.update(unread)
    few = UNREAD_EXCEPTIONS * len(demonstrations)
    return {
        token
        for token, number in num_with.items()
        if number >= share * len(demonstrations) or num_unread[token] > few
    }


def renamed_token_ids(
    model: LanguageModel,
    demonstrations: Sequence[Demonstration],
    *,
    relabel: Relabel,
    spares: float,
) -> list[int]:
    """The tokens to exchange for each other in these; none to leave them as they are.

    With `copied`, a token that the share `spares` of the demonstrations have keeps its meaning.
    """
    if relabel == "none":
        return []
    if relabel == "numbers":
        return number_token_ids(model)
    phrases = phrase_token_ids(demonstrations, share=spares)
    return [token for token in copyable_token_ids(model) if token not in phrases]


def relabel(
    demonstrations: Sequence[Demonstration],
    *,
    token_ids: Sequence[int],
    share: float = 1.0,
    seed: int,
    step: int,
) -> list[Demonstration]:
    """These, a share of them with the given tokens permuted, each in its own way throughout.

    If tokens are names, a relabelled demonstration is as correct as the original. But only copying
    the names from the page is right in every one. A policy that has learned to copy can also name
    what no demonstration named.
    """
    draws = generator(seed, "relabelled-numbers", step)
    permuted = np.asarray(token_ids)
    relabelled: list[Demonstration] = []
    for samples in demonstrations:
        if share < 1 and draws.random() >= share:
            relabelled.append(samples)
            continue
        names = dict(zip(token_ids, draws.permutation(permuted).tolist(), strict=True))
        relabelled.append([_renamed(sample, names) for sample in samples])
    return relabelled


def _renamed(sample: TrainingSample, names: Mapping[int, int]) -> TrainingSample:
    token_ids = tuple(names.get(token, token) for token in sample.token_ids)
    return replace(sample, token_ids=token_ids)


def sample_batches(
    samples: Sequence[TrainingSample],
    *,
    size: int,
    pad_id: int,
    device: torch.device,
    weights: Sequence[Sequence[float]] | None = None,
    ranks: Ranks = ALONE,
) -> list[SupervisedBatch]:
    """One update's samples, this rank's share, in parts of at most `size`, of similar length.

    `weights` has one for each token of each sample; a weight of 0 makes it no target.
    """
    batches = []
    alone = [(sample,) for sample in samples]
    cost = pass_cost(device, sharded=ranks.sharded)
    for rows in micro_batches(alone, size=size, pass_cost=cost, share=ranks.share):
        tokens = collate([samples[row] for row in rows], pad_id=pad_id, device=device)
        batch = SupervisedBatch(tokens.token_ids_RT, tokens.loss_mask_RT)
        if weights is not None:
            padded = np.zeros(tuple(tokens.token_ids_RT.shape), dtype=np.float32)
            for index, row in enumerate(rows):
                padded[index, : len(weights[row])] = weights[row]
            weights_BT = torch.from_numpy(padded).to(device)
            batch = SupervisedBatch(
                tokens.token_ids_RT,
                tokens.loss_mask_RT & (weights_BT > 0),
                weights_BT=weights_BT,
                sampled_logprobs_BT=tokens.sampled_logprobs_RT,
            )
        batches.append(batch)
    return batches


def play_demonstrations(
    make_teacher: Callable[[], ScriptedPolicy],
    environments: EnvironmentManager,
    context: ContextManager | None,
    tasks: Sequence[Task],
    *,
    num_episodes_per_task: int,
    seed: int,
    progress: Progress | None = None,
    phase: str = "teacher",
) -> list[Trajectory]:
    """The teacher's episodes on the given tasks, the same for the same seed."""
    progress = progress or SilentProgress()
    requests = [
        EpisodeRequest(task, derive_seed(seed, "demonstration", task.task_id, repeat))
        for task in tasks
        for repeat in range(num_episodes_per_task)
    ]
    progress.start(phase, len(requests))
    return play_scripted_episodes(
        make_teacher,
        environments,
        requests,
        policy_version="teacher",
        context=context,
        on_finished=progress.update,
    )


def play_for_tokenizer(
    settings: DemonstrationsConfig,
    environments: EnvironmentManager,
    *,
    seed: int,
    progress: Progress | None = None,
) -> list[Trajectory]:
    """What the agent will read and write: demonstrations without their tokens."""
    policies = environments.scripted_policies()
    return play_demonstrations(
        policies[settings.teacher if settings.teacher in policies else "random"],
        environments,
        None,
        environments.tasks("train"),
        num_episodes_per_task=settings.num_episodes_per_task,
        seed=seed,
        progress=progress,
        phase="tokenizer",
    )


def texts_of(trajectories: Sequence[Trajectory]) -> list[str]:
    """All that is read and written in them, for a tokenizer."""
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    texts = [text for turn in turns for text in (turn.observation, turn.response)]
    return texts + [trajectory.final_observation for trajectory in trajectories]
