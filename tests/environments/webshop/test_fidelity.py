"""The recorded episodes of the original program, replayed by the command that anyone can run."""

import json
import sys
from pathlib import Path

import pytest
from benchmarks import webshop_fidelity


@pytest.mark.slow
def test_every_recorded_step_is_identical(
    real_data: Path,
    store: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    episodes = real_data / "traces.json.gz"
    arguments = ("--data", real_data, "--episodes", episodes, "--store", store)
    monkeypatch.setattr(sys, "argv", ["webshop_fidelity", *map(str, arguments)])
    webshop_fidelity.main()
    result = json.loads(capsys.readouterr().out)
    assert result["first_differences"] == []
    assert (result["episodes"], result["steps"], result["identical_steps"]) == (60, 589, 589)
    assert (result["goals"], result["identical_prices"]) == (6910, 1000)
    assert result["identical_reward_parts"] == result["finished_episodes"] == 57
