"""Searches against every way that a small episode can go, and with a real engine."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from ragen_apo.agent.context import ContextManager, ContextWindow, TokenLimits
from ragen_apo.agent.environment_manager import EnvironmentManager
from ragen_apo.agent.proxy import AgentProxy, EpisodeRequest
from ragen_apo.agent.search import MoveInContext, MovePredictor, SearchedEpisode, TurnSearch
from ragen_apo.config.search import SearchConfig
from ragen_apo.environments.base import TextEnvironment, make_environment
from ragen_apo.environments.questions.with_tools import questions_with_tools
from ragen_apo.errors import ConfigError
from ragen_apo.policy.engine import Response
from ragen_apo.policy.generation import GenerationEngine
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.seeding import generator
from ragen_apo.types import Task, TurnFlag, training_samples
from ragen_apo.values.moves import Move, move_advantages
from tests import factories

ACTIONS = ("Down", "Right")
MAX_TURNS = 6
ALL = 2**MAX_TURNS
MANY = 32
"""Candidates of which, in these tests, some do each action."""
CAPACITY = 1024
ALL_BUT_ONE_TURN = 260
"""Tokens with which the context is full before the last turn."""
LAKE = {"slippery": False, "size": 4, "max_turns": MAX_TURNS, "num_train_tasks": 4}
Path = tuple[str, ...]


def probability(path: Path, action: str) -> float:
    """Of an action after those before it, between 0.25 and 0.75."""
    down = 0.25 + 0.5 * float(generator("table", *path).random())
    return down if action == "Down" else 1 - down


@dataclass(eq=False)
class TableRow:
    """A context of the table's policy."""

    draws: np.random.Generator
    path: Path = ()
    is_asked: bool = False


@dataclass
class TableEngine:
    """Samples from a policy whose probabilities stand in a table; implements `Engine`."""

    model: LanguageModel
    words: Mapping[str, tuple[int, ...]]
    """The tokens of a response by its action."""
    num_rows: int = 4 * ALL * MANY
    endless: Sequence[str] = ()
    """Actions whose responses the token limit ends."""
    rows: list[TableRow] = field(default_factory=list)

    @property
    def num_free_rows(self) -> int:
        return self.num_rows - len(self.rows)

    @contextlib.contextmanager
    def rollout(self) -> Iterator[None]:
        yield
        assert not self.rows, "every row is closed"

    def open_row(self, draws: np.random.Generator) -> TableRow:
        assert self.num_free_rows > 0
        self.rows.append(TableRow(draws))
        return self.rows[-1]

    def copy_row(self, row: TableRow, draws: np.random.Generator) -> TableRow:
        assert not row.is_asked
        copy = self.open_row(draws)
        copy.path = row.path
        return copy

    def submit(
        self, row: TableRow, prompt: Sequence[int], *, max_new_tokens: int, restarts: bool = False
    ) -> None:
        row.is_asked = True

    def step(self, *, temperature: float) -> list[tuple[TableRow, Response]]:
        return [(row, self._answer(row, temperature)) for row in self.rows if row.is_asked]

    def _answer(self, row: TableRow, temperature: float) -> Response:
        chances = [probability(row.path, action) for action in ACTIONS]
        drawn = int(row.draws.random() >= chances[0])
        action = ACTIONS[int(np.argmax(chances)) if temperature == 0 else drawn]
        words, chance = self.words[action], probability(row.path, action)
        row.path, row.is_asked = (*row.path, action), False
        logprobs = (math.log(chance) / len(words),) * len(words)
        return Response(words, logprobs, stopped=action not in self.endless)

    def close_row(self, row: TableRow) -> None:
        self.rows.remove(row)


@dataclass
class World:
    """A lake, its environments, and the agent of the table."""

    agent: AgentProxy
    made: list[TextEnvironment]
    """The environments that were needed."""

    @property
    def tasks(self) -> Sequence[Task]:
        return self.agent.environments.tasks("test")

    def requests(self, num_episodes: int = 3) -> list[EpisodeRequest]:
        return [EpisodeRequest(task, seed) for seed, task in enumerate(self.tasks[:num_episodes])]

    def search(
        self,
        requests: Sequence[EpisodeRequest] | None = None,
        *,
        advantages: Mapping[Move, float] | None = None,
        predictor: MovePredictor | None = None,
        **settings: Any,
    ) -> list[SearchedEpisode]:
        search = TurnSearch(
            self.agent, SearchConfig(**settings), advantages=advantages or {}, predictor=predictor
        )
        return search.play(requests or self.requests(), policy_version="table")


