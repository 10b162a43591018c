"""Any text environment as a taskset of `verifiers`, with the environment that plays it.

    vf-eval ragen-apo-taskset --env.taskset.environment webshop --env.taskset.split test -n 10 ...

    config = TextEnvConfig(taskset=TextTasksetConfig(environment="shop", split="test"))
    environment = vf.load_environment(config)

The environment is the user of the conversation: its observations are the user's messages, the
model's replies the actions. A trace gets the episode's return as reward, and as metrics `success`,
`num_turns` and `num_invalid_actions`. Needs the package `verifiers` (extra `verifiers`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai  # pyright: ignore[reportMissingImports]
import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
from pydantic import Field
from verifiers.v1.dialects.chat import (  # pyright: ignore[reportMissingImports]
    message_to_wire,
)
from verifiers.v1.errors import (  # pyright: ignore[reportMissingImports]
    MODEL_TRANSPORT_ERROR_EXIT_CODE,
)
from verifiers.v1.runtimes import ProgramResult  # pyright: ignore[reportMissingImports]

from ragen_apo.environments.answers import checked_step, endlessness, turn_limit
from ragen_apo.environments.base import (
    TaskFinder,
    TextEnvironment,
    make_environment,
    opened_environment,
    tasks_of,
)
from ragen_apo.errors import EnvironmentFaultError
from ragen_apo.types import Task

TASKSET_ID = "ragen-apo-taskset"
"""The top-level module `ragen_apo_taskset`: verifiers finds a taskset by the name of a package."""
ANSWER_FORM = "End every message with one action: <answer>action</answer>. Nothing else is read."
OPEN, CLOSE = "<answer>", "</answer>"


class TextTasksetConfig(vf.TasksetConfig):
    """Which tasks: those of a split of an environment."""

    id: vf.ID = TASKSET_ID
    environment: str = "shop"
    """A name that `ragen-apo train` knows, path.py:function or module:function."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Of the environment."""
    split: str = "train"
    seed: int = 0
    """Of every episode, for environments that draw."""


class TextTaskData(vf.TaskData):
    """A task of ours; `id` is its task_id. The environment opens the conversation."""

    split: str
    category: str


class TextTask(vf.Task[TextTaskData]):
    """A task, known by its own id in whatever order tasks come."""

    @property
    def key(self) -> str:
        """The task_id, a hash of the content."""
        return str(self.data.id)


class TextTaskset(vf.Taskset[TextTask, TextTasksetConfig]):
    """The tasks of one split, in the environment's order."""

    def __init__(self, config: TextTasksetConfig) -> None:
        super().__init__(config)
        self._prototype = self.make()
        """Never stepped."""
        self._tasks = tasks_of(self._prototype, config.split)
        self._finder = TaskFinder(self._prototype)

    def make(self) -> TextEnvironment:
        return make_environment(self.config.environment, self.config.options)

    def task(self, task_id: str) -> Task:
        """Our task of an id; raises ConfigError for one of another environment."""
        return self._finder.find(task_id, [self.config.split])

    def load(self) -> Iterator[TextTask]:
        system_prompt = f"{self._prototype.properties.rules}\n\n{ANSWER_FORM}".lstrip()
        for task in self._tasks:
            data = TextTaskData(
                id=task.task_id,
                name=task.task_id,
                description=task.instruction,
                system_prompt=system_prompt,
                split=task.split,
                category=task.category,
            )
            yield TextTask(data, self.config.task)


class TextEnvConfig(vf.EnvConfig):
    """One seat, the policy. Its model is called from this process, so it needs no sandbox."""

    player: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())
    taskset: TextTasksetConfig = TextTasksetConfig()


class TextEnv(vf.Env[TextEnvConfig]):
    """Plays a task: observation, reply, observation, until the episode or the run is over."""

    async def run(self, task: TextTask, agents: vf.Agents) -> None:
        """One episode in an environment of its own."""
        taskset: TextTaskset = self.taskset
        config = taskset.config
        with opened_environment(config.environment, config.options) as environment:
            episode_return = 0.0
            metrics = {"success": 0.0, "num_turns": 0.0, "num_invalid_actions": 0.0}
            observation, _ = environment.reset(taskset.task(task.data.id), seed=config.seed)
            async with agents.player.interaction(task) as interaction:
                over = False
                while not over:
                    segment = await interaction.turn(observation)
                    if segment.terminated:
                        break
                    if metrics["num_turns"] == turn_limit(environment.properties):
                        raise EnvironmentFaultError(endlessness(environment.properties))
                    action = action_of(segment.last_reply)
                    answer = checked_step(environment, action)
                    observation, reward, terminated, truncated, info = answer
                    over = terminated or truncated
                    episode_return += float(reward)
                    metrics["num_turns"] += 1
                    metrics["num_invalid_actions"] += bool(info.get("invalid_action", False))
                    metrics["success"] = float(bool(info.get("success", False)))
                    for name, value in info.get("metrics", {}).items():
                        metrics[f"environment/{name}"] = float(value)
            trace = interaction.trace
            if trace.has_error:
                return  # the model failed: how it would have done is unknown
            trace.record_reward("episode_return", episode_return)
            trace.record_metrics(metrics)


def action_of(reply: str) -> str:
    """The text of the last `<answer>`; without one, all that follows a thought."""
    _, opened, rest = reply.rpartition(OPEN)
    if opened:
        return rest.partition(CLOSE)[0].strip()
    return reply.rpartition("</think>")[2].strip()


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """One request to the model a turn. There are no tools, so nothing runs in a sandbox."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> ProgramResult:
        """Asks for the reply to the conversation so far; the trace keeps what it says."""
        system, prompt = self.resolve_prompt(data)
        messages = [message_to_wire(message) for message in prompt]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None) as client:
            try:
                await client.chat.completions.create(model=ctx.model, messages=messages)
            except openai.APIConnectionError as error:
                return ProgramResult(MODEL_TRANSPORT_ERROR_EXIT_CODE, "", str(error))
            except openai.APIStatusError as error:
                return ProgramResult(1, "", str(error))
        return ProgramResult(0, "", "")
