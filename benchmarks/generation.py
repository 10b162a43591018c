"""Episodes per second: our engine against `model.generate` that re-reads the transcript every turn.

    python -m benchmarks.generation [--model RUN/references/0] [--episodes 128] [--rows 64]

Both sides are driven by the same agent proxy through the same episodes: same tasks, same refilling
of rows, same sampling temperature 1, one process, one after the other, `--repeats` times in turn;
the ratio is the median over the repeats. The other side keeps the token ids, left-pads the open
transcripts into one batch and calls `generate` with its KV cache, once a turn; it never tokenises a
response again. `--clock cpu` counts processor seconds, for machines that are busy with other work;
it is of use with one thread only.

"Tokens through the model" counts each side's work without padding: every turn the other side reads
the whole transcript, ours the new tokens. Where both take the same time for a token, the quotient
of these counts is the ratio to expect.

`forced`: no token ends a response and the shop executes scripted searches whatever is written, so
both sides sample exactly `--tokens` tokens (10 is the mean of the teacher's responses) in each of
`--turns` turns (10 is the shop's limit) and read the same pages.
`sampled` (with --model): the model's own responses end where it ends them, and so do its episodes.
"""

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from benchmarks.small_model import default_model
from benchmarks.tables import write_page
from transformers import StoppingCriteria, StoppingCriteriaList

from ragen_apo.agent.assembly import build_context, build_environments
from ragen_apo.agent.environment_manager import EnvironmentManager
from ragen_apo.agent.proxy import AgentProxy, EpisodeRequest
from ragen_apo.config import RunConfig
from ragen_apo.environments.shop import ShopEnvironment
from ragen_apo.policy.engine import Response
from ragen_apo.policy.generation import GenerationEngine
from ragen_apo.policy.language_model import LanguageModel, load_language_model
from ragen_apo.policy.sampling import StopRule
from ragen_apo.types import Trajectory


class GuidedShop(ShopEnvironment):
    """A shop that searches one word of the task each turn, whatever the agent says."""

    def reset(self, task: Any, *, seed: int) -> tuple[str, dict[str, Any]]:
        self._words = task.instruction.rstrip(".").split()
        self._num_guided = 0
        return super().reset(task, seed=seed)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._num_guided += 1
        return super().step(f"search {self._words[-self._num_guided % len(self._words)]}")


@dataclass(eq=False)
class Transcript:
    """One episode's tokens so far."""

    token_ids: list[int] = field(default_factory=list)
    awaits_response: bool = False


class EndOfResponse(StoppingCriteria):
    """Ends the rows of `generate` by the rule that ends our responses."""

    def __init__(self, stop_rule: StopRule) -> None:
        self._stop_rule = stop_rule

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.tensor([self._stop_rule.is_over(row) for row in input_ids.tolist()])


