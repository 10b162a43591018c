"""The addresses of `ragen-apo view`. All only read."""

from __future__ import annotations

from functools import partial

from starlette.routing import BaseRoute, Route

from ragen_apo.web.view.compare_pages import compare, side
from ragen_apo.web.view.episode_pages import episode, episodes, failures, text
from ragen_apo.web.view.folder import RunsFolder
from ragen_apo.web.view.run_pages import live, run, runs
from ragen_apo.web.view.site import Site
from ragen_apo.web.view.value_pages import samples, values


def view_routes(folder: RunsFolder) -> list[BaseRoute]:
    """The pages of the runs in a folder."""
    site = Site(folder)
    answers = {
        "/": runs,
        "/run": run,
        "/run/live": live,
        "/episodes": episodes,
        "/episode": episode,
        "/text": text,
        "/failures": failures,
        "/values": values,
        "/samples": samples,
        "/compare": compare,
        "/side": side,
    }
    return [Route(path, partial(answer, site), methods=["GET"]) for path, answer in answers.items()]
