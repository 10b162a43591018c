"""What a person plays in the browser: kept, trained on, and beside what the agent did."""

import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from urllib.request import urlopen

import pytest

from ragen_apo.environments.base import make_environment
from ragen_apo.environments.human.recordings import read_recordings
from ragen_apo.environments.shop import ShopEnvironment
from ragen_apo.errors import RunDirectoryError
from ragen_apo.evaluation.summary import episode_rows
from ragen_apo.files import read_json_lines, write_json_lines_atomically
from ragen_apo.report.episodes import Episode
from ragen_apo.run_directory import RunDirectory
from ragen_apo.web.shop.goals import AgentEpisodes, agent_episodes, config_of_run
from ragen_apo.web.shop.visits import Shop, Visits
from tests import factories
from tests.command_line import Command, assert_refused
from tests.forks import forked_command
from tests.web.shopping import Visitor, shop_of


@pytest.fixture
def environment() -> ShopEnvironment:
    """The shop of the tiny configuration."""
    return ShopEnvironment(num_products=24, max_turns=3)


@pytest.fixture
def visitor(environment: ShopEnvironment, tmp_path: Path) -> Visitor:
    visitor = Visitor(Visits(shop_of(environment, tmp_path / "kept")))
    visitor.come_in()
    return visitor


def shop_to_a_purchase(visitor: Visitor, environment: ShopEnvironment, number: int = 0) -> None:
    goal = environment.tasks("train")[number].payload["product_id"]
    visitor.search(environment.catalogue.by_id[goal].title)
    visitor.press(f"buy {goal}")


def test_a_kept_episode_is_a_recording_of_what_was_played(
    environment: ShopEnvironment, visitor: Visitor, tmp_path: Path
) -> None:
    shop_to_a_purchase(visitor, environment)
    visitor.send("/shop/keep")
    assert "kept" in visitor.text
    ((recording,), unreadable) = read_recordings(tmp_path / "kept")
    assert unreadable == []
    assert recording.environment_version == environment.properties.version
    assert recording.episode.task == environment.tasks("train")[0]
    assert [turn.action for turn in recording.episode.turns] == visitor.actions
    assert recording.episode.success


def test_an_episode_is_kept_once_and_can_be_removed(
    environment: ShopEnvironment, visitor: Visitor, tmp_path: Path
) -> None:
    shop_to_a_purchase(visitor, environment)
    page = visitor.page_number
    visitor.send("/shop/keep", page=page)
    visitor.send("/shop/keep", page=page)
    assert len(list((tmp_path / "kept").iterdir())) == 1
    visitor.page = visitor.client.get("/shop").text
    visitor.send("/shop/discard")
    assert list((tmp_path / "kept").iterdir()) == []
    assert "Keep as a demonstration" in visitor.text


@pytest.mark.parametrize("task_id", ["../../outside/x", "/outside/x", "..", "a\\b:c", "x" * 400])
def test_a_task_id_of_a_strangers_run_names_a_file_in_the_folder(
    task_id: str, environment: ShopEnvironment, tmp_path: Path
) -> None:
    task = replace(environment.tasks("train")[0], task_id=task_id)
    played = {"episode": 0, "task": task, "success": True, "return": 1.0, "num_turns": 0}
    played |= {"stop_reason": "", "failure": None, "final_observation": "", "turns": ()}
    episode = Episode.model_validate(played)
    shop = shop_of(environment, tmp_path / "kept", agent=AgentEpisodes("a", {task_id: [episode]}))
    visitor = Visitor(Visits(shop))
    visitor.come_in()
    shop_to_a_purchase(visitor, environment)
    visitor.send("/shop/keep")
    assert [path.parent for path in tmp_path.rglob("*.jsonl")] == [tmp_path / "kept"]


def test_an_episode_under_way_is_not_kept(visitor: Visitor, tmp_path: Path) -> None:
    visitor.search("mug")
    visitor.send("/shop/keep")
    assert "when it has come to its end" in visitor.text
    assert not (tmp_path / "kept").exists()


