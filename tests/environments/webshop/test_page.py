"""The episode in docs/webshop.md is what the environment writes."""

import re
from pathlib import Path

from ragen_apo.environments.webshop import WebShopEnvironment

PAGE = Path(__file__).parents[3] / "docs" / "webshop.md"


def test_the_episode_of_the_page(store: Path) -> None:
    text = PAGE.read_text(encoding="utf-8").partition("## One episode")[2]
    shown = re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[0]
    opening, *turns = [part.splitlines() for part in re.split(r"^> ", shown, flags=re.MULTILINE)]
    assert len(turns) == 5

    shop = WebShopEnvironment(data="generated", store=store)
    observation, _ = shop.reset(shop.tasks("test")[1], seed=0)
    for action, lines in [(None, opening), *((turn[0], turn[1:]) for turn in turns)]:
        if action is not None:
            observation, *_ = shop.step(action)
        written = iter(observation.splitlines())
        for line in lines:
            if line and line != "    ...":  # where lines are left out
                assert line in written, f"{action}: {line!r} in this order in {observation!r}"
