"""Stage 2 of models of 0.5, 1.5 and 3 billion weights on a GPU, and TRL's A2POTrainer beside it.

    python -m benchmarks.gpu [--models 0.5B 1.5B 3B] [--rows ROW ...] [--device cuda] [--out FOLDER]

Weights are random in the shapes of Qwen2.5, since speed and memory do not depend on them; a name
may be a model folder in place of a size. An untrained model hardly ever ends a response, so every
response has all its tokens, in our runs as in TRL's. Two workloads:

- `episodes`: the catalogue shop, 10 turns of 32 tokens, 32 episodes a step (Stage 2 of `apo_turn`),
  with all weights in mixed precision and with adapters of rank 16 over bfloat16 weights; and as a
  control with passes that the host launches kernel by kernel, as our runs did before
  `ragen_apo.policy.recorded_passes`;
- `questions`: one turn of 128 tokens, 32 questions a step, which TRL's A2POTrainer can do as well:
  the same model, questions, tokens, batch of a pass and number format.

Layers are computed again in the backward pass (gradient checkpointing), in our runs as in TRL's. No
run directory is written: of 3 billion weights it would take 60 GB. Every row is a process of its
own with three steps, of which the last two count. A row that fails, for want of memory or
otherwise, or takes more than --seconds, says so. With --device cpu it runs anywhere, in float32.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from benchmarks.tables import write_page
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from ragen_apo.agent.assembly import build_environments, build_proxy
from ragen_apo.api import read_config
from ragen_apo.environments.base import make_environment
from ragen_apo.policy.recorded_passes import RecordedPasses
from ragen_apo.policy.tokenizer import train_tokenizer
from ragen_apo.progress import SilentProgress
from ragen_apo.run_directory import RunDirectory
from ragen_apo.session import open_session
from ragen_apo.stages.memory import plan_memory
from ragen_apo.training.optimization import Optimizer
from ragen_apo.training.trainer import Trainer
from ragen_apo.values.state_values import ReferenceValues
from ragen_apo.warm_start.batches import play_for_tokenizer, texts_of

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "0.5B": {"hidden": 896, "layers": 24, "heads": 14, "kv_heads": 2, "intermediate": 4864},
    "1.5B": {"hidden": 1536, "layers": 28, "heads": 12, "kv_heads": 2, "intermediate": 8960},
    "3B": {"hidden": 2048, "layers": 36, "heads": 16, "kv_heads": 2, "intermediate": 11008},
    "tiny": {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 128},
}
"""Of Qwen2.5, from the configurations of its repositories; `tiny` is for trying this script."""
VOCABULARY = {"tiny": 2048}
"""Rows of the embedding table; 151,936 otherwise."""
BATCH, STEPS, MICRO_BATCH = 32, 3, 8
QUESTION_TOKENS = 128
UNRECORDED = "episodes, nothing recorded"
OURS: Mapping[str, tuple[str, bool]] = {
    "episodes, all weights": ("episodes", False),
    "episodes, adapters": ("episodes", True),
    UNRECORDED: ("episodes", False),
    "questions, all weights": ("questions", False),
}
"""Rows of the table: a workload, and whether adapters are trained."""
TRL = "questions, TRL"
ROWS = (*OURS, TRL)
GIB = 2**30
NOTES = f"""`episodes` are 10 turns of 32 tokens in the catalogue shop. `questions` are one turn of
{QUESTION_TOKENS} tokens. A step has {BATCH} tasks, and a pass has {MICRO_BATCH}.
A row is the mean of the {STEPS - 1} steps after the first. Memory is the peak of the allocator on a
GPU. Beside it stands the most that the run's own plan expected. The docstring of the script says
the rest."""
HEADER = (
    "model",
    "workload",
    "step",
    "rollouts + training",
    "sampled tokens/s",
    "memory",
    "planned at most",
    "why there is nothing",
)


def random_model(size: str, folder: Path, *, device: str) -> Path:
    """A model folder with these shapes and a tokenizer of the shop's words."""
    shape, config = SHAPES[size], read_config({"environment": {"name": "shop"}})
    environments = build_environments(config.environment, config.agent)
    demonstrations = config.warm_start.demonstrations
    texts = texts_of(play_for_tokenizer(demonstrations, environments, seed=config.seed))
    tokenizer = train_tokenizer(texts, vocab_size=2048)
    network = Qwen2Config(
        vocab_size=VOCABULARY.get(size, 151_936),
        hidden_size=shape["hidden"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        intermediate_size=shape["intermediate"],
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen2ForCausalLM(network).to(torch.bfloat16)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def sections(workload: str, *, model: str, device: str, adapters: bool) -> dict[str, Any]:
    """The configuration of a run of ours."""
    on_gpu = device == "cuda"
    machine = {"device": device, "num_threads": None if on_gpu else torch.get_num_threads()}
    machine["gradient_checkpointing"] = True
    if on_gpu:
        machine |= {"dtype": "bfloat16"} if adapters else {"mixed_precision": "bfloat16"}
    shared = {
        "machine": machine,
        "policy": {"path": model, "lora": {"rank": 16} if adapters else None},
        "warm_start": {"enabled": False},
        "rollout_filter": {"zero_variance": "keep"},  # all returns are equal
        "training": {
            "max_steps": STEPS,
            "max_tasks": BATCH,
            "tasks_per_step": BATCH,
            "micro_batch_size": MICRO_BATCH,
            "num_rows": BATCH,
            "eval_every": None,
        },
        "monitors": {"every_steps": None},
        "optimizer": {"learning_rate": 1e-6},
        "values": {"num_samples": 1},
    }
    if workload == "episodes":
        agent = {"max_response_tokens": 32, "max_context_tokens": 4096}
        environment = {"name": "shop", "max_turns": 10}
        return shared | {
            "algorithm": {"name": "apo_turn"},
            "agent": agent,
            "environment": environment,
        }
    agent = {"max_response_tokens": QUESTION_TOKENS, "max_context_tokens": 512}
    return shared | {
        "algorithm": {"name": "apo"},
        "agent": agent,
        "environment": {"name": "questions", "data": "arithmetic"},
    }


def ours(workload: str, *, model: str, device: str, adapters: bool, folder: Path) -> dict[str, Any]:
    """Seconds of rollouts and training, tokens and memory of the last two of some steps."""
    config = read_config(sections(workload, model=model, device=device, adapters=adapters))
    session = open_session(config, RunDirectory(folder / "run"), SilentProgress())
    policy = session.load_policy(model)
    max_turns = session.environments.properties.max_turns
    plan = plan_memory(config, policy, max_turns=max_turns)
    reference = policy.without_adapters() if adapters else session.load_model(model)
    if not adapters:
        reference.model.requires_grad_(False)
    tasks = session.training_tasks()
    trainer = Trainer(
        config,
        policy=policy,
        reference=reference,
        proxy=build_proxy(config, policy, session.environments),
        tasks=tasks,
        values=ReferenceValues({task.task_id: 0.0 for task in tasks}),
        algorithm=config.algorithm.make(config, policy),
        optimizer=Optimizer(policy.model),
    )
    rows = [trainer.step(step).metrics for step in range(STEPS)][1:]

    def mean(name: str) -> float:
        return fmean(row[name] for row in rows)

    return {
        "rollout_seconds": mean("rollout_seconds"),
        "training_seconds": mean("training_seconds"),
        "tokens": mean("num_generated_tokens"),
        "memory": torch.cuda.max_memory_allocated() if device == "cuda" else None,
        "planned": plan.total,
    }


def trl(*, model: str, device: str, folder: Path) -> dict[str, Any]:
    """Seconds a step of TRL's trainer on the same questions; its Stage 1 does not count."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.experimental.a2po import A2POConfig, A2POTrainer

    ended: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not ended:
                ended.append(_now(device))

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ended.append(_now(device))

    tasks = make_environment("questions", {"data": "arithmetic"}).tasks("train")[:BATCH]
    prompts = [[{"role": "user", "content": task.instruction}] for task in tasks]
    on_gpu = device == "cuda"
    trainer = A2POTrainer(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=A2POConfig(
            output_dir=str(folder / "trl"),
            max_steps=STEPS,
            per_device_train_batch_size=MICRO_BATCH,
            gradient_accumulation_steps=BATCH // MICRO_BATCH,
            max_completion_length=QUESTION_TOKENS,
            num_value_samples=1,
            filter_all_incorrect=False,
            learning_rate=1e-6,
            gradient_checkpointing=True,
            bf16=on_gpu,
            tf32=on_gpu or None,
            use_cpu=not on_gpu,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        callbacks=[Clock()],
    )
    trainer.train()
    seconds = [end - start for start, end in itertools.pairwise(ended)][1:]
    memory = torch.cuda.max_memory_allocated() if on_gpu else None
    return {"step_seconds": fmean(seconds), "tokens": BATCH * QUESTION_TOKENS, "memory": memory}


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measured(row: str, *, model: str, device: str, folder: Path) -> dict[str, Any]:
    """What a row measures; in a process of its own."""
    if row == TRL:
        return trl(model=model, device=device, folder=folder)
    workload, adapters = OURS[row]
    if row == UNRECORDED:
        RecordedPasses.run = lambda _, compute, inputs, **__: compute(*inputs)
    return ours(workload, model=model, device=device, adapters=adapters, folder=folder)


def in_a_process(
    row: str, *, model: str, device: str, threads: int, seconds: float
) -> dict[str, Any]:
    """The numbers of a row, or why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "benchmarks.gpu", "--row", row, "--models", model),
            *("--device", device, "--out", folder, "--threads", str(threads)),
        ]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"took more than {seconds:g} s"}
        result = Path(folder) / "row.json"
        if done.returncode == 0 and result.exists():
            return json.loads(result.read_text())
    print(done.stderr[-3000:], file=sys.stderr)
    lines = done.stderr.strip().splitlines() or [f"ended with {done.returncode}"]
    return {"failed": lines[-1][:120]}