class RereadingEngine:
    """The interface of `GenerationEngine` on top of `generate`: a step answers all open rows."""

    def __init__(
        self, model: LanguageModel, *, num_rows: int, capacity: int, stop_rule: StopRule
    ) -> None:
        self.model, self.num_rows, self.capacity = model, num_rows, capacity
        self.stop_rule = stop_rule
        self._open: list[Transcript] = []
        self._max_new_tokens = 0

    @property
    def num_free_rows(self) -> int:
        return self.num_rows - len(self._open)

    def open_row(self, draws: np.random.Generator) -> Transcript:
        self._open.append(Transcript())
        return self._open[-1]

    def close_row(self, row: Transcript) -> None:
        self._open.remove(row)

    @contextlib.contextmanager
    def rollout(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._open.clear()

    def submit(
        self, row: Transcript, prompt: Sequence[int], *, max_new_tokens: int, restarts: bool = False
    ) -> None:
        row.token_ids = [*([] if restarts else row.token_ids), *prompt]
        row.awaits_response, self._max_new_tokens = True, max_new_tokens

    @torch.inference_mode()
    def step(self, *, temperature: float) -> list[tuple[Transcript, Response]]:
        rows = [row for row in self._open if row.awaits_response]
        width = max(len(row.token_ids) for row in rows)
        token_ids = torch.full((len(rows), width), self.model.pad_id)
        mask = torch.zeros(len(rows), width, dtype=torch.long)
        for index, row in enumerate(rows):
            token_ids[index, width - len(row.token_ids) :] = torch.tensor(row.token_ids)
            mask[index, width - len(row.token_ids) :] = 1
        written = self.model.model.generate(
            input_ids=token_ids,
            attention_mask=mask,
            max_new_tokens=self._max_new_tokens,
            do_sample=True,
            temperature=temperature,
            top_k=0,
            pad_token_id=self.model.pad_id,
            eos_token_id=None,
            stopping_criteria=StoppingCriteriaList([EndOfResponse(self.stop_rule)]),
        )
        responses = [self._cut(row) for row in written[:, width:].tolist()]
        for row, response in zip(rows, responses, strict=True):
            row.token_ids.extend(response.token_ids)
            row.awaits_response = False
        return list(zip(rows, responses, strict=True))

    def _cut(self, token_ids: list[int]) -> Response:
        lengths = range(1, len(token_ids) + 1)
        end = next((each for each in lengths if self.stop_rule.is_over(token_ids[:each])), None)
        kept = token_ids[:end]
        return Response(tuple(kept), (0.0,) * len(kept), end is not None)


class NeverOver(StopRule):
    """Every response has all the tokens that it may have."""

    def is_over(self, token_ids: Sequence[int]) -> bool:
        return False


@dataclass(frozen=True)
class Workload:
    """What is played."""

    name: str
    config: RunConfig
    make_manager: Callable[[], EnvironmentManager]
    num_episodes: int
    ends_responses: bool

    def requests(self) -> list[EpisodeRequest]:
        tasks = self.make_manager().tasks("train")
        return [EpisodeRequest(tasks[i % len(tasks)], i) for i in range(self.num_episodes)]


def make_engine(kind: str, model: LanguageModel, workload: Workload) -> Any:
    """An engine of either kind with the workload's rows, capacity and end tokens."""
    size = {
        "num_rows": workload.config.training.num_rows,
        "capacity": workload.config.agent.max_context_tokens,
    }
    ours = GenerationEngine(model, **size)
    if not workload.ends_responses:
        ours.stop_rule = NeverOver(model)
    if kind == "ours":
        return ours
    return RereadingEngine(model, **size, stop_rule=ours.stop_rule)


def make_proxy(kind: str, model: LanguageModel, workload: Workload) -> AgentProxy:
    """An agent on an engine of either kind; like a trainer's, it serves all rollouts."""
    manager = workload.make_manager()
    context = build_context(workload.config.agent, model, manager)
    return AgentProxy(make_engine(kind, model, workload), manager, context)


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def play(
    proxy: AgentProxy, requests: list[EpisodeRequest], clock: Callable[[], float]
) -> tuple[list[Trajectory], float]:
    """The trajectories and the seconds they took."""
    started = clock()
    trajectories = proxy.rollout(requests, temperature=1.0, policy_version="benchmark")
    return trajectories, clock() - started


def num_tokens_through_model(kind: str, episode: Trajectory) -> int:
    """The tokens that the model reads in an episode; the last one of a response it only writes."""
    total = context = 0
    for turn in episode.turns:
        read_before = 0 if kind == "generate" else max(context - 1, 0)
        context += len(turn.prompt_token_ids) + len(turn.response_token_ids)
        total += context - 1 - read_before
    return total


def compare(
    model: LanguageModel, workload: Workload, *, repeats: int, clock: Callable[[], float]
) -> list[list[object]]:
    """One table row for each side, from the median of the repeats."""
    torch.manual_seed(0)
    requests = workload.requests()
    proxies = {kind: make_proxy(kind, model, workload) for kind in ("generate", "ours")}
    seconds: dict[str, list[float]] = {kind: [] for kind in proxies}
    played: dict[str, list[Trajectory]] = {}
    for proxy in proxies.values():
        play(proxy, requests[: workload.config.training.num_rows // 4], clock)
    for _ in range(repeats):
        for kind, proxy in proxies.items():
            played[kind], taken = play(proxy, requests, clock)
            seconds[kind].append(taken)
    rates = {kind: workload.num_episodes / median(taken) for kind, taken in seconds.items()}
    pairs = zip(seconds["generate"], seconds["ours"], strict=True)
    ratios = {"generate": 1.0, "ours": median(theirs / ours for theirs, ours in pairs)}
    names = {
        "generate": "`generate`, whole transcript every turn",
        "ours": "engine of this project",
    }
    rows: list[list[object]] = []
    for kind, episodes in sorted(played.items()):
        turns = sum(len(episode.turns) for episode in episodes)
        tokens = sum(episode.num_response_tokens for episode in episodes)
        through = sum(num_tokens_through_model(kind, episode) for episode in episodes)
        rows.append(
            [
                f"{workload.name}: {names[kind]}",
                f"{turns / workload.num_episodes:.2f}",
                f"{tokens / turns:.1f}",
                f"{through / workload.num_episodes:.0f}",
                f"{rates[kind]:.2f}",
                f"{rates[kind] * tokens / workload.num_episodes:.0f}",
                f"{ratios[kind]:.1f}",
            ]
        )
    return rows


def forced(arguments: argparse.Namespace) -> Workload:
    """The same number of turns and of tokens for everybody."""
    config = RunConfig.model_validate(
        {
            "agent": {
                "max_response_tokens": arguments.tokens,
                "max_context_tokens": arguments.capacity,
            },
            "training": {"num_rows": arguments.rows},
        }
    )

    def make_manager() -> EnvironmentManager:
        return EnvironmentManager(
            lambda: GuidedShop(max_turns=arguments.turns),
            format_penalty=0.0,
            invalid_action_penalty=0.0,
        )

    return Workload("forced", config, make_manager, arguments.episodes, ends_responses=False)


def sampled(arguments: argparse.Namespace) -> Workload:
    """The default shop with the model's own responses."""
    config = RunConfig.model_validate({"training": {"num_rows": arguments.rows}})
    return Workload(
        "sampled",
        config,
        lambda: build_environments(config.environment, config.agent),
        arguments.episodes,
        ends_responses=True,
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, help="a model folder; default: untrained weights")
    parser.add_argument("--episodes", type=int, default=128)
    parser.add_argument("--rows", type=int, default=64, help="episodes side by side")
    parser.add_argument("--turns", type=int, default=10, help="of a forced episode")
    parser.add_argument("--tokens", type=int, default=10, help="of a forced response")
    parser.add_argument("--capacity", type=int, default=1024, help="tokens of a forced episode")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    parser.add_argument("--suffix", default="", help="of the page's name, for another model")
    arguments = parser.parse_args()
    workloads = [forced(arguments)]
    if arguments.model:
        model = load_language_model(arguments.model, device=torch.device("cpu"))
        workloads.append(sampled(arguments))
    else:
        model = default_model(workloads[0].config)
    rows = [
        row
        for workload in workloads
        for row in compare(
            model, workload, repeats=arguments.repeats, clock=CLOCKS[arguments.clock]
        )
    ]
    write_page(
        "generation",
        title="Generation over many turns",
        notes=(
            f"{arguments.episodes} shop episodes are played, {arguments.rows} side by side. Rates "
            f"are the median of {arguments.repeats} runs, in {arguments.clock} seconds. What the "
            "two sides do is described in `benchmarks/generation.py`. The aim is 5 times the "
            "episodes per second."
        ),
        header=[
            "workload and side",
            "turns per episode",
            "tokens per response",
            "tokens through the model per episode",
            "episodes/s",
            "sampled tokens/s",
            "ratio",
        ],
        rows=rows,
        suffix=arguments.suffix,
    )


if __name__ == "__main__":
    main()
