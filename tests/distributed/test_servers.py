"""Two processes whose episodes inference servers play, against one process.

The server of the tests answers equal contexts equally, and no two episodes have the same one
(`ticketed_shop`), so all of them play the same episodes. In float64, as in `test_runs`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from ragen_apo import cli
from ragen_apo.agent.environment_manager import EnvironmentManager
from ragen_apo.agent.proxy import EpisodeRequest
from ragen_apo.config import RunConfig, load_run_config, resolved_yaml
from ragen_apo.config.rollouts import RolloutsConfig
from ragen_apo.distributed.ranks import Ranks
from ragen_apo.errors import ConfigError, RanksError, ServerError
from ragen_apo.files import read_json_lines
from ragen_apo.policy.inference_server.configured import servers_of
from ragen_apo.policy.inference_server.vllm import VllmServer, Wanted
from ragen_apo.policy.inference_server.wire import Request
from ragen_apo.run_directory import RunDirectory, create_run
from ragen_apo.session import open_session
from ragen_apo.stages.inputs import check_run_inputs
from ragen_apo.types import Task, Trajectory
from tests import factories
from tests.distributed.processes import answers, in_ranks
from tests.distributed.runs import assert_same_rows, assert_same_weights, go_on, stored_tokens
from tests.factories import Sayings
from tests.fake_vllm import FakeVllm, HangupError, content_seed, serving
from tests.served_responses import COMPLETIONS, keep_weights
from tests.worlds import ticketed_shop

CLOSED = "http://127.0.0.1:9"
MAX_TOKENS = 8
"""Of a response; the comparison of log-probabilities asks for more."""
NUM_REQUESTS = 9


@pytest.fixture(autouse=True)
def temporary_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed processes leave theirs behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def server(finished_run: Path) -> Iterator[tuple[FakeVllm, str]]:
    with serving(finished_run / "references" / "0") as (fake, url):
        fake.seed_of = content_seed
        yield fake, url


@pytest.fixture
def fake(server: tuple[FakeVllm, str]) -> FakeVllm:
    return server[0]


@pytest.fixture
def other(finished_run: Path) -> Iterator[tuple[FakeVllm, str]]:
    """A second server."""
    with serving(finished_run / "references" / "0") as (fake, url):
        fake.seed_of = content_seed
        yield fake, url


def config(urls: Sequence[str], *overrides: str) -> RunConfig:
    """Three steps with Stage 1 and evaluations, from a model that exists."""
    made = factories.config(
        "--machine.dtype=float64",
        "--warm_start.enabled=false",
        "--agent.max_context_tokens=480",  # with the ticket
        f"--agent.max_response_tokens={MAX_TOKENS}",
        "--reference.refresh_every_steps=null",
        "--values.adaptive=false",
        "--values.baseline=zero",
        "--training.max_steps=3",
        "--training.max_tasks=3",
        "--training.tasks_per_step=3",
        "--training.num_rows=8",
        "--training.checkpoint_every=1",
        "--training.eval_every=2",
        "--training.eval_episodes=2",
        "--monitors.every_steps=null",
        "--rollouts.engine=vllm",
        f"--rollouts.base_url={urls[0]}",
        "--rollouts.retries=0",
        *overrides,
        environment=ticketed_shop.SECTION,
    )
    rollouts = made.rollouts.model_copy(update={"base_url": list(urls)})
    return made.model_copy(update={"rollouts": rollouts})


def num_asked(fake: FakeVllm, *, max_tokens: int = MAX_TOKENS) -> int:
    """How many responses were asked for: of episodes, if the tokens are not others'."""
    return sum(
        path == COMPLETIONS and body["max_tokens"] == max_tokens for path, body in list(fake.asked)
    )


def is_of_episode(path: str, answer: Any) -> bool:
    """Whether it is a response of an episode."""
    return path == COMPLETIONS and len(answer["choices"][0]["token_ids"]) <= MAX_TOKENS


# One rollout after another


@dataclass(frozen=True)
class Played:
    """What a rank has of its rollouts."""

    tokens: list[list[list[tuple[int, ...]]]]
    """Of each rollout, each episode and each turn."""
    num_own: int
    """Episodes that it played itself."""
    lines: list[str]
    """What it said."""
    saved: list[int]
    """The requests that a caller was told of, in any order."""


def tokens(trajectories: Sequence[Trajectory]) -> list[list[tuple[int, ...]]]:
    return [[turn.response_token_ids for turn in each.turns] for each in trajectories]


