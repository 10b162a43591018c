"""The list of runs, and the page of a run."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ragen_apo.web.pages import page_of
from ragen_apo.web.view import curves, query
from ragen_apo.web.view.lists import NUM_EXAMPLES, Filters, selected
from ragen_apo.web.view.shown import run_line, run_page
from ragen_apo.web.view.site import Site

RUNS_PER_PAGE = 50


def runs(site: Site, request: Request) -> Response:
    """What runs there are."""
    find, page = query.text(request, "find"), query.page(request, RUNS_PER_PAGE)
    names = [name for name in site.folder.names() if find.lower() in name.lower()]
    page = page.within(len(names))
    return page_of(
        "view/runs.html",
        folder=str(site.folder.root),
        lines=[run_line(site, name) for name in page.of(names)],
        num_runs=len(names),
        find=find,
        page=page.number,
        pages=page.links(len(names)),
    )


def run(site: Site, request: Request) -> Response:
    """A run: numbers, curves, episodes."""
    return page_of("view/run.html", **_run(site, request))


def live(site: Site, request: Request) -> Response:
    """The part of a run's page that changes while it trains."""
    return page_of("view/run_live.html", **_run(site, request))


def _run(site: Site, request: Request) -> dict[str, Any]:
    name = query.text(request, "run")
    data, files = site.data(name), site.folder.run(name)
    return {
        "name": name,
        **run_page(site, name),
        "damage": site.damage(name),
        "box": curves.BOX,
        "names": site.pattern_names(name),
        "examples": _examples(site, name),
        "patterns": site.patterns(name, "evaluation"),
        "has": {
            "evaluation": files.episodes.exists(),
            "training": files.rollouts.exists(),
            "values": files.values.exists(),
        },
        "store": data.option("values", "store"),
    }


def _examples(site: Site, name: str) -> dict[str, Any]:
    """The newest, best and worst of the kept episodes of training."""
    if "training" not in site.sources(name):
        return {}
    index, path = site.index(name, "training")
    if not len(index):
        return {}
    orders = ("newest", "best", "worst")
    chosen = {order: selected(index, path, Filters(order=order))[:NUM_EXAMPLES] for order in orders}
    return {order: index.read(path, numbers) for order, numbers in chosen.items()}
