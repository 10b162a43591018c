"""Who samples the episodes: the local engine, or inference servers beside it (docs/server.md)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from ragen_apo.addresses import problem_with_address, problem_with_variable_name
from ragen_apo.choices import EpisodeSchedule
from ragen_apo.config.section import (
    CountOrZero,
    PathText,
    Positive,
    Section,
    one_or_more,
    whole_number,
)

NumWorkers = Annotated[int, BeforeValidator(whole_number), Field(ge=1, le=1000)]


class RolloutsConfig(Section):
    """Who samples the tokens of Stage 1, Stage 2 and evaluations, and when environments act. All
    these keys may change when a run is resumed.
    """

    engine: Literal["local", "vllm"] = "local"
    """`local`: this process, with the same bits every time. `vllm`: the servers of `base_url`,
    which get the policy's weights before each rollout; with torchrun from the first process
    (docs/server.md)."""
    schedule: EpisodeSchedule = "static"
    """With torchrun: `static` gives each process the same episodes every time. With `dynamic` a
    process with a free row takes the next episode, so none waits long for the others. Episodes are
    the same except for the rounding of a batch, which then depends on timing. See docs/scaling.md.
    """
    num_environment_workers: NumWorkers = 1
    """How many environments may act at the same time, each in a thread. This helps those that wait
    for something, such as a web page. The results are the same bits. It also applies to
    demonstrations and to evaluations of models behind an API. See docs/adding_an_environment.md."""
    environment_retries: CountOrZero = 0
    """How often an episode is played again from its beginning, with another environment, if its
    environment raises an error. With 0 the first error ends the run. It applies to all episodes
    but those of a search. See docs/adding_an_environment.md."""
    environment_processes: bool = False
    """Whether each environment plays in a process of its own. Then those that compute use other
    cores (as many at a time as `num_environment_workers`), and one that crashes is one that raises
    an error. The results are the same bits. See docs/adding_an_environment.md."""
    environment_timeout_seconds: Positive | None = None
    """How long `reset` and `step` may take before the environment's process is killed, which is an
    error as any other. null: without a limit. It needs `environment_processes`."""
    lockstep: bool = False
    """Whether an episode waits until all other episodes in progress have their response too. Then
    their environments act at the same time. For slow environments with `engine: local`. Episodes
    are the same except for the rounding of a batch."""
    base_url: Annotated[list[str], BeforeValidator(one_or_more)] = Field(default=[])
    """Address of a vLLM server, such as http://127.0.0.1:8000, with or without /v1, or a list of
    them that share the episodes; `local` does not ask them. A server serves one run at a time."""
    api_key_env: str | None = None
    """Name of the environment variable with the key that the servers were started with
    (`--api-key`); null sends no key. The key itself is written nowhere. It is sent to every address
    of `base_url`. Only https protects it on the way; a server on this machine needs none."""
    model_folder: PathText | None = None
    """Folder in which weights are written for the servers. null: a temporary folder, which is
    enough if the servers run on this machine. Other machines need a folder that has the same path
    there. torchrun on several hosts always needs one."""
    ahead: bool = True
    """Whether servers play the next steps while this one is trained: with `oapl` and a `lag`, the
    steps of one lagged policy (docs/server.md). The episodes are the same. A second thread plays
    them; set false if the environment works only in the main thread. Must be false with a lag and
    several processes of torchrun."""
    timeout_seconds: Positive = 300.0
    """How long a server may take to answer one request, from its connection to the last byte."""
    retries: CountOrZero = 3
    """How often a failed server is tried again before it is left out until the next rollout. The
    first retry comes after 2 seconds, each further one after twice as long, while no other server
    plays. The run ends with an error when a process has no server left."""

    @field_validator("base_url")
    @classmethod
    def _addresses_of_servers(cls, base_url: list[str]) -> list[str]:
        """Without the /v1 that clients of OpenAI's interface are given."""
        return [url.rstrip("/").removesuffix("/v1").rstrip("/") for url in base_url]

    @model_validator(mode="after")
    def _parts_fit(self) -> RolloutsConfig:
        if self.environment_timeout_seconds is not None and not self.environment_processes:
            raise ValueError(
                "environment_timeout_seconds needs environment_processes: true, as only a process "
                "can be ended"
            )
        if self.engine == "vllm" and not self.base_url:
            raise ValueError(
                "engine vllm needs base_url, the address of a server, such as http://127.0.0.1:8000"
            )
        for url in self.base_url:
            if problem := problem_with_address(url):
                raise ValueError(f"base_url {problem}; expected it like http://127.0.0.1:8000")
        variable = self.api_key_env
        if variable is not None and (problem := problem_with_variable_name(variable)):
            raise ValueError(f"api_key_env {problem}")
        if len(set(self.base_url)) < len(self.base_url):
            raise ValueError(f"base_url names a server twice: {', '.join(self.base_url)}")
        return self
