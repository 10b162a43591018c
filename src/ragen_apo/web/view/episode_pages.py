"""Lists of episodes, an episode, its long texts, and failures by pattern."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ragen_apo.web.pages import page_of
from ragen_apo.web.view import lists, query
from ragen_apo.web.view.episodes import StoredEpisode
from ragen_apo.web.view.lists import NUM_EXAMPLES, PAGE_SIZE, Filters
from ragen_apo.web.view.query import FILES, REFERENCE
from ragen_apo.web.view.site import Site

TURNS_PER_PAGE = 25
TEXT_PART = 40_000
"""Characters of a long text on one page."""


def episodes(site: Site, request: Request) -> Response:
    """A list, filtered and ordered."""
    name, source = query.text(request, "run"), query.choice(request, "source", list(FILES))
    filters = Filters(
        outcome=query.choice(request, "outcome", lists.OUTCOMES),
        failure=query.text(request, "failure"),
        order=query.choice(request, "order", lists.ORDERS),
        find=query.text(request, "find"),
    )
    page = query.page(request, PAGE_SIZE)
    # The first pages of a list as it stands in the file need no more of it.
    most = page.start + PAGE_SIZE + 1 if filters == Filters() else None
    index, path = site.index(name, source, num_episodes=most)
    chosen = lists.selected(index, path, filters)
    total = len(chosen) if index.end >= path.stat().st_size else None
    page = page if total is None else page.within(total)
    return page_of(
        "view/episodes.html",
        name=name,
        source=source,
        other_sources=site.sources(name),
        filters=filters,
        lines=index.read(path, page.of(chosen)),
        total=total,
        has_more=page.start + PAGE_SIZE < len(chosen),
        page=page.number,
        pages=() if total is None else page.links(total),
        damage=site.damage(name) if source == "evaluation" else [],
        patterns=site.pattern_names(name),
    )


def episode(site: Site, request: Request) -> Response:
    """What the agent did, turn by turn."""
    key = query.episode_key(request)
    shown, page = site.shown(key), query.page(request, TURNS_PER_PAGE)
    has_next = key.source != REFERENCE
    if has_next:
        index, _ = site.index(key.run, key.source, num_episodes=key.number + 2)
        has_next = key.number + 1 < len(index)
    return page_of(
        "view/episode.html",
        name=key.run,
        key=key,
        episode=shown,
        turns=page.of(shown.turns),
        page=page.number,
        pages=page.links(len(shown.turns)),
        shade=query.choice(request, "shade", ["surprise", "change"]),
        words=site.words(key.run, shown.stored.failure),
        has_next=has_next,
        beta2=site.data(key.run).option("algorithm", "beta2"),
    )


def text(site: Site, request: Request) -> Response:
    """A long text, a part at a time."""
    key = query.episode_key(request)
    stored = site.episode(key)
    shown = long_text(request, stored)
    # The end is on the page of the last turn; the instruction is on every page.
    turn = len(stored.turns) if shown["field"] == "final_observation" else shown["turn"]
    back = f"{key.url(page=(turn - 1) // TURNS_PER_PAGE + 1)}#turn-{turn}" if turn else key.url()
    return page_of("view/text.html", name=key.run, key=key, back=back, **shown)


def long_text(request: Request, stored: StoredEpisode) -> Mapping[str, Any]:
    """What the page of a text shows; raises HTTPException where the episode has no such text."""
    field, turn = query.text(request, "field"), query.number(request, "turn")
    page, whole = query.page(request, TEXT_PART), stored.text(field, turn)
    if whole is None:
        raise HTTPException(404, f"the episode has no such text: {field!r:.40}")
    return {
        "field": field,
        "turn": turn,
        "part": page.of(whole),
        "num_characters": len(whole),
        "page": page.number,
        "pages": page.links(len(whole)),
    }


def failures(site: Site, request: Request) -> Response:
    """The patterns of failure, each with what it means and how often it came."""
    name, source = query.text(request, "run"), query.choice(request, "source", list(FILES))
    patterns = site.patterns(name, source)
    index, path = site.index(name, source)
    examples = {
        pattern: lists.selected(index, path, Filters(failure=pattern))[:NUM_EXAMPLES]
        for pattern, *_ in patterns
    }
    return page_of(
        "view/failures.html",
        name=name,
        source=source,
        other_sources=site.sources(name),
        patterns=patterns,
        examples={each: index.read(path, numbers) for each, numbers in examples.items()},
        num_episodes=site.num_episodes(name, source),
        damage=site.damage(name, num_episodes=len(index)) if source == "evaluation" else [],
    )
