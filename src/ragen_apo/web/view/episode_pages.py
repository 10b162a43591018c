"""Lists of episodes, an episode, its long texts, and failures by pattern."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ragen_apo.web.view import lists, query
from ragen_apo.web.view.episodes import text_of
from ragen_apo.web.view.lists import PAGE_SIZE, Filters
from ragen_apo.web.view.query import FILES, REFERENCE, Answer
from ragen_apo.web.view.shown import page_numbers
from ragen_apo.web.view.site import Site, render

TURNS_PER_PAGE = 25
TEXT_PART = 40_000
"""Characters of a long text on one page."""
NUM_EXAMPLES = 4


class EpisodePages:
    """What the agent did."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def answers(self) -> dict[str, Answer]:
        """Each address with what answers it."""
        return {
            "/episodes": self.episodes,
            "/episode": self.episode,
            "/text": self.text,
            "/failures": self.failures,
        }

    def episodes(self, request: Request) -> Response:
        """A list of episodes, filtered."""
        name, source = query.text(request, "run"), query.choice(request, "source", list(FILES))
        filters = Filters(
            outcome=query.choice(request, "outcome", lists.OUTCOMES),
            failure=query.text(request, "failure"),
            order=query.choice(request, "order", lists.ORDERS),
            find=query.text(request, "find"),
        )
        number = max(1, query.number(request, "page", 1))
        most = None if filters.needs_all else number * PAGE_SIZE + 1
        index, path = self._site.index(name, source, num_episodes=most)
        chosen = lists.selected(index, path, filters)
        is_whole = index.end >= path.stat().st_size
        shown = lists.page_of(index, path, chosen, page=number, is_whole=is_whole)
        return render(
            "episodes",
            name=name,
            source=source,
            other_sources=self._site.sources(name),
            filters=filters,
            shown=shown,
            pages=page_numbers(number, shown.num_pages) if shown.num_pages else (),
            patterns=self._site.pattern_names(name),
        )

    def episode(self, request: Request) -> Response:
        """An episode turn by turn."""
        place = query.place(request)
        shown, number = self._site.shown(place), max(1, query.number(request, "page", 1))
        start = (number - 1) * TURNS_PER_PAGE
        has_next = place.source != REFERENCE
        if has_next:
            index, _ = self._site.index(place.run, place.source, num_episodes=place.number + 2)
            has_next = place.number + 1 < len(index)
        return render(
            "episode",
            name=place.run,
            place=place,
            episode=shown,
            turns=shown.turns[start : start + TURNS_PER_PAGE],
            page=number,
            pages=page_numbers(number, max(1, -(-len(shown.turns) // TURNS_PER_PAGE))),
            shade=query.choice(request, "shade", ["surprise", "change"]),
            words=self._site.words(place.run, shown.failure),
            has_next=has_next,
            beta2=self._site.reader.record(place.run).option("algorithm", "beta2"),
        )

    def text(self, request: Request) -> Response:
        """A long text, a part at a time."""
        place, field = query.place(request), query.text(request, "field")
        number, turn = max(1, query.number(request, "page", 1)), query.number(request, "turn")
        whole = text_of(self._site.row(place), field, turn)
        if whole is None:
            raise HTTPException(404, f"the episode has no such text: {field!r:.40}")
        start = (number - 1) * TEXT_PART
        return render(
            "text",
            name=place.run,
            place=place,
            field=field,
            turn=turn,
            part=whole[start : start + TEXT_PART],
            num_characters=len(whole),
            page=number,
            pages=page_numbers(number, max(1, -(-len(whole) // TEXT_PART))),
        )

    def failures(self, request: Request) -> Response:
        """The patterns of failure, each with what it means and how often it came."""
        name, source = query.text(request, "run"), query.choice(request, "source", list(FILES))
        patterns = self._site.patterns(name, source)
        examples: dict[str, Sequence[lists.EpisodeLine]] = {}
        index, path = self._site.index(name, source)
        for pattern, *_ in patterns:
            chosen = lists.selected(index, path, Filters(failure=pattern))
            examples[pattern] = lists.episode_lines(index, path, chosen[:NUM_EXAMPLES])
        return render(
            "failures",
            name=name,
            source=source,
            other_sources=self._site.sources(name),
            patterns=patterns,
            examples=examples,
            num_episodes=len(index),
        )
