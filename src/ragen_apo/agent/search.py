"""Search over turns: several ways that an episode may go, of which the best one becomes it.

    requests -> branches -> [sample candidates -> prune -> step what is kept] -> trajectories

Candidates of all episodes in progress are sampled together. Pruning comes before any action is
executed, by what the search has been told of moves (`values.moves`), by what is predicted of them
(`MovePredictor`) and by likelihood. So a beam of width 1 never needs a second environment; wider
ones replay (`agent.replay`). The reward of the episode is recorded and read by the ranking `reward`
alone, when episodes are over or cut.

Candidates are sampled at temperature 1 beside a greedy one, whose log-probabilities are of
temperature 1 as well: other temperatures could not be compared with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ragen_apo.agent.branches import (
    Branch,
    Proposal,
    best_first,
    kept_in_beam,
    with_predictions,
    with_votes,
)
from ragen_apo.agent.environment_manager import Outcome
from ragen_apo.agent.proxy import (
    AgentProxy,
    Episode,
    EpisodeRequest,
    Indexed,
    begin_episodes,
    play_turns,
)
from ragen_apo.agent.replay import replayed, require_replayable
from ragen_apo.config.search import SearchConfig
from ragen_apo.environments.base import HasTasks, TextEnvironment
from ragen_apo.errors import ConfigError
from ragen_apo.policy.engine import Response
from ragen_apo.seeding import generator
from ragen_apo.types import TrainingSample, Trajectory, Turn, samples_of_turns
from ragen_apo.values.moves import Move

CANDIDATE_TEMPERATURE = 1.0


@dataclass(frozen=True)
class MoveInContext:
    """A response with what had been read before it."""

    token_ids: tuple[int, ...]
    """The present context, up to the end of the response."""
    num_sampled: int
    """The tokens of the response."""

    def as_sample(self) -> TrainingSample:
        """The context with the response as all that was sampled."""
        num_read = len(self.token_ids) - self.num_sampled
        mask = (False,) * num_read + (True,) * self.num_sampled
        return TrainingSample(self.token_ids, mask, (0.0,) * len(mask))


@dataclass(frozen=True)
class MovePredictor:
    """What can be earned from moves on."""

    predict: Callable[[Sequence[MoveInContext]], Sequence[float]]
    ran_out: float | None
    """The same of a last move after which turns or context had run out, whatever it was; None where
    that is not known, and the move is predicted like others."""
    unexplained: float | None = None
    """The share of the variance that predictions leave in tasks that were held out, if known."""


@dataclass(frozen=True)
class SearchedEpisode:
    """The episode that a search has found, and what it took."""

    trajectory: Trajectory
    num_sampled_tokens: int
    """Of all candidates, the dropped ones included."""
    num_moves: int
    """Candidates that were ranked."""
    num_known_moves: int
    """Those of them that the store knows."""
    is_cut: bool
    """Whether `max_tokens` ended the search before the episode was over."""


class _Tree:
    """The search for one episode."""

    def __init__(self, root: Branch) -> None:
        self.root = root.episode
        self.branches = [root]
        self.num_sampled_tokens = self.num_moves = self.num_known_moves = 0
        self.is_cut = False

    @property
    def open(self) -> list[Branch]:
        return [branch for branch in self.branches if branch.outcome is None]

    @property
    def over(self) -> list[Branch]:
        return [branch for branch in self.branches if branch.outcome is not None]


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A response that has been asked for."""

    parent: Branch
    row: Any
    is_greedy: bool


def check_search(settings: SearchConfig, environments: HasTasks, *, num_rows: int) -> None:
    """Raises ConfigError for an engine with too few rows for one episode, and for several branches
    in a stochastic environment.
    """
    if settings.copies_environments:
        require_replayable(environments)
    if settings.num_rows > num_rows:
        raise ConfigError(
            f"evaluation.search: a {settings.label} samples {settings.num_rows} responses at the "
            f"same time, and training.num_rows is {num_rows}; raise it, or search with a smaller "
            "width or fewer candidates"
        )