def rollouts(
    ranks: Ranks,
    run: Path,
    text: str,
    number: int = 1,
    before: Callable[[Ranks, int], None] = lambda ranks, number: None,
) -> Played:
    """Rollouts of a policy from the run's reference, all of the same episodes.

    `before` each one is called.
    """
    said, saved, num_own = Sayings(), list[int](), 0
    session = open_session(factories.config(text=text), RunDirectory(run), said)
    proxy = session.proxy(session.shard(session.load_policy(session.run.reference(0))))
    tasks = session.environments.tasks("train")
    requests = [EpisodeRequest(tasks[index], 100 + index) for index in range(NUM_REQUESTS)]
    start = EnvironmentManager.start

    def counted_start(manager: EnvironmentManager, task: Task, *, seed: int) -> Any:
        nonlocal num_own
        num_own += 1
        return start(manager, task, seed=seed)

    found = []
    with patch.object(EnvironmentManager, "start", counted_start):
        for index in range(number):
            before(ranks, index)
            trajectories = proxy.rollout(
                requests,
                temperature=1.0,
                policy_version=f"rollout-{index}",
                on_finished=lambda ended: saved.extend(index for index, _ in ended),
            )
            found.append(tokens(trajectories))
    return Played(found, num_own, said.lines, saved)


def played(size: int, run: Path, made: RunConfig, *options: Any) -> list[Played]:
    """`rollouts` by so many ranks."""
    return answers(in_ranks(size, rollouts, run, resolved_yaml(made), *options))


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [(), ("--rollouts.schedule=dynamic", "--training.num_rows=2"), ("--machine.sharding=full",)],
    ids=["static", "dynamic", "shares"],
)
def test_the_union_is_the_rollout_of_one_process_and_the_server_got_its_weights_once(
    server: tuple[FakeVllm, str], finished_run: Path, tmp_path: Path, keys: Sequence[str]
) -> None:
    fake, url = server
    (one,) = played(1, finished_run, config([url]))
    assert num_asked(fake) > NUM_REQUESTS
    fake.restart()
    fake.asked.clear()
    both = played(2, finished_run, config([url], *keys))
    for each in both:
        assert each.tokens == one.tokens
        assert 0 < each.num_own < NUM_REQUESTS
    assert sum(each.num_own for each in both) == NUM_REQUESTS
    assert sorted(both[0].saved) == list(range(NUM_REQUESTS))
    assert both[1].saved == []
    assert fake.paths().count("/collective_rpc") == 1
    assert num_asked(fake, max_tokens=24) == 2, "one rank compares log-probabilities"
    assert len(list(tmp_path.glob("ragen-apo-*"))) == 2, "one for each call, also of two ranks"


@pytest.mark.slow
def test_a_server_that_computes_something_else_plays_for_no_rank(
    server: tuple[FakeVllm, str], other: tuple[FakeVllm, str], finished_run: Path
) -> None:
    """Although it has the right label; also when the last other server fails."""
    (fake, url), (good, good_url) = server, other
    keep_weights(fake)
    _perturb(fake)
    said = played(2, finished_run, config([url, good_url]))[0].lines
    assert len(said) == 1
    assert "it computes another model" in said[0]
    assert num_asked(fake) == 0
    assert num_asked(good) > NUM_REQUESTS

    def die(path: str, answer: Any) -> Any:
        if is_of_episode(path, answer):
            raise HangupError
        return answer

    good.spoil = die
    results = in_ranks(2, rollouts, finished_run, resolved_yaml(config([url, good_url])))
    assert all(isinstance(each, ServerError | RanksError) for each in results)
    assert num_asked(fake) == 0


def _perturb(fake: FakeVllm) -> None:
    """Weights that no trainer has, which `keep_weights` keeps."""
    for weight in fake.model.model.parameters():
        weight.data.mul_(1.5)


@pytest.mark.slow
def test_the_refusal_of_the_first_rank_ends_all_before_one_has_sampled(
    server: tuple[FakeVllm, str], finished_run: Path
) -> None:
    fake, url = server
    keep_weights(fake)
    _perturb(fake)
    first, second = in_ranks(2, rollouts, finished_run, resolved_yaml(config([url])))
    assert isinstance(first, ServerError)
    assert isinstance(second, RanksError)
    assert str(first) == str(second)
    assert "rank 0 of 2 on " in str(first)
    assert "it computes another model" in str(first)
    assert num_asked(fake) == 0


def unreachable_for_rank_1(*urls: str) -> Callable[[Ranks, int], None]:
    """From the second rollout on, as if a network between that rank and these servers were lost."""

    def completion(self: VllmServer, wanted: Wanted) -> Request:
        address = CLOSED if self.base_url in urls else self.base_url
        return ask(VllmServer(address, timeout_seconds=5.0), wanted)

    def before(ranks: Ranks, number: int) -> None:
        if ranks.rank == 1 and number == 1:
            VllmServer.completion = completion  # in a fork of its own

    ask = VllmServer.completion
    return before