def cells(model: str, row: str, found: Mapping[str, Any]) -> list[str]:
    """A line of the table."""
    if "failed" in found:
        return [model, row, *["-"] * 5, found["failed"]]
    rollout, training = found.get("rollout_seconds"), found.get("training_seconds")
    step = found.get("step_seconds") or rollout + training
    parts = "-" if rollout is None else f"{rollout:.2f} + {training:.2f}"
    memory, planned = (
        "-" if size is None else f"{size / GIB:.1f} GiB"
        for size in (found["memory"], found.get("planned"))
    )
    tokens = f"{found['tokens'] / step:,.0f}"
    return [model, row, f"{step:.2f} s", parts, tokens, memory, planned, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["0.5B", "1.5B", "3B"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="on a CPU")
    parser.add_argument("--out", type=Path, default=None, help="in place of benchmarks/results")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--seconds", type=float, default=900.0, help="the longest that a row takes")
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("this machine has no GPU that torch finds; --device cpu tries the script out")
    if args.row:
        (model,) = args.models
        found = measured(args.row, model=model, device=args.device, folder=args.out)
        (args.out / "row.json").write_text(json.dumps(found))
        return
    lines: list[Sequence[str]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.models:
            folder = Path(name)
            if name in SHAPES:
                folder = random_model(name, Path(scratch) / name, device=args.device)
            for row in args.rows:
                found = in_a_process(
                    row,
                    model=str(folder.absolute()),
                    device=args.device,
                    threads=args.threads,
                    seconds=args.seconds,
                )
                lines.append(cells(folder.name, row, found))
                print(" | ".join(lines[-1]), flush=True)
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else "no GPU: a CPU in float32"
    write_page(
        "gpu",
        title="Stage 2 of larger models, and TRL's A2POTrainer",
        notes=f"{gpu}. {NOTES}",
        header=HEADER,
        rows=lines,
        suffix="" if args.device == "cuda" else "_cpu",
        **({} if args.out is None else {"folder": args.out}),
    )


if __name__ == "__main__":
    main()