class TurnSearch:
    """Plays episodes as searches, with the engine and the environments of an agent.

    `advantages` is what is known of moves, for the ranking by values, and `predictor` what the
    ranking by regression asks. Raises ConfigError where `check_search` does.
    """

    def __init__(
        self,
        proxy: AgentProxy,
        settings: SearchConfig,
        *,
        advantages: Mapping[Move, float] = MappingProxyType({}),
        predictor: MovePredictor | None = None,
    ) -> None:
        check_search(settings, proxy.environments, num_rows=proxy.engine.num_rows)
        assert (predictor is None) == (settings.rank_by != "regression")
        self.proxy, self.settings = proxy, settings
        self.advantages, self.predictor = advantages, predictor

    def play(
        self, requests: Sequence[EpisodeRequest], *, policy_version: str
    ) -> list[SearchedEpisode]:
        """One episode a request, in their order; the seeds of the requests decide all draws."""
        waiting, active = deque(enumerate(requests)), list[_Tree]()
        found: dict[int, SearchedEpisode] = {}
        most = self.proxy.engine.num_rows // self.settings.num_rows
        with self.proxy.engine.rollout():
            while waiting or active:
                room = min(most - len(active), len(waiting))
                active += self._plant([waiting.popleft() for _ in range(room)])
                for tree in active:
                    self._cut_if_spent(tree)
                self._play_turn([tree for tree in active if tree.open])
                for tree in [each for each in active if not each.open]:
                    active.remove(tree)
                    found[tree.root.index] = self._result(tree, policy_version=policy_version)
        return [found[index] for index in range(len(requests))]

    def _plant(self, waiting: Indexed) -> Iterator[_Tree]:
        for episode in begin_episodes(waiting, self.proxy.environments, self.proxy.context):
            row = self.proxy.engine.open_row(generator(episode.request.seed, "search"))
            yield _Tree(Branch(episode, row, is_greedy=True))

    def _cut_if_spent(self, tree: _Tree) -> None:
        """Leaves the best branch alone once the tokens are spent."""
        limit = self.settings.max_tokens
        if limit is None or tree.is_cut or tree.num_sampled_tokens < limit:
            return
        best, *others = self._ranked(tree)
        for branch in others:
            self._close(branch)
        tree.branches, tree.is_cut = [best], True

    def _play_turn(self, trees: Sequence[_Tree]) -> None:
        """One turn of every branch, those of all trees together."""
        asked = {tree: list(self._fork(tree)) for tree in trees}
        responses = self._responses([each for candidates in asked.values() for each in candidates])
        kept: list[tuple[_Tree, Proposal]] = []
        for tree, candidates in asked.items():
            proposals = [self._proposal(each, responses[each.row]) for each in candidates]
            proposals = self._predicted(tree, proposals)
            tree.num_sampled_tokens += sum(len(each.response.token_ids) for each in proposals)
            if not tree.is_cut:
                tree.num_moves += len(proposals)
                tree.num_known_moves += sum(each.is_known for each in proposals)
            kept += [(tree, each) for each in self._pruned(tree, with_votes(proposals))]
        self._go_on(kept)

    def _fork(self, tree: _Tree) -> Iterator[_Candidate]:
        """The candidates of each branch; the first one takes its row, the others take copies."""
        for index, branch in enumerate(tree.open):
            turn, seed = len(branch.episode.turns), branch.episode.request.seed
            yield _Candidate(branch, branch.row, is_greedy=branch.is_greedy or tree.is_cut)
            for number in range(1, self._num_candidates(tree, branch)):
                draws = generator(seed, "search", turn, index, number)
                copy = self.proxy.engine.copy_row(branch.row, draws)
                yield _Candidate(branch, copy, is_greedy=False)

    def _num_candidates(self, tree: _Tree, branch: Branch) -> int:
        if tree.is_cut:
            return 1
        if self.settings.method == "beam":
            return self.settings.num_candidates
        return 1 if branch.episode.turns else self.settings.width

    def _responses(self, candidates: Sequence[_Candidate]) -> dict[Any, Response]:
        """The response of each row: first those that are sampled, then the greedy ones."""
        responses: dict[Any, Response] = {}
        for is_greedy, temperature in ((False, CANDIDATE_TEMPERATURE), (True, 0.0)):
            group = [each for each in candidates if each.is_greedy == is_greedy]
            for each in group:
                self.proxy.submit(each.row, each.parent.episode)
            num_awaited = len(responses) + len(group)
            while len(responses) < num_awaited:
                responses.update(self.proxy.engine.step(temperature=temperature))
        return responses

    def _predicted(self, tree: _Tree, proposals: list[Proposal]) -> list[Proposal]:
        """The proposals of a beam with what is predicted of them, if that decides."""
        if self.predictor is None or self.settings.method != "beam" or tree.is_cut:
            return proposals
        moves = [_proposed_move(each.parent.episode, each.response) for each in proposals]
        return with_predictions(proposals, self.predictor.predict(moves))

    def _ranked(self, tree: _Tree) -> list[Branch]:
        """The branches, the best one first; of whole episodes the last move is predicted now."""
        branches = tree.branches
        if self.predictor is not None and self.settings.method != "beam" and len(branches) > 1:
            asked = [each for each in branches if self._value_of_end(each.outcome) is None]
            moves = [_last_move(each.episode.turns) for each in asked]
            for branch, value in zip(asked, self.predictor.predict(moves), strict=True):
                branch.merit = replace(branch.merit, predicted=value)
        return best_first(branches, rank_by=self.settings.rank_by)

    def _proposal(self, candidate: _Candidate, response: Response) -> Proposal:
        parent, context = candidate.parent, self.proxy.context
        text = context.decode(response.token_ids)
        parsed = context.parse(text, is_cut_off=not response.stopped)
        move = Move(parent.episode.state_key, parsed.action, parsed.is_valid)
        advantage = self.advantages.get(move)
        return Proposal(
            parent=parent,
            row=candidate.row,
            response=response,
            text=text,
            parsed=parsed,
            is_greedy=candidate.is_greedy,
            is_known=advantage is not None,
            merit=parent.merit.after(response, parsed, advantage=advantage or 0.0),
        )

    def _pruned(self, tree: _Tree, proposals: Sequence[Proposal]) -> Sequence[Proposal]:
        """The proposals that are kept; the tree is left with the branches that are over."""
        settings, over, kept = self.settings, tree.over, list(proposals)
        if settings.method == "beam":
            over, kept = kept_in_beam(
                over, proposals, width=settings.width, rank_by=settings.rank_by
            )
        for proposal in proposals:
            if proposal not in kept:
                self.proxy.engine.close_row(proposal.row)
        for parent in tree.open:
            if not any(each.parent is parent for each in kept):
                self.proxy.environments.release(parent.episode.environment)
        tree.branches = list(over)
        return kept

    def _go_on(self, kept: Sequence[tuple[_Tree, Proposal]]) -> None:
        """Plays the turn of each proposal, which becomes a branch of its tree."""
        # All copies are made before the first branch moves on, whose turns they play again.
        environments = self._environments([proposal for _, proposal in kept])
        answered = []
        for _, proposal in kept:
            before = proposal.parent.episode
            environment = environments[proposal]
            episode = replace(before, environment=environment, turns=list(before.turns))
            answered.append((episode, proposal.response, proposal.text))
        turns = play_turns(answered, self.proxy.environments, self.proxy.context)
        for (tree, proposal), (episode, _, _), (outcome, is_over) in zip(
            kept, answered, turns, strict=True
        ):
            branch = Branch(
                episode,
                proposal.row,
                # In a beam any branch may be continued by its most probable response.
                is_greedy=proposal.is_greedy or self.settings.method == "beam",
                merit=replace(proposal.merit, reward=proposal.merit.reward + outcome.reward),
            )
            if is_over:
                self._close(branch)
                branch.outcome = outcome
                if (value := self._value_of_end(outcome)) is not None:
                    branch.merit = replace(branch.merit, predicted=value)
            tree.branches.append(branch)

    def _value_of_end(self, outcome: Outcome | None) -> float | None:
        """What is known of a last move without looking at it."""
        ran_out = outcome is not None and not outcome.terminated
        return self.predictor.ran_out if self.predictor is not None and ran_out else None

    def _environments(self, kept: Sequence[Proposal]) -> dict[Proposal, TextEnvironment]:
        """One environment each: the first of a branch has the branch's own, the others replay."""
        first = {each.parent: each for each in reversed(kept)}
        own = {each: each.parent.episode.environment for each in first.values()}
        others = [each for each in kept if each not in own]
        pool = self.proxy.environments
        copies = pool.map(lambda each: replayed(pool, each.parent.episode), others)
        return own | dict(zip(others, copies, strict=True))

    def _close(self, branch: Branch) -> None:
        """Gives row and environment back; nothing for a branch that is over."""
        if branch.outcome is None:
            self.proxy.engine.close_row(branch.row)
            self.proxy.environments.release(branch.episode.environment)

    def _result(self, tree: _Tree, *, policy_version: str) -> SearchedEpisode:
        best = self._ranked(tree)[0]
        assert best.outcome is not None
        return SearchedEpisode(
            trajectory=best.episode.finished(best.outcome, policy_version=policy_version),
            num_sampled_tokens=tree.num_sampled_tokens,
            num_moves=tree.num_moves,
            num_known_moves=tree.num_known_moves,
            is_cut=tree.is_cut,
        )


def _proposed_move(episode: Episode, response: Response) -> MoveInContext:
    """A response that has not been played yet."""
    read = () if episode.prompt.restarts else samples_of_turns(episode.turns)[-1].token_ids
    token_ids = (*read, *episode.prompt.token_ids, *response.token_ids)
    return MoveInContext(token_ids, len(response.token_ids))


def _last_move(turns: Sequence[Turn]) -> MoveInContext:
    return MoveInContext(samples_of_turns(turns)[-1].token_ids, len(turns[-1].response_token_ids))
