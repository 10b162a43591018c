"""What all tests share: one thread for torch, no deadlines, what they have run and built."""

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import IO, Any, NoReturn

import hypothesis
import pytest
import torch
from PIL import Image
from transformers import PreTrainedTokenizerBase

from ragen_apo import cli
from ragen_apo.config.algorithms import OWN
from ragen_apo.errors import ConfigError
from ragen_apo.progress import SilentProgress
from ragen_apo.report.pdf import require_pdf
from ragen_apo.run_directory import RunDirectory
from ragen_apo.session import Session, open_session
from ragen_apo.training import batching
from tests import factories
from tests.chat_templates import with_template
from tests.command_line import Command, Result
from tests.factories import TINY_CONFIG, AlgorithmRuns, made_once, threads_restored
from tests.hub_cache import HubCache, use_cache

# A busy machine makes single examples slow; that is no failure.
hypothesis.settings.register_profile("ragen-apo", deadline=None)
hypothesis.settings.load_profile("ragen-apo")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def imports_restored() -> Iterator[None]:
    """An environment or an algorithm that a test takes from a file leaves neither its folder nor
    its module.
    """
    folders, newest = list(sys.path), next(reversed(sys.modules))
    yield
    OWN.clear()
    sys.path[:] = folders
    for name in [*takewhile(lambda name: name != newest, reversed(sys.modules))]:
        if re.search(r"_[0-9a-f]{12}$", name):  # as `config.named_code` names them
            del sys.modules[name]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all processes that run these tests, for what one of them makes."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def finished_run(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the tiny configuration, trained and evaluated without interruption; read only.

    Of several processes that run tests one makes it, and each has a copy.
    """
    own = tmp_path_factory.mktemp("finished") / "run"
    shutil.copytree(made_once(shared / "finished", _train_and_evaluate), own)
    return own


def _train_and_evaluate(run: Path) -> None:
    config = run.with_name("tiny.yaml")
    config.write_text(TINY_CONFIG)
    with threads_restored():
        train = ["train", "--config", str(config), "--run-dir", str(run), "--no-evaluate"]
        cli.app(train, result_action="return_value")
        cli.app(["evaluate", str(run)], result_action="return_value")


@pytest.fixture
def session(finished_run: Path, tmp_path: Path) -> Iterator[Session]:
    """Work on a copy of the finished run, with the tiny configuration."""
    shutil.copytree(finished_run, tmp_path / "copy")
    with threads_restored():
        yield open_session(factories.config(), RunDirectory(tmp_path / "copy"), SilentProgress())


@pytest.fixture(scope="session")
def algorithm_runs(shared: Path) -> AlgorithmRuns:
    """Configurations of all algorithms and their runs, from the finished run's reference."""
    finished = made_once(shared / "finished", _train_and_evaluate)
    return AlgorithmRuns(finished / "references" / "0", shared / "algorithms")


@pytest.fixture(scope="session")
def shop_texts() -> list[str]:
    """What the teacher reads and writes on the shop's training tasks, three episodes a task."""
    from ragen_apo.agent.environment_manager import EnvironmentManager
    from ragen_apo.agent.proxy import EpisodeRequest
    from ragen_apo.agent.scripted import play_scripted_episodes
    from ragen_apo.environments.shop import ShopEnvironment

    manager = EnvironmentManager(ShopEnvironment, format_penalty=0.0, invalid_action_penalty=0.0)
    tasks = manager.tasks("train")
    requests = [EpisodeRequest(task, seed) for seed in range(3) for task in tasks]
    episodes = play_scripted_episodes(
        manager.scripted_policies()["teacher"], manager, requests, policy_version="teacher"
    )
    turns = [turn for episode in episodes for turn in episode.turns]
    return [text for turn in turns for text in (turn.observation, turn.response)]


@pytest.fixture(scope="session")
def shop_tokenizer(shop_texts: list[str]):
    """The project's own tokenizer with the vocabulary size of the default configuration."""
    from ragen_apo.config.policy import SmallModelConfig
    from ragen_apo.policy.tokenizer import train_tokenizer

    return train_tokenizer(shop_texts, vocab_size=SmallModelConfig().vocab_size)


