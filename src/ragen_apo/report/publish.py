"""A run's policy at the Hugging Face hub: model folder, adapters and card, in one commit."""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi

from ragen_apo.config.policy import ADAPTER_SETTINGS
from ragen_apo.errors import HubError, RunDirectoryError
from ragen_apo.files import CHECKSUMS, check_checksums
from ragen_apo.report.load import load_run
from ragen_apo.report.model_card import model_card
from ragen_apo.run_directory import RunDirectory


def push_to_hub(
    run_directory: Path,
    repository: str,
    *,
    private: bool = True,
    license_id: str | None = None,
    endpoint: str | None = None,
) -> str:
    """Uploads the trained policy of an evaluated run and returns the address of the commit.

    Its adapters, if it has any, go into the folder `adapter`. `license_id` is what the card names.

    `repository` is `owner/name`; one that is not there is made, private or public. The token is
    the one of `hf auth login` or HF_TOKEN, and is never written. `endpoint` is another hub than
    HF_ENDPOINT or huggingface.co.

    Raises RunDirectoryError without a trained, evaluated and undamaged policy, HubError where the
    hub cannot be reached or refuses.
    """
    files = RunDirectory(run_directory)
    if files.is_of_api:
        raise RunDirectoryError(
            f"{run_directory} is the evaluation of a model behind an API, which has nothing to "
            "publish here: its policy is on its server. `ragen-apo push` publishes what `ragen-apo "
            "train` made"
        )
    run = load_run(run_directory)
    if not (run.trained or run.distilled) or not files.policy.exists():
        steps = " --training.max_steps 30" if files.policy.exists() else ""
        raise RunDirectoryError(
            f"{run_directory} has no trained policy to publish; finish it with "
            f"`{files.resume_command}{steps}`"
        )
    contents = _files_of(files.policy)
    if files.adapter.is_dir():
        adapter = _files_of(files.adapter)
        adapter[ADAPTER_SETTINGS] = _without_local_base(files.adapter / ADAPTER_SETTINGS)
        contents |= {f"adapter/{name}": content for name, content in adapter.items()}
    contents["README.md"] = model_card(run, license_id=license_id).encode(errors="replace")
    hub = HfApi(endpoint=endpoint)
    try:
        hub.create_repo(repository, private=private, exist_ok=True)
        commit = hub.create_commit(
            repository,
            [CommitOperationAdd(name, content) for name, content in contents.items()],
            commit_message=f"Policy of the run {run.name}",
        )
    except Exception as error:
        # The hub's client raises errors of its own, of its HTTP library and of its validators.
        raise HubError(
            f"{repository}: the policy was not published at {hub.endpoint} "
            f"({type(error).__name__}: {' '.join(str(error).split())[:300]}). "
            f"{_way_out(error)}"
        ) from error
    return str(commit.commit_url)


def _way_out(error: Exception) -> str:
    """By the names of classes: the HTTP library of the hub's client changes with its version."""
    if {each.__name__ for each in type(error).__mro__} & {"TransportError", "OfflineModeIsEnabled"}:
        return (
            "The hub was not reached: look at the network, HTTPS_PROXY, HF_ENDPOINT, HF_HUB_OFFLINE"
        )
    return (
        "Expected a name such as owner/name and a token that may write there (`hf auth login`, or "
        "HF_TOKEN)"
    )


def _files_of(folder: Path) -> dict[str, bytes | Path]:
    """By their names in it; raises RunDirectoryError if they are not as the run wrote them."""
    try:
        check_checksums(folder)
    except ValueError as error:
        raise RunDirectoryError(f"{folder} is damaged: {error}; it was not published") from error
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != CHECKSUMS
    }


def _without_local_base(file: Path) -> bytes:
    """Settings of adapters that name a model of the hub at a commit, or none: folders of this
    machine mean nothing elsewhere.
    """
    settings = json.loads(file.read_text(encoding="utf-8"))
    if settings.get("revision") is None:
        settings["base_model_name_or_path"] = None
    return json.dumps(settings, indent=2).encode()