@pytest.mark.slow
def test_a_server_that_one_rank_cannot_reach_plays_on_for_the_others_and_it_is_said_once(
    server: tuple[FakeVllm, str], other: tuple[FakeVllm, str], finished_run: Path
) -> None:
    urls = [server[1], other[1]]
    asked = config(urls)
    first, second = played(2, finished_run, asked, 3, unreachable_for_rank_1(urls[1]))
    assert first.tokens == second.tokens == 3 * [first.tokens[0]]
    (line,) = first.lines
    assert line.startswith(f"rank 1 of 2: {urls[1]}: /v1/completions: the connection failed")
    assert line.endswith("it is tried again at the next rollout")


@pytest.mark.slow
def test_a_rank_that_reaches_no_server_ends_all_and_says_which_rank_it_is(
    server: tuple[FakeVllm, str], finished_run: Path
) -> None:
    text = resolved_yaml(config([server[1]]))
    before = unreachable_for_rank_1(server[1])
    first, second = in_ranks(2, rollouts, finished_run, text, 2, before)
    assert isinstance(second, ServerError)
    assert str(second).startswith("rank 1 of 2 on ")
    assert "go on with --resume" in str(second)
    assert isinstance(first, RanksError)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "adapters"])
def test_a_server_that_was_started_again_plays_from_the_next_rollout_on(
    server: tuple[FakeVllm, str], other: tuple[FakeVllm, str], finished_run: Path, lora: bool
) -> None:
    """It answers meanwhile, by the weights that it was started with."""
    (_, url), (again, again_url) = server, other
    keys = [f"--policy.path={again.first_folder}", "--policy.lora.rank=2"] if lora else []
    whole, _ = played(2, finished_run, config([url], *keys))
    left = [True]

    def restart_once(path: str, answer: Any) -> Any:
        if is_of_episode(path, answer) and left:
            left.pop()
            again.restart()
            again.asked.clear()
            _perturb(again)
        return answer

    again.spoil = restart_once
    first, second = played(2, finished_run, config([url, again_url], *keys), 2)
    assert first.tokens == second.tokens == 2 * whole.tokens
    assert not left
    paths = again.paths()
    assert paths.count("/collective_rpc") == 1, "at the next rollout"
    assert num_asked(again) > 0
    assert again_url in " ".join(first.lines)
    last_rollout = max(index for index, path in enumerate(paths) if path == "/collective_rpc")
    assert COMPLETIONS in paths[last_rollout:]


# Runs


start = functools.partial(go_on, trust_remote_code=True)
"""Begins a run or goes on with it; the last rank is killed before a step."""


def new_run(path: Path, made: RunConfig) -> RunDirectory:
    return create_run(path, config_yaml=resolved_yaml(made))


def assert_same(actual: RunDirectory, expected: RunDirectory) -> None:
    if expected.values.exists():  # it has a Stage 1
        assert stored_tokens(actual) == stored_tokens(expected)
    rows = [
        [{k: v for k, v in row.items() if not k.endswith(("seconds", "num_ranks"))} for row in each]
        for each in (read_json_lines(run.metrics) for run in (actual, expected))
    ]
    assert_same_rows(*rows, tolerance=1e-5)
    newest = [row for row in rows[0] if not row.get("sampler_lag")]
    assert all(row["logprob_gap_max"] < 1e-4 for row in newest), "of the weights of the step"
    assert all(row["gradient_norm"] > 0 for row in rows[0]), "which is not that of another step"
    assert_same_weights(actual.policy, expected.policy, tolerance=1e-5)