@pytest.fixture
def make_world(tiny_model: LanguageModel) -> Callable[..., World]:
    def make_world(**options: Any) -> World:
        made: list[TextEnvironment] = []

        def make() -> TextEnvironment:
            made.append(make_environment("frozen_lake", {**LAKE, **options}))
            return made[-1]

        environments = EnvironmentManager(make, format_penalty=0.0, invalid_action_penalty=0.0)
        limits = TokenLimits(CAPACITY, 40)
        context = ContextManager(tiny_model.tokenizer, system_prompt=None, limits=limits)
        text = {a: context.write_response(thought="", action=a) for a in ACTIONS}
        words = {action: tuple(context.encode_response(text[action])) for action in ACTIONS}
        return World(AgentProxy(TableEngine(tiny_model, words), environments, context), made)

    return make_world


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    return make_world()


def path_of(found: SearchedEpisode) -> Path:
    return tuple(turn.action for turn in found.trajectory.turns)


def played(world: World, task: Task, path: Path) -> tuple[bool, float]:
    """Whether the path ends the episode, and its return."""
    steps = steps_of(task, path)
    return any(step[2] or step[3] for step in steps), sum(step[1] for step in steps)


def steps_of(task: Task, path: Path) -> list[tuple[Any, ...]]:
    environment = make_environment("frozen_lake", LAKE)
    environment.reset(task, seed=0)
    return [environment.step(action) for action in path]


def continued(world: World, task: Task, path: Path) -> Path:
    """The path, with the more probable actions up to the end of the episode."""
    while not played(world, task, path)[0]:
        path = (*path, likely_after(path))
    return path


def likely_after(path: Path) -> str:
    return max(ACTIONS, key=lambda action: probability(path, action))


def has_end(task: Task, path: Path) -> bool:
    """Whether the path leads to the goal or into a hole."""
    return steps_of(task, path)[-1][2]


def mean_logprob(world: World, path: Path) -> float:
    words = world.agent.engine.words
    chances = [probability(path[:index], action) for index, action in enumerate(path)]
    return sum(map(math.log, chances)) / sum(len(words[action]) for action in path)


def finished_paths(world: World, task: Task) -> list[Path]:
    """Every way that an episode can go."""
    found: list[Path] = []
    for length in range(1, MAX_TURNS + 1):
        for path in itertools.product(ACTIONS, repeat=length):
            if played(world, task, path)[0] and not played(world, task, path[:-1])[0]:
                found.append(path)
    return found


def beam_by_hand(world: World, task: Task, *, width: int) -> Path:
    """The textbook's beam search, with all actions of every path."""
    beam: list[Path] = [()]
    while any(not played(world, task, path)[0] for path in beam):
        grown = [
            (*path, action)
            for path in beam
            if not played(world, task, path)[0]
            for action in ACTIONS
        ]
        over = [path for path in beam if played(world, task, path)[0]]
        beam = sorted(over + grown, key=lambda p: mean_logprob(world, p), reverse=True)[:width]
    return beam[0]


@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_beam_keeps_the_paths_of_the_textbook(world: World, width: int) -> None:
    found = world.search(width=width, candidates=MANY, rank_by="likelihood")
    expected = [beam_by_hand(world, each.task, width=width) for each in world.requests()]
    assert [path_of(each) for each in found] == expected


def test_each_branch_has_what_its_own_environment_measured(world: World) -> None:
    class Measures:
        """Measures the actions and the numbers of the turns in which they were done."""

        def __init__(self) -> None:
            self.environment = make_environment("frozen_lake", LAKE)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.environment, name)

        def reset(self, task: Task, *, seed: int) -> Any:
            self.metrics: dict[str, float] = {}
            return self.environment.reset(task, seed=seed)

        def step(self, action: str) -> Any:
            self.metrics[f"turn_{len(self.metrics)}"] = ACTIONS.index(action)
            *answer, info = self.environment.step(action)
            return (*answer, {**info, "metrics": self.metrics})

    world.agent.environments = EnvironmentManager(
        Measures, format_penalty=0.0, invalid_action_penalty=0.0
    )
    for settings in ({"width": 3, "candidates": 8}, {"method": "best_of_n", "width": 8}):
        for found in world.search(rank_by="likelihood", **settings):
            actions = [ACTIONS[int(each)] for each in found.trajectory.metrics.values()]
            assert tuple(actions) == path_of(found)