@pytest.fixture(scope="session")
def tiny_model(shop_tokenizer):
    """The default architecture in miniature, untrained; tests leave its weights alone."""
    from ragen_apo.config.policy import SmallModelConfig
    from ragen_apo.policy.language_model import build_small_model

    sizes = SmallModelConfig(
        hidden_size=32, num_layers=2, num_heads=4, intermediate_size=64, max_position=1024
    )
    return build_small_model(shop_tokenizer, sizes, seed=0)


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def chatml_tokenizer(shop_texts: list[str]):
    """A tokenizer as pretrained models have it: an end token, and tags of several tokens each."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(shop_texts[:200], trainer=trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHATML
    return wrapped


@pytest.fixture(scope="session")
def real_template(chatml_tokenizer) -> Callable[[str], PreTrainedTokenizerBase]:
    """Gives the tokenizer the chat template of a real model, by its name in TRL's package."""
    folder = Path(str(pytest.importorskip("trl").__file__)).parent / "chat_templates"
    tokens = ["<tool_call>", "</tool_call>", "<|start_header_id|>", "<|end_header_id|>"]

    def tokenizer_of(model: str) -> PreTrainedTokenizerBase:
        template = (folder / f"{model}.jinja").read_text(encoding="utf-8")
        tokenizer = with_template(chatml_tokenizer, template, tokens=["<|eot_id|>"])
        tokenizer.add_tokens([*tokens, "<tool_response>", "</tool_response>"])
        return tokenizer

    return tokenizer_of


QWEN_TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}" + CHATML
)
"""Like that of Qwen2.5-Instruct: a conversation without a system message gets one."""


@pytest.fixture(scope="session")
def qwen_folder(chatml_tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as of a pretrained Qwen2.5-Instruct: its architecture, tiny and untrained."""
    import copy

    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("models") / "tiny-qwen"
    tokenizer = copy.deepcopy(chatml_tokenizer)
    tokenizer.chat_template = QWEN_TEMPLATE
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def few_random_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values by regression, which take seconds to fit, are fitted in a fiftieth of the time."""
    from ragen_apo.values import regression

    monkeypatch.setattr(regression, "NUM_FEATURES", 256)


@pytest.fixture
def fewest_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes on this CPU are as few as they can be, for tests that count them."""
    monkeypatch.setattr(batching, "TOKENS_PER_PASS", batching.FEWEST_PASSES)


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user has no home directory and no name, as in `docker run --user 12345`."""

    def unknown(uid: int) -> NoReturn:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are blank, of the size that they have: nine tenths of a report's time is drawing."""

    def blank(canvas: Any, stream: IO[bytes], **_: object) -> None:
        Image.new("1", canvas.get_width_height()).save(stream, "PNG")

    name = "matplotlib.backends.backend_agg.FigureCanvasAgg.print_png"
    monkeypatch.setattr(name, blank)


@pytest.fixture(scope="session")
def weasyprint() -> None:
    """For tests that print: skips them where WeasyPrint is not installed or finds no Pango."""
    try:
        require_pdf()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubCache:
    """An empty cache of the Hugging Face hub, which is all of the hub that there is here."""
    return use_cache(tmp_path / "huggingface", monkeypatch)


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`say(model, token_ids)`: playing one row at a time, the model samples these tokens."""

    def force(model, token_ids: Sequence[int]) -> None:
        remaining = iter(token_ids)

        def logits(hidden_NH: torch.Tensor) -> torch.Tensor:
            assert len(hidden_NH) == 1, "one row at a time"
            scores = torch.zeros(1, len(model.tokenizer))
            scores[0, next(remaining)] = 1e4
            return scores

        monkeypatch.setattr(model, "logits", logits)

    return force


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Command]:
    """Runs the entry point in this process."""

    def command(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["ragen-apo", *map(str, arguments)])
        status = 0
        try:
            cli.main()
        except SystemExit as exit_request:
            status = exit_request.code if isinstance(exit_request.code, int) else 0
        captured = capsys.readouterr()
        return Result(status, captured.out, captured.err)

    with threads_restored():
        yield command


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A file with the tiny configuration."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY_CONFIG)
    return path


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    """A finished run that a test may damage."""
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


@pytest.fixture
def unfinished(run: Path) -> Path:
    """A run that has made its last step and not saved its policy yet."""
    shutil.rmtree(run / "policy")
    return run
