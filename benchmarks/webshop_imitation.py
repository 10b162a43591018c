"""Where does the student leave its teacher? What a reference would say in its teacher's place.

    python -m benchmarks.webshop_imitation RUN [--split validation] [--per-product 4]

The reference of a WebShop run reads the teacher's own episodes on goals of a split, a few of each
product, and says the likeliest next token at each place of a response. Prints one JSON object: of
how many responses that begin with the same thought how many have a wrong token, and examples. No
wrong token leads to another, as it would in play; see docs/log.md for what was found so.
"""

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ragen_apo.agent.assembly import build_context
from ragen_apo.config import load_config
from ragen_apo.environments.webshop import WebShopEnvironment
from ragen_apo.environments.webshop.goals import goal_book
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.progress import SilentProgress
from ragen_apo.run_directory import open_run
from ragen_apo.session import open_session
from ragen_apo.types import Trajectory, training_samples
from ragen_apo.warm_start.batches import play_demonstrations

NUM_EXAMPLES = 8
SHOWN = 12
"""Tokens of a response that are shown before its first wrong one."""


@torch.no_grad()
def responses(model: LanguageModel, episode: Trajectory) -> Iterator[tuple[str, str | None]]:
    """The kind of each response, and its first wrong token among others; None if all are right."""
    (sample,) = training_samples(episode)
    token_ids_T = torch.tensor(sample.token_ids)
    hidden_TH = model.hidden_states(token_ids_T[None], use_cache=False)[0]
    said = torch.tensor(sample.loss_mask).nonzero()[:, 0]
    likeliest = model.logits(hidden_TH[said - 1]).argmax(-1)
    gaps = (said.diff() > 1).nonzero()[:, 0] + 1
    for places, guesses in zip(said.tensor_split(gaps), likeliest.tensor_split(gaps), strict=True):
        tokens = token_ids_T[places]
        thought = str(model.tokenizer.decode(tokens)).partition("</think>")[0]
        kind = thought.removeprefix("<think>").partition(":")[0]
        wrong = (tokens != guesses).nonzero()[:, 0].tolist()
        if not wrong:
            yield kind, None
            continue
        texts = tokens[max(wrong[0] - SHOWN, 0) : wrong[0]], tokens[wrong[0]], guesses[wrong[0]]
        before, right, got = (str(model.tokenizer.decode(text)) for text in texts)
        yield kind, f"{before}[{right}, got {got}]"


def imitation(run_folder: Path, *, split: str, per_product: int) -> dict[str, Any]:
    """The result for the reference of a run."""
    run = open_run(run_folder)
    config = load_config(run.config)
    session = open_session(config, run, SilentProgress())
    model = session.load_model(run.reference(0))
    teacher = config.warm_start.demonstrations.teacher
    environment = WebShopEnvironment(**config.environment.options)
    options = environment.options
    book = goal_book(environment.catalog, price_seed=options.price_seed, kind=options.goals)
    episodes = play_demonstrations(
        session.environments.scripted_policies()[teacher],
        session.environments,
        build_context(config.agent, model, session.environments),
        book.tasks(split, options.split_scheme, per_product=per_product),
        num_episodes_per_task=1,
        seed=config.seed,
    )
    found: dict[str, list[str | None]] = defaultdict(list)
    for episode in episodes:
        for kind, mistake in responses(model, episode):
            found[kind].append(mistake)
    kinds = {}
    for kind, each in sorted(found.items(), key=lambda item: -len(item[1])):
        mistakes = [mistake for mistake in each if mistake is not None]
        examples = random.Random(0).sample(mistakes, min(NUM_EXAMPLES, len(mistakes)))
        kinds[kind] = {"responses": len(each), "wrong": len(mistakes), "examples": examples}
    return {"teacher": teacher, "split": split, "episodes": len(episodes), "kinds": kinds}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run", type=Path, help="a run directory whose warm start is done")
    parser.add_argument("--split", default="validation")
    parser.add_argument("--per-product", type=int, default=4, help="goals of one product at most")
    arguments = parser.parse_args()
    result = imitation(arguments.run, split=arguments.split, per_product=arguments.per_product)
    print(json.dumps(result, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