@pytest.mark.slow
def test_a_beam_as_wide_as_the_world_finds_the_most_likely_path(world: World) -> None:
    requests = world.requests(1)
    (found,) = world.search(requests, width=ALL, candidates=MANY, rank_by="likelihood")
    paths = finished_paths(world, requests[0].task)
    assert path_of(found) == max(paths, key=lambda path: mean_logprob(world, path))


@pytest.mark.slow
def test_the_best_of_many_episodes_by_reward_has_the_largest_return(world: World) -> None:
    found = world.search(method="best_of_n", width=128, rank_by="reward")
    for each, request in zip(found, world.requests(), strict=True):
        paths = finished_paths(world, request.task)
        largest = max(played(world, request.task, path)[1] for path in paths)
        assert each.trajectory.episode_return == pytest.approx(largest)


@pytest.mark.slow
def test_the_best_of_many_episodes_by_likelihood_is_the_most_likely_one(world: World) -> None:
    requests = world.requests(1)
    settings = {"method": "best_of_n", "width": 128, "rank_by": "likelihood"}
    (found,) = world.search(requests, **settings)
    best = max(finished_paths(world, requests[0].task), key=lambda p: mean_logprob(world, p))
    assert mean_logprob(world, path_of(found)) == pytest.approx(mean_logprob(world, best))


def every_episode(world: World, task: Task) -> list[Any]:
    """What Stage 1 would store if it had gone every way once."""
    episodes = []
    for path in finished_paths(world, task):
        environment = make_environment("frozen_lake", LAKE)
        environment.reset(task, seed=0)
        turns = []
        for action in path:
            key = environment.state_key()
            reward = environment.step(action)[1]
            turns.append(factories.turn(reward, state_key=key, action=action))
        episodes.append(factories.episode(*turns, task=task))
    return episodes


@pytest.mark.slow
def test_where_the_store_knows_all_moves_the_best_return_is_found_whatever_is_likely(
    world: World,
) -> None:
    """With beta 0 the values are the best returns that can still be had."""
    for request in world.requests():
        episodes = every_episode(world, request.task)
        advantages = move_advantages(episodes, beta=0.0)
        (found,) = world.search([request], advantages=advantages, width=1, candidates=MANY)
        best = max(each.episode_return for each in episodes)
        assert found.trajectory.episode_return == pytest.approx(best)
        assert found.num_known_moves == found.num_moves > 0


def moves_of(world: World, move: MoveInContext) -> Path:
    """The actions that stand in a context, read from its tokens."""
    path: Path = ()
    for end in range(1, len(move.token_ids) + 1):
        for action, words in world.agent.engine.words.items():
            if move.token_ids[:end][-len(words) :] == words:
                path = (*path, action)
    last = world.agent.engine.words[path[-1]]
    assert move.token_ids[-move.num_sampled :] == last, "the response is the end of its context"
    return path


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"width": 1, "candidates": MANY}, {"width": 3}])
def test_where_the_moves_are_predicted_rightly_a_beam_finds_the_best_return(
    world: World, settings: dict[str, Any]
) -> None:
    """What is predicted of a move is the best that can be earned from it on."""
    for request in world.requests():
        ways = {
            way: [step[1] for step in steps_of(request.task, way)]
            for way in finished_paths(world, request.task)
        }

        def to_go(path: Path, ways: Mapping[Path, list[float]] = ways) -> float:
            before = len(path) - 1
            return max(sum(ways[way][before:]) for way in ways if way[: len(path)] == path)

        predictor = MovePredictor(
            lambda moves, to_go=to_go: [to_go(moves_of(world, each)) for each in moves],
            ran_out=None,
        )
        (found,) = world.search([request], predictor=predictor, rank_by="regression", **settings)
        assert found.trajectory.episode_return == pytest.approx(max(map(sum, ways.values())))


