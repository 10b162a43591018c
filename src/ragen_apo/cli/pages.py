"""The commands for pages in the browser: `view` for runs, `serve` for environments and policies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App

from ragen_apo.cli.common import (
    Number,
    Overrides,
    TrustRemoteCode,
    app,
    examples,
    say,
    whole_number,
)
from ragen_apo.errors import ConfigError
from ragen_apo.plural import counted

serve = App(
    name="serve",
    help="Serve an environment, or a policy, to people or programs.",
    help_epilogue=examples(
        "serve shop webshop --data generated",
        "serve policy runs/mine",
        "serve openenv webshop --data generated",
    ),
)
app.command(serve)

DEFAULT_SHOP = "shop"
DEMONSTRATIONS = Path("demonstrations")
Port = Annotated[int, whole_number(0, 65_535)]


@app.command(help_epilogue=examples("view runs", "view runs/mine --port 8080"))
def view(folder: Path = Path("runs"), *, host: str = "127.0.0.1", port: Port = 0) -> None:
    """Show runs in the browser: curves, live while they train, and episodes turn by turn.

    Only reads; Ctrl-C ends it.

    Args:
        folder: A folder with runs in it, or a run.
        host: The address to listen on. Other machines need the token in the printed address.
        port: The port; 0 takes a free one.
    """
    from ragen_apo.web.extra import require_web

    require_web()
    from ragen_apo.web.serving import serve as serve_pages
    from ragen_apo.web.view.folder import open_folder
    from ragen_apo.web.view.routes import view_routes

    serve_pages(view_routes(open_folder(folder)), host=host, port=port, announce=_announce)


@serve.command(
    name="shop",
    help_epilogue=examples(
        "serve shop",
        "serve shop webshop --data generated --keep demonstrations",
        "serve shop --run runs/shop",
    ),
)
def serve_shop(
    environment: str | None = None,
    *options: Overrides,
    run: Path | None = None,
    split: str | None = None,
    keep: Path = DEMONSTRATIONS,
    host: str = "127.0.0.1",
    port: Port = 8001,
) -> None:
    """Shop yourself in the browser, and keep what you do as demonstrations.

    Args:
        environment: shop or webshop; with a run, its environment.
        options: Options of the environment, after its name, such as `--max_turns 5`;
            docs/environments.md has all of them. A run has its own.
        run: A run, or an evaluation of a model behind an API. Its environment and goals are used,
            and the pages show what its agent did on them.
        split: The split of the goals. Default: train; with a run, the split of its evaluation.
        keep: The folder for kept episodes. Give it to warm_start.demonstrations.recordings.
        host: The address to listen on. If it is not this machine's own, visitors need the printed
            token.
        port: The port to listen on; 0 takes a free one.
    """
    from ragen_apo.config.overrides import parse_options
    from ragen_apo.config.references import code_named_by
    from ragen_apo.environments.base import make_environment
    from ragen_apo.web.extra import require_web

    require_web()
    from ragen_apo.web.serving import serve as serve_pages
    from ragen_apo.web.shop.goals import AgentEpisodes, agent_episodes, config_of_run
    from ragen_apo.web.shop.routes import shop_routes
    from ragen_apo.web.shop.visits import Visits, open_shop

    if run is None:
        agent = AgentEpisodes()
        world = make_environment(environment or DEFAULT_SHOP, parse_options(options))
    else:
        if environment is not None or options:
            raise ConfigError(
                "--run goes without an environment and its options: the run has them in its "
                "configuration"
            )
        config = config_of_run(run)
        if named := code_named_by(config.environment.name, config.environment.options):
            raise ConfigError(
                f"{run} names Python code, {', '.join(named)}, which is not run here: the pages "
                "are for the environments shop and webshop"
            )
        agent = agent_episodes(run)
        world = make_environment(config.environment.name, config.environment.options)
        split = split or agent.split or config.evaluation.split
    shop = open_shop(world, split=split or "train", agent=agent, demonstrations=keep)
    say(f"{world.properties.name}: {counted(len(shop.goals), 'goal')}")
    serve_pages(shop_routes(Visits(shop)), host=host, port=port, announce=_announce)


@serve.command(name="policy", help_epilogue=examples("serve policy runs/mine"))
def serve_policy(
    run: Path,
    *,
    host: str = "127.0.0.1",
    port: Port = 8002,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Watch a policy of a run act token by token, take over, and compare it with its reference.

    Args:
        run: A run directory; a run that still trains has at least its reference.
        host: The address to listen on. If it is not this machine's own, visitors need the printed
            token.
        port: The port to listen on; 0 takes a free one.
        trust_remote_code: Run Python code that the run names: its model's, an environment's
            and an algorithm's.
    """
    from ragen_apo.web.extra import require_web

    require_web()
    from ragen_apo.api import open_run
    from ragen_apo.web.at_work.routes import at_work_routes, token_texts
    from ragen_apo.web.at_work.worker import open_workplace
    from ragen_apo.web.serving import serve as serve_pages

    opened = open_run(run, trust_remote_code=trust_remote_code)
    workplace = open_workplace(opened.config, opened.files)
    try:
        routes = at_work_routes(workplace, decode=token_texts(workplace))
        serve_pages(routes, host=host, port=port, announce=_announce)
    finally:
        workplace.close()


@serve.command(
    name="openenv",
    help_epilogue=examples(
        "serve openenv webshop --data generated",
        "serve openenv ./guess_number.py:make_guess_number --split test",
    ),
)
def serve_openenv(
    environment: str,
    *options: Overrides,
    split: str = "train",
    max_sessions: Number = 100,
    host: str = "127.0.0.1",
    port: Port = 8000,
) -> None:
    """Serve an environment to programs by OpenEnv; each connection plays its own episodes.

    Args:
        environment: Name of an environment, path.py:function or module:function.
        options: Options of the environment, after its name, such as `--max_turns 5`;
            docs/environments.md has all of them.
        split: The split of a reset's task, if the reset names none.
        max_sessions: Largest number of connections at a time.
        host: The address to listen on. If it is not this machine's own, requests need the printed
            token, as `Authorization: Bearer TOKEN`.
        port: The port to listen on; 0 takes a free one.
    """
    from functools import partial

    from ragen_apo.config.overrides import parse_options
    from ragen_apo.environments.base import make_environment
    from ragen_apo.environments.openenv import serving

    def announce(address: str, token: str | None) -> None:
        needed = "" if token is None else f", header Authorization: Bearer {token}"
        say(f"{environment} at {address}{needed} (Ctrl-C ends it)")

    serving.require_openenv()
    serving.serve(
        partial(make_environment, environment, parse_options(options)),
        split=split,
        max_sessions=max_sessions,
        host=host,
        port=port,
        announce=announce,
    )


def _announce(address: str) -> None:
    say(f"open {address} (Ctrl-C ends it)")
