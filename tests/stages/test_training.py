"""Stage 2 as a stage of a run: when the policy becomes the new reference."""

from pathlib import Path

import pytest

from ragen_apo.files import read_json_lines
from tests import factories
from tests.factories import AlgorithmRuns


@pytest.mark.slow
@pytest.mark.parametrize(("max_kl", "versions"), [(1e-12, [0, 1, 2, 3]), (1e9, [0, 0, 0, 0])])
def test_a_policy_farther_from_its_reference_than_the_limit_becomes_the_new_one(
    max_kl: float, versions: list[int], algorithm_runs: AlgorithmRuns, tmp_path: Path
) -> None:
    keys = ["--training.checkpoint_every=1", f"--reference.refresh_max_kl={max_kl}"]
    config = algorithm_runs.config("rloo", "--algorithm.num_minibatches=2", *keys)
    rows = read_json_lines(factories.run(config, tmp_path / "run").metrics)
    # The first update starts at the reference, so the second of a step is what leaves it.
    assert [row["reference_version"] for row in rows] == versions
    assert all(row["kl_per_sequence"] < 1e9 for row in rows)