@pytest.mark.slow
@pytest.mark.parametrize("ran_out", [None, -1.0, 2.0])
@pytest.mark.parametrize("max_context_tokens", [CAPACITY, ALL_BUT_ONE_TURN])
def test_of_whole_episodes_the_last_move_decides_or_that_turns_or_context_ran_out(
    world: World, ran_out: float | None, max_context_tokens: int
) -> None:
    """What is predicted is a number of the path alone, between 0 and 1."""
    world.agent.context.limits = TokenLimits(max_context_tokens, 40)
    most = MAX_TURNS - (max_context_tokens < CAPACITY)

    def value(path: Path) -> float:
        return float(generator("predicted", *path).random())

    asked: list[Path] = []

    def predict(moves: Sequence[MoveInContext]) -> list[float]:
        asked.extend(moves_of(world, move) for move in moves)
        return [value(path) for path in asked[-len(moves) :]]

    settings = {"method": "best_of_n", "width": 8, "rank_by": "regression"}
    for request in world.requests():
        asked.clear()
        (found,) = world.search([request], predictor=MovePredictor(predict, None), **settings)
        assert len(asked) == 8, "no move but the last is looked at"
        assert max(map(len, asked)) == most
        known = {
            path: value(path) if ran_out is None or has_end(request.task, path) else ran_out
            for path in asked
        }
        (found,) = world.search([request], predictor=MovePredictor(predict, ran_out), **settings)
        assert known[path_of(found)] == max(known.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"width": 1, "candidates": 2}, {"method": "best_of_n", "width": 2}]
)
@pytest.mark.parametrize("num_turns", [1, 3])
def test_a_move_is_predicted_in_the_context_that_it_was_written_in(
    world: World, settings: dict[str, Any], num_turns: int
) -> None:
    """With a window, earlier turns are no longer read."""
    world.agent.context.window = ContextWindow(num_turns=num_turns)
    asked: list[MoveInContext] = []

    def predict(moves: Sequence[MoveInContext]) -> list[float]:
        asked.extend(moves)
        return [0.0] * len(moves)

    (found,) = world.search(
        world.requests(1),
        predictor=MovePredictor(predict, None),
        rank_by="regression",
        **settings,
    )
    last = training_samples(found.trajectory)[-1]
    assert any(turn.restarts_context for turn in found.trajectory.turns)
    num_sampled = len(found.trajectory.turns[-1].response_token_ids)
    assert MoveInContext(last.token_ids, num_sampled) in asked


@pytest.mark.parametrize("settings", [{"width": 2}, {"method": "best_of_n", "width": 3}])
def test_after_the_last_token_nothing_is_predicted_any_more(
    world: World, settings: dict[str, Any]
) -> None:
    """A cut search has one branch."""
    num_calls = 0

    def predict(moves: Sequence[MoveInContext]) -> list[float]:
        nonlocal num_calls
        num_calls += 1
        return [0.0] * len(moves)

    (found,) = world.search(
        world.requests(1),
        predictor=MovePredictor(predict, None),
        rank_by="regression",
        max_tokens=1,
        **settings,
    )
    assert found.is_cut and len(found.trajectory.turns) > 1
    assert num_calls == 1


def test_many_votes_choose_the_more_probable_action_of_each_turn(world: World) -> None:
    """With 200 candidates a turn; where both are nearly as probable, either may win."""
    (found,) = world.search(world.requests(1), width=1, candidates=200, rank_by="votes")
    path = path_of(found)
    for index, action in enumerate(path):
        assert probability(path[:index], action) > 0.4


@pytest.mark.slow
def test_moves_that_the_store_does_not_know_are_chosen_by_likelihood(world: World) -> None:
    by_values = world.search(width=2, candidates=MANY, rank_by="values")
    by_likelihood = world.search(width=2, candidates=MANY, rank_by="likelihood")
    assert by_values == by_likelihood
    assert {each.num_known_moves for each in by_values} == {0}