def test_an_episode_on_a_goal_for_evaluation_is_not_kept(
    environment: ShopEnvironment, tmp_path: Path
) -> None:
    visitor = Visitor(Visits(shop_of(environment, tmp_path / "kept", split="test")))
    visitor.come_in()
    visitor.send("/shop/act", action=f"buy {environment.catalogue.products[0].product_id}")
    assert "This goal is for evaluation (split test)" in visitor.text
    assert "Keep as a demonstration" not in visitor.text
    visitor.send("/shop/keep")
    assert not (tmp_path / "kept").exists()


def test_a_folder_that_cannot_be_written_is_said(
    environment: ShopEnvironment, visitor: Visitor, tmp_path: Path
) -> None:
    (tmp_path / "kept").write_text("a file where the folder would be")
    shop_to_a_purchase(visitor, environment)
    visitor.send("/shop/keep")
    assert "The episode could not be kept" in visitor.text


@pytest.mark.slow
def test_a_warm_start_trains_on_what_was_kept_in_the_browser(
    environment: ShopEnvironment, visitor: Visitor, tmp_path: Path, command: Command, config: Path
) -> None:
    for number in range(2):
        shop_to_a_purchase(visitor, environment, number)
        visitor.send("/shop/keep")
        visitor.send("/shop/goal")
    key = ("--warm_start.demonstrations.recordings", tmp_path / "kept")
    trained = command("warm-start", "--config", config, "--run-dir", tmp_path / "run", *key)
    assert trained.status == 0, trained.err
    assert "2 recorded episodes" in trained.out + trained.err
    run = RunDirectory(tmp_path / "run")
    used = [row["episode"]["task"]["task_id"] for row in read_json_lines(run.recordings)]
    assert sorted(used) == sorted(task.task_id for task in environment.tasks("train")[:2])
    losses = [
        row["loss"] for row in read_json_lines(run.warm_start) if row["phase"] == "demonstrations"
    ]
    assert losses[-1] < losses[0]


# Beside the agent


@pytest.fixture
def shop_of_run(finished_run: Path, tmp_path: Path) -> Shop:
    config = config_of_run(finished_run)
    return shop_of(
        make_environment(config.environment.name, config.environment.options),
        tmp_path / "kept",
        split=config.evaluation.split,
        agent=agent_episodes(finished_run),
    )


def test_the_goals_of_a_run_are_those_that_its_agent_has_played(
    finished_run: Path, shop_of_run: Shop
) -> None:
    rows = read_json_lines(RunDirectory(finished_run).episodes)
    played = dict.fromkeys(row["task"]["task_id"] for row in rows)
    assert [task.task_id for task in shop_of_run.goals] == list(played)


def test_all_goals_of_a_run_with_several_splits_are_there(
    finished_run: Path, shop_of_run: Shop, tmp_path: Path
) -> None:
    agent, environment = agent_episodes(finished_run), shop_of_run.environment
    assert agent.split == "test"
    everything = shop_of(environment, tmp_path, split="all", agent=agent)
    assert [*everything.goals] == [*shop_of_run.goals]


def test_a_run_that_was_evaluated_on_all_splits_offers_all_its_goals() -> None:
    tasks = [factories.task(split, split=split) for split in ("train", "test")]
    assert AgentEpisodes(by_task={}).split == ""
    rows = episode_rows([factories.episode(factories.turn(), task=t) for t in tasks], policy="x")
    found = {row["task"]["task_id"]: [Episode.model_validate(row)] for row in rows}
    assert AgentEpisodes(by_task=found).split == "all"


def test_the_agents_episode_on_the_same_goal_stands_beside_it(
    finished_run: Path, shop_of_run: Shop
) -> None:
    visitor = Visitor(Visits(shop_of_run))
    visitor.come_in()
    rows = read_json_lines(RunDirectory(finished_run).episodes)
    first = next(row for row in rows if row["task"]["task_id"] == shop_of_run.goals[0].task_id)
    assert first["task"]["instruction"] in visitor.text
    assert first["turns"][0]["observation"] in visitor.text
    assert f"{first['return']:+.2f} in {first['num_turns']}" in visitor.text


