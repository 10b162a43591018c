"""The value store: its tasks, and the samples of one."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ragen_apo.report.coverage import passes
from ragen_apo.web.pages import page_of
from ragen_apo.web.view import query
from ragen_apo.web.view.lists import PAGE_SIZE
from ragen_apo.web.view.query import REFERENCE, EpisodeKey
from ragen_apo.web.view.site import Site
from ragen_apo.web.view.value_store import StoredTask, all_conditions, instructions, sample_numbers

TASK_ORDERS = ("lowest", "highest", "samples")


def values(site: Site, request: Request) -> Response:
    """The tasks of the value store by V*."""
    name, page = query.text(request, "run"), query.page(request, PAGE_SIZE)
    order, path = query.choice(request, "order", TASK_ORDERS), site.store(name).path
    conditions = all_conditions(path)
    digest = query.text(request, "conditions") or next(iter(conditions), "")
    stored = site.stored(name, digest)
    tasks = _ordered(stored.tasks, order)
    page = page.within(len(tasks))
    shown = page.of(tasks)
    return page_of(
        "view/values.html",
        name=name,
        conditions=conditions,
        digest=digest,
        coverage=stored.coverage,
        passes=passes(stored.coverage),
        order=order,
        orders=TASK_ORDERS,
        tasks=shown,
        instructions=instructions(path, digest, [task.task_id for task in shown]),
        page=page.number,
        pages=page.links(len(tasks)),
    )


def samples(site: Site, request: Request) -> Response:
    """What the reference did on a task."""
    name, task = query.text(request, "run"), query.text(request, "task")
    digest, path = query.text(request, "conditions"), site.store(name).path
    tasks = site.stored(name, digest).tasks
    found = next((each for each in tasks if each.task_id == task), None)
    if found is None:
        raise HTTPException(404, f"the value store of {name} has no such task")
    return page_of(
        "view/samples.html",
        name=name,
        digest=digest,
        task=found,
        instruction=instructions(path, digest, [task])[task],
        samples=[
            (EpisodeKey(name, REFERENCE, index, digest, task), value, success, num_turns)
            for index, value, success, num_turns in sample_numbers(path, digest, task)
        ],
    )


def _ordered(tasks: Sequence[StoredTask], order: str) -> Sequence[StoredTask]:
    """The tasks, which come with the lowest V* first."""
    if order == "highest":
        return tasks[::-1]
    if order == "samples":
        return sorted(tasks, key=lambda task: -task.num_samples)
    return tasks