@pytest.mark.parametrize(
    "settings",
    [
        {"width": 3, "rank_by": "likelihood"},
        {"method": "best_of_n", "width": 3},
        {"width": 2, "max_tokens": 60},
    ],
)
def test_other_rewards_lead_to_the_same_actions(
    make_world: Callable[..., World], settings: dict[str, Any]
) -> None:
    usual = make_world().search(**settings)
    spoilt = make_world(reward={"goal": -5.0, "hole": 5.0, "ice": 0.3}).search(**settings)
    assert [path_of(each) for each in usual] == [path_of(each) for each in spoilt]
    rewards = [each.trajectory.episode_return for each in usual]
    assert rewards != [each.trajectory.episode_return for each in spoilt]


def test_when_the_tokens_are_spent_the_best_branch_goes_on_greedily(world: World) -> None:
    requests = world.requests(1)
    (found,) = world.search(requests, width=3, max_tokens=1, rank_by="likelihood")
    words = world.agent.engine.words
    first, *rest = path_of(found)
    # The search has one turn: three responses of the only branch. Then there is one a turn.
    assert (first, *rest) == continued(world, requests[0].task, (first,))
    most, least = (3 * length(map(len, words.values())) for length in (max, min))
    assert least <= found.num_sampled_tokens - sum(len(words[a]) for a in rest) <= most
    assert found.is_cut
    assert found.num_moves == 3


def test_of_whole_episodes_the_best_goes_on_greedily_also_if_its_first_action_was_drawn(
    world: World,
) -> None:
    """The less probable first action is known to be the better one."""
    requests = [EpisodeRequest(task, seed) for task in world.tasks[:3] for seed in range(4)]
    (drawn,) = set(ACTIONS) - {likely_after(())}
    starts = [world.agent.environments.start(each.task, seed=0)[0] for each in requests]
    advantages = {Move(each.state_key(), drawn, is_readable=True): 1.0 for each in starts}
    found = world.search(requests, advantages=advantages, method="best_of_n", width=3, max_tokens=1)
    paths = [path_of(each) for each in found]
    assert paths == [
        continued(world, each.task, path[:1]) for each, path in zip(requests, paths, strict=True)
    ]
    assert drawn in {path[0] for path in paths}


@pytest.mark.parametrize("settings", [{"width": 3}, {"method": "best_of_n", "width": 3}])
def test_a_search_ends_with_the_turn_that_takes_its_last_token(
    world: World, settings: dict[str, Any]
) -> None:
    requests = world.requests(1)
    (found,) = world.search(requests, max_tokens=1, **settings)
    rest = path_of(found)[1:]
    num_of_search = found.num_sampled_tokens - sum(len(world.agent.engine.words[a]) for a in rest)
    assert world.search(requests, max_tokens=num_of_search, **settings) == [found]
    (longer,) = world.search(requests, max_tokens=num_of_search + 1, **settings)
    assert longer.num_moves > found.num_moves


def test_a_message_that_was_cut_off_is_worse_than_a_whole_one_and_no_known_move(
    tiny_model: LanguageModel, real_template: Callable[[str], PreTrainedTokenizerBase]
) -> None:
    """The token limit ends the more probable response."""
    environments = EnvironmentManager(
        lambda: questions_with_tools([add], operations=["+"], max_number=99, max_turns=1),
        format_penalty=0.0,
        invalid_action_penalty=0.0,
        calls_tools=True,
    )
    context = ContextManager(
        real_template("qwen2_5"),
        system_prompt=None,
        tools=environments.tools,
        limits=factories.NO_LIMITS,
    )
    cut = likely_after(())
    words = {action: tuple(context.encode_response("42")) for action in ACTIONS}
    words[cut] = tuple(context.encode_response("42, or 42, or 42"))[:-1]
    engine = TableEngine(tiny_model, words, endless=[cut])
    world = World(AgentProxy(engine, environments, context), [])
    (request,) = world.requests(1)
    key = environments.start(request.task, seed=0)[0].state_key()
    said = [f"answer({context.decode(each)})" for each in words.values()]
    (found,) = world.search(
        [request],
        advantages={Move(key, action, is_readable=True): 0.0 for action in said},
        width=1,
        candidates=MANY,
    )
    assert path_of(found) == ("answer(42)",)
    assert 0 < found.num_known_moves < found.num_moves == MANY


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def test_tokens_are_those_of_all_candidates(world: World) -> None:
    requests = world.requests(1)
    (found,) = world.search(requests, width=1, candidates=5, rank_by="likelihood")
    sizes = {len(words) for words in world.agent.engine.words.values()}
    num_responses = 5 * len(found.trajectory.turns)
    assert min(sizes) * num_responses <= found.num_sampled_tokens <= max(sizes) * num_responses
    assert not found.is_cut


