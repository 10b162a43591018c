"""The model card of a run's policy: what the Hugging Face hub shows of a model.

Its head is metadata that the hub reads (`model-index` has the evaluation), its text the findings of
the report.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from ragen_apo.config.references import file_of, is_reference
from ragen_apo.config.search import WITHOUT_SEARCH
from ragen_apo.config.yaml_text import dump_yaml, parse_yaml
from ragen_apo.report.algorithm import settings_of
from ragen_apo.report.failure_analysis import fenced, markdown
from ragen_apo.report.findings import headline, key_sentences
from ragen_apo.report.load import RunData, finite, mapping, with_leaves
from ragen_apo.report.style import one_line
from ragen_apo.report.tables import method_rows

_COLUMNS = ("success", "interval", "reward", "steps")


def model_card(run: RunData, *, license_id: str | None = None) -> str:
    """Markdown with the hub's metadata in front; no license is named unless one is given."""
    environment = _environment(run)
    sentences = "\n".join(f"- {_text(sentence)}" for sentence in key_sentences(run))
    card = f"""---
{_metadata(run, environment, license_id=license_id)}
---

# {_text(run.name)}

{_text(headline(run))}, in the environment `{environment}`.

{sentences}

{_table(run)}

{_usage(run)}

Trained with ragen-apo from this configuration:

{fenced(_configuration(run).strip(), language="yaml")}
"""
    return _without_home(card)


def _text(text: str) -> str:
    return markdown(_without_home(one_line(text)))


def _configuration(run: RunData) -> str:
    """As it was saved; of somebody's files that it names, not where they were."""
    saved, _ = parse_yaml(run.config_text)
    shown = with_leaves(saved, _without_folder)
    return run.config_text if shown == saved else dump_yaml(shown)


def _without_folder(value: Any) -> Any:
    file = file_of(value) if isinstance(value, str) and os.path.isabs(value) else None
    return value if file is None else f"{file.name}{value.rpartition('.py')[2]}"


def _environment(run: RunData) -> str:
    """Its name; of one that a file of somebody's makes, not where the file was."""
    name = str(run.option("environment", "name") or "unknown")
    return name.rpartition(":")[2] if is_reference(name) else name


def _metadata(run: RunData, environment: str, *, license_id: str | None) -> str:
    algorithm = settings_of(run)
    tags = ["ragen-apo", "agent", "reinforcement-learning"]
    alone = mapping(mapping(run.results.get("baselines")).get(WITHOUT_SEARCH))
    rate = finite((alone or run.results).get("success_rate"))  # what the model does without help
    evaluation = EvalResult(
        task_type="reinforcement-learning",
        task_name="multi-turn tasks",
        dataset_type=environment,
        dataset_name=environment,
        dataset_split=str(run.results.get("split") or "unknown"),
        metric_type="success_rate",
        metric_name="success rate",
        metric_value=rate,
    )
    data = ModelCardData(
        base_model=_base_model(run),
        license=license_id,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=tags if algorithm is None else [*tags, algorithm.short_name],
        model_name=run.name,
        eval_results=None if rate is None else [evaluation],
    )
    return data.to_yaml().strip()


def _base_model(run: RunData) -> str | None:
    """The hub's name of the model that training started from, if it is one."""
    # Without a commit it may be a folder, of this or of another directory.
    return run.option("policy", "path") if "model_commit" in run.record else None


def _usage(run: RunData) -> str:
    """What the model was made from, and how it is talked to."""
    base, commit = _base_model(run), run.record.get("model_commit")
    origin = f"Training started from `{base}` at commit `{commit}`.\n\n" if base and commit else ""
    options = mapping(run.option("agent", "template_options"))
    told = ", ".join(f"{name} = {json.dumps(value)}" for name, value in options.items())
    default = f" It is told `{one_line(told)}` unless you say otherwise." if told else ""
    return (
        f"{origin}The model reads and writes with the chat template that its tokenizer has."
        f"{default} It answers every message\nwith {_response_form(run)}.{_adapters(run)}"
    )


def _adapters(run: RunData) -> str:
    """Where those of a run are that has trained some, and what they belong to."""
    if run.option("policy", "lora") is None:
        return ""
    base = _base_model(run)
    is_own = base is None or run.option("warm_start", "enabled")
    belong = "the run's own reference, which is not here" if is_own else f"`{base}`"
    return f"\n\nThe adapters alone are in the folder `adapter`. They belong to {belong}."


def _table(run: RunData) -> str:
    lines = [["policy", *_COLUMNS], ["---", *["---:"] * len(_COLUMNS)]]
    for row in method_rows(run):
        lines.append([_text(row.label), *(row.cells[column] for column in _COLUMNS)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _response_form(run: RunData) -> str:
    if run.option("agent", "response_format") == "tool_call":
        return "a thought and a call of one of the tools, as that template writes calls"
    return "`<think>...</think><answer>one action</answer>`"


def _without_home(text: str) -> str:
    """The card may be public: paths below the home directory do not say whose it is."""
    home = Path(os.path.expanduser("~"))  # Path.home raises where the user has none
    if home in (Path("~"), Path(home.anchor)):  # every path is below a root
        return text
    return re.sub(rf"(?<!\w){re.escape(str(home))}(?![\w.-])", "~", text)
