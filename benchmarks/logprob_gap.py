"""How far apart sampling and scoring are: log-probabilities of the same tokens, same weights.

    python -m benchmarks.logprob_gap [FOLDER ...] [--episodes 64] [--turns 6]

Plays episodes of the shop token by token, as rollouts do, scores them in whole rows, as training
does, and takes the difference at every sampled token: what `logprob_gap_max` is the largest of. The
two add the same products up in another order, so the difference is rounding, and depends on the
number format and on the processor. Folders are models, such as `references/0` of a run; the small
model of the default configuration, untrained, is measured first.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from benchmarks.small_model import default_model
from benchmarks.tables import write_page
from torch import Tensor

from ragen_apo.agent.assembly import build_environments, build_proxy
from ragen_apo.agent.proxy import EpisodeRequest
from ragen_apo.config import RunConfig, parse_config
from ragen_apo.policy.language_model import LanguageModel, load_language_model
from ragen_apo.policy.scoring import score_tokens
from ragen_apo.seeding import derive_seed
from ragen_apo.training.batching import collate
from ragen_apo.types import Trajectory, training_samples

NOTES = """Numbers are nats, over all sampled tokens of the episodes (shop, temperature 1).
`autocast` is `machine.mixed_precision: bfloat16`. `bfloat16 weights` is
`machine.dtype: bfloat16`."""
PRECISIONS = {
    "float32": (torch.float32, None),
    "bfloat16 autocast": (torch.float32, torch.bfloat16),
    "bfloat16 weights": (torch.bfloat16, None),
}
"""Number format of the weights, and of the products."""
ROWS = 8
"""Episodes that are scored at once."""


def gaps(model: LanguageModel, config: RunConfig, *, num_episodes: int) -> Tensor:
    """|log-probability when sampled - when scored| of every sampled token."""
    environments = build_environments(config.environment, config.agent)
    requests = [
        EpisodeRequest(task, derive_seed(config.seed, "logprob-gap", index))
        for index, task in enumerate(environments.tasks("train")[:num_episodes])
    ]
    proxy = build_proxy(config, model, environments)
    episodes = proxy.rollout(requests, temperature=1.0, policy_version="benchmark")
    parts = [episodes[start : start + ROWS] for start in range(0, len(episodes), ROWS)]
    return torch.cat([_gaps_of(model, part) for part in parts])


@torch.no_grad()
def _gaps_of(model: LanguageModel, episodes: Sequence[Trajectory]) -> Tensor:
    samples = [sample for episode in episodes for sample in training_samples(episode)]
    batch = collate(samples, pad_id=model.pad_id, device=model.device)
    scored_BT = score_tokens(model, batch.token_ids_RT, batch.loss_mask_RT).logprobs_BT
    return (scored_BT - batch.sampled_logprobs_RT)[batch.loss_mask_RT].abs()


def row(
    name: str, folder: Path, precision: str, config: RunConfig, *, num_episodes: int
) -> list[object]:
    """One model in one number format."""
    dtype, autocast = PRECISIONS[precision]
    model = load_language_model(folder, device=torch.device("cpu"), dtype=dtype, autocast=autocast)
    gaps_N = gaps(model, config, num_episodes=num_episodes).double()
    shares = torch.tensor([0.5, 0.99], dtype=torch.float64)
    figures = [gaps_N.mean(), *gaps_N.quantile(shares), gaps_N.max()]
    return [name, precision, len(gaps_N), *(f"{figure.item():.2g}" for figure in figures)]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folders", type=Path, nargs="*", help="models, such as RUN/references/0")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--turns", type=int, default=6, help="of an episode at most")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--suffix", default="", help="of the page, for another processor")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    overrides = [f"--environment.max_turns={arguments.turns}"]
    config = parse_config("", source="the default configuration", overrides=overrides)
    with tempfile.TemporaryDirectory() as temporary:
        default_model(config).save(Path(temporary))
        models = {"small, untrained": Path(temporary)}
        models |= {str(folder): folder for folder in arguments.folders}
        rows = [
            row(name, folder, precision, config, num_episodes=arguments.episodes)
            for name, folder in models.items()
            for precision in PRECISIONS
        ]
    write_page(
        "logprob_gap",
        title="Log-probabilities when sampled and when scored",
        notes=NOTES,
        header=["model", "precision", "tokens", "mean", "median", "99%", "largest"],
        rows=rows,
        suffix=arguments.suffix,
    )


if __name__ == "__main__":
    main()