def test_greedy_play_is_among_the_candidates(world: World) -> None:
    """So the best episode by reward is never worse."""
    found = world.search(method="best_of_n", width=2, rank_by="reward")
    for each, request in zip(found, world.requests(), strict=True):
        reward = played(world, request.task, continued(world, request.task, ()))[1]
        assert each.trajectory.episode_return >= reward


@pytest.mark.parametrize("method", ["beam", "best_of_n"])
def test_the_same_seeds_find_the_same_episodes(world: World, method: str) -> None:
    settings = {"method": method, "width": 2, "rank_by": "likelihood"}
    assert world.search(**settings) == world.search(**settings)


def test_other_seeds_find_other_episodes(world: World) -> None:
    settings = {"width": 2, "rank_by": "likelihood"}
    found = world.search(**settings)
    others = [replace(each, seed=each.seed + 100) for each in world.requests()]
    assert [path_of(each) for each in world.search(others, **settings)] != [
        path_of(each) for each in found
    ]


def test_episodes_do_not_depend_on_how_many_are_searched_side_by_side(world: World) -> None:
    together = world.search(width=2, rank_by="likelihood")
    world.agent.engine.num_rows = 4
    assert world.search(width=2, rank_by="likelihood") == together


def test_environments_are_given_back(world: World) -> None:
    world.agent.engine.num_rows = 16
    for _ in range(5):
        world.search(world.requests(4), width=2, candidates=4)
    # Two searches side by side, two branches each, and at a turn's end the copies for the next.
    assert len(world.made) <= 1 + 2 * 2 + 2


def test_a_search_needs_a_row_for_each_candidate(world: World) -> None:
    world.agent.engine.num_rows = 15
    with pytest.raises(ConfigError, match="beam of 4 samples 16 responses .*num_rows is 15"):
        world.search(width=4)


def test_slippery_ice_is_searched_with_one_branch_only(make_world: Callable[..., World]) -> None:
    slippery = make_world(slippery=True)
    with pytest.raises(ConfigError, match="is not deterministic"):
        slippery.search(width=2)
    with pytest.raises(ConfigError, match="is not deterministic"):
        slippery.search(method="best_of_n", width=2)
    assert len(slippery.search(width=1, candidates=3)) == 3


@pytest.mark.slow
def test_recorded_logprobs_are_those_of_the_policy(tiny_model: LanguageModel) -> None:
    """With the generation engine, whose rows are copied between the turns."""
    make = partial(make_environment, "shop", {"num_products": 24, "max_turns": 3})
    environments = EnvironmentManager(make, format_penalty=0.0, invalid_action_penalty=0.0)
    engine = GenerationEngine(tiny_model, num_rows=8, capacity=CAPACITY)
    engine.stop_rule.end_ids |= set(range(0, len(tiny_model.tokenizer), 5))
    limits = TokenLimits(CAPACITY, 12)
    context = ContextManager(tiny_model.tokenizer, system_prompt=None, limits=limits)
    agent = AgentProxy(engine, environments, context)
    requests = [EpisodeRequest(task, 7) for task in environments.tasks("test")[:5]]
    search = TurnSearch(agent, SearchConfig(width=2, candidates=3, rank_by="likelihood"))
    found = search.play(requests, policy_version="tiny")
    assert [each.trajectory.task for each in found] == [request.task for request in requests]
    for each in found:
        assert len(each.trajectory.turns) == 3
        assert TurnFlag.FORMAT_ERROR.value in each.trajectory.turns[0].flags
        expected = factories.sampled_logprobs(tiny_model, each.trajectory)
        recorded = [logprob for turn in each.trajectory.turns for logprob in turn.logprobs]
        np.testing.assert_allclose(recorded, expected.detach().numpy(), atol=1e-5)
    assert search.play(requests, policy_version="tiny") == found