RUNS = {
    "all weights": (),
    "an earlier policy that samples, in shares": (
        "--machine.sharding=full",
        "--algorithm=oapl",
        "--values.baseline=v_star",
        "--algorithm.group_size=2",
        "--algorithm.lag=2",
        "--rollouts.ahead=false",
    ),
    "adapters in shares": ("--machine.sharding=full", "--policy.lora.rank=2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("keys", RUNS.values(), ids=RUNS.keys())
def test_two_processes_make_the_run_of_one(
    server: tuple[FakeVllm, str], tmp_path: Path, keys: Sequence[str]
) -> None:
    fake, url = server
    made = config([url], f"--policy.path={fake.first_folder}", *keys)
    one, two = (new_run(tmp_path / name, made) for name in ("one", "two"))
    assert answers(in_ranks(1, start, one.path)) == ["trained"]
    assert answers(in_ranks(2, start, two.path)) == 2 * ["trained"]
    assert_same(two, one)


@pytest.mark.slow
def test_a_run_whose_rank_and_server_are_killed_goes_on_with_other_numbers_of_processes(
    server: tuple[FakeVllm, str], other: tuple[FakeVllm, str], tmp_path: Path
) -> None:
    """Before step 2 a rank; in step 2 one of two servers, for good."""
    (fake, url), (dying, dying_url) = server, other
    made = config([url, dying_url], f"--policy.path={fake.first_folder}")
    one, run = (new_run(tmp_path / name, made) for name in ("one", "run"))
    assert answers(in_ranks(1, start, one.path)) == ["trained"]
    survivor, killed = in_ranks(2, start, run.path, 1)
    assert killed is None
    assert "rank 0 of 2 is without the others at 'stage 2: " in survivor
    left = [3]

    def die(path: str, answer: Any) -> Any:
        if left[0] <= 0:
            raise HangupError
        left[0] -= is_of_episode(path, answer)
        return answer

    dying.spoil = die
    assert answers(in_ranks(2, start, run.path)) == 2 * ["trained"]
    assert left[0] <= 0
    assert_same(run, one)


def command(ranks: Ranks, run: Path) -> tuple[object, str]:
    """Exit status and standard error of the command that goes on with a run."""
    errors, words = io.StringIO(), ["ragen-apo", "train", "--run-dir", str(run), "--resume"]
    with (
        patch.object(sys, "argv", [*words, "--trust-remote-code", "--no-evaluate"]),
        contextlib.redirect_stderr(errors),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        try:
            cli.main()
        except SystemExit as end:
            return end.code or 0, errors.getvalue()
    return 0, errors.getvalue()


@pytest.mark.slow
def test_without_a_server_two_processes_end_with_one_message_and_resume_goes_on(
    server: tuple[FakeVllm, str], tmp_path: Path
) -> None:
    fake, url = server
    made = config([url], f"--policy.path={fake.first_folder}")
    run = new_run(tmp_path / "run", made)

    def die_in_step_two(path: str, answer: Any) -> Any:
        if path == COMPLETIONS and read_json_lines(run.metrics):
            raise HangupError
        return answer

    fake.spoil = die_in_step_two
    ended = answers(in_ranks(2, command, run.path))
    assert all(status for status, _ in ended)
    (said,) = [text for _, text in ended if text]
    assert f"{url}: /v1/completions: the connection failed" in said.replace("\n", " ")
    assert "go on with --resume" in said.replace("\n", " ")
    assert len(read_json_lines(run.metrics)) == 1
    fake.spoil = lambda path, answer: answer
    fake.restart()
    assert answers(in_ranks(3, start, run.path)) == 3 * ["trained"]
    assert [row["step"] for row in read_json_lines(run.metrics)] == [1, 2, 3]
    assert load_run_config(run.config).rollouts.base_url == [url]


# What is refused


@pytest.fixture
def of_two(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes this process one of two, of which so many are on its host."""

    def of(local_size: int) -> None:
        names = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": local_size}
        for name, value in names.items():
            monkeypatch.setenv(name, str(value))

    return of


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"base_url": "http://10.0.0.1:8000"}, "model_folder is null.*several hosts"),
        ({"model_folder": "/shared"}, f"base_url names {CLOSED}, which on each host"),
    ],
    ids=["temporary folder", "loopback"],
)
def test_what_several_hosts_cannot_share_is_refused_with_a_reason(
    of_two: Callable[[int], None], keys: dict[str, str], sentence: str
) -> None:
    settings = RolloutsConfig.model_validate({"engine": "vllm", "base_url": CLOSED, **keys})
    assert servers_of(settings)
    of_two(2)
    assert servers_of(settings)
    of_two(1)
    with pytest.raises(ConfigError, match=sentence):
        servers_of(settings)


def test_several_hosts_share_servers_and_a_folder_that_all_of_them_reach(
    of_two: Callable[[int], None],
) -> None:
    of_two(1)
    keys = {"engine": "vllm", "base_url": "http://10.0.0.1:8000", "model_folder": "/shared"}
    assert servers_of(RolloutsConfig.model_validate(keys))


def test_playing_ahead_by_several_processes_is_refused_with_a_reason(
    of_two: Callable[[int], None],
) -> None:
    oapl = ("--algorithm=oapl", "--algorithm.lag=2", "--values.baseline=v_star")
    asked = config([CLOSED], *oapl)
    environment = ticketed_shop.TicketedShop()
    check_run_inputs(asked, environment)
    of_two(2)
    with pytest.raises(ConfigError, match=r"Set rollouts\.ahead to false"):
        check_run_inputs(asked, environment)
    check_run_inputs(factories.changed(asked, "--rollouts.ahead=false"), environment)