def test_what_the_agent_did_is_folded_until_the_end(shop_of_run: Shop) -> None:
    visitor = Visitor(Visits(shop_of_run))
    visitor.come_in()
    assert "<details open>" not in visitor.page
    visitor.send("/shop/act", action=f"buy {shop_of_run.goals[0].payload['product_id']}")
    assert "<details open>" in visitor.page
    assert "The agent earned" in visitor.text


def test_goals_that_the_agent_has_not_played_have_no_episode(
    finished_run: Path, tmp_path: Path
) -> None:
    config = config_of_run(finished_run)
    shop = shop_of(
        make_environment(config.environment.name, config.environment.options),
        tmp_path / "kept",
        split="train",
        agent=agent_episodes(finished_run),
    )
    visitor = Visitor(Visits(shop))
    visitor.come_in()
    assert "It has no evaluated episode on this goal" in visitor.text


def test_hostile_text_of_a_run_stays_text(run: Path, tmp_path: Path) -> None:
    hostile = "</pre><script>alert(1)</script>\x1b[2J\u202e"
    rows = read_json_lines(RunDirectory(run).episodes)
    for row in rows:
        row["final_observation"] = hostile
        for turn in row["turns"]:
            turn.update(dict.fromkeys(("observation", "thought", "action", "response"), hostile))
    write_json_lines_atomically(RunDirectory(run).episodes, rows)
    environment = ShopEnvironment(num_products=24, max_turns=3)
    agent = agent_episodes(run)
    visitor = Visitor(Visits(shop_of(environment, tmp_path, split="test", agent=agent)))
    visitor.come_in()
    assert "&lt;script&gt;" in visitor.page
    assert not re.search("<script|\x1b|\u202e", visitor.page)


def test_an_evaluation_that_is_written_meanwhile_changes_no_page(run: Path) -> None:
    agent = agent_episodes(run)
    before = agent.of(agent.tasks[0])
    write_json_lines_atomically(RunDirectory(run).episodes, [{"more": 1}])
    assert agent.of(agent.tasks[0]) == before


def test_a_run_without_an_evaluation_is_refused(run: Path) -> None:
    RunDirectory(run).episodes.unlink()
    with pytest.raises(RunDirectoryError, match="was not evaluated"):
        agent_episodes(run)


@pytest.mark.parametrize("damage", [lambda text: "[]", lambda text: text.replace("name:", "nme:")])
def test_a_run_with_a_damaged_configuration_is_refused(
    damage: Callable[[str], str], run: Path
) -> None:
    path = RunDirectory(run).config
    path.write_text(damage(path.read_text()))
    with pytest.raises(RunDirectoryError, match=r"config\.yaml"):
        config_of_run(run)


def test_code_that_a_run_names_is_not_executed(
    command: Command, finished_run: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(finished_run, tmp_path / "run"))
    code = tmp_path / "theirs.py"
    code.write_text(f"open({str(tmp_path / 'executed')!r}, 'w').close()")
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("name: shop", f"name: {code}:make"))
    refused = command("serve", "shop", "--run", run)
    assert_refused(refused, "names Python code")
    assert not (tmp_path / "executed").exists()


def test_a_run_brings_its_own_environment(command: Command, finished_run: Path) -> None:
    refused = command("serve", "shop", "webshop", "--run", finished_run)
    assert refused.status == 2
    assert "--run goes without an environment and its options" in refused.err


def test_the_command_refuses_what_is_no_shop(command: Command) -> None:
    refused = command("serve", "shop", "bandit")
    assert refused.status == 2
    assert "bandit is no shop; expected shop or webshop" in refused.err


@pytest.mark.slow
def test_the_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    output, folder = tmp_path / "output", tmp_path / "folder"
    folder.mkdir()
    command = ("serve", "shop", "--port", 0)
    server = forked_command(output, *command, before=lambda: os.chdir(folder))
    address = server.says(r"(?m)^open .*\n").split()[1]
    assert address.startswith("http://127.0.0.1:")
    assert "Shop as the agent does" in urlopen(address).read().decode()
    server.send(signal.SIGINT)
    said = server.ended()
    assert server.returncode == 0, said
    assert list(folder.iterdir()) == []
