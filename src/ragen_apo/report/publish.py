"""A run's policy at the Hugging Face hub: the model folder and its card, in one commit."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi

from ragen_apo.errors import HubError, RunDirectoryError
from ragen_apo.files import CHECKSUMS, check_checksums
from ragen_apo.report.load import load_run
from ragen_apo.report.model_card import model_card
from ragen_apo.run_directory import RunDirectory


def push_to_hub(
    run_directory: Path, repository: str, *, private: bool = True, endpoint: str | None = None
) -> str:
    """Uploads the trained policy of an evaluated run and returns the address of the commit.

    `repository` is `owner/name`; one that is not there is made, private or public. The token is
    the one of `hf auth login` or HF_TOKEN, and is never written. `endpoint` is another hub than
    HF_ENDPOINT or huggingface.co.

    Raises RunDirectoryError without a trained, evaluated and undamaged policy, HubError where the
    hub cannot be reached or refuses.
    """
    run, files = load_run(run_directory), RunDirectory(run_directory)
    if not run.trained or not files.policy.exists():
        raise RunDirectoryError(
            f"{run_directory} has no trained policy to publish; finish it with "
            f"`{files.resume_command}`"
        )
    try:
        check_checksums(files.policy)
    except ValueError as error:
        raise RunDirectoryError(
            f"the policy in {files.policy} is damaged: {error}; it was not published"
        ) from error
    contents: dict[str, bytes | Path] = {
        path.relative_to(files.policy).as_posix(): path
        for path in sorted(files.policy.rglob("*"))
        if path.is_file() and path.name != CHECKSUMS
    }
    contents["README.md"] = model_card(run).encode(errors="replace")
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
            f"({type(error).__name__}: {' '.join(str(error).split())[:300]}). Expected a name such "
            "as owner/name and a token that may write there (`hf auth login`, or HF_TOKEN)"
        ) from error
    return str(commit.commit_url)
