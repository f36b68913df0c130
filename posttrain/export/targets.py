"""Where an export is written: a folder that is complete or absent, and a repository on the hub.

A file such as `export.json` marks each written folder. Only a marked folder is replaced, and only with `--overwrite`.
"""

import errno
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

from posttrain.base.errors import ModelError, RunError
from posttrain.base.files import put_folder, settle
from posttrain.base.hub import stay_offline_without_network
from posttrain.base.words import first_line, in_units
from posttrain.runs.atomic import writing

NO_ROOM = "nothing was written, and the model is intact: free some space, or give --output on another disk"


def refuse_target(target: Path, overwrite: bool, mark: str) -> None:
    """Raise RunError unless the folder is absent or empty, or contains the file `mark` and `overwrite` is set."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not target.is_dir():
        raise RunError(f"{target} is a file: give a folder with --output")
    if not (target / mark).is_file():
        raise RunError(f"{target} is not empty and has no {mark}, so it is not replaced: give another --output")
    if not overwrite:
        raise RunError(f"{target} exists: replace it with --overwrite, or give another folder with --output")


def put(target: Path, write: Callable[[Path], None], overwrite: bool, mark: str) -> None:
    """Create the folder atomically from the files that `write` writes. Raises RunError if a file cannot be written."""

    def readable(folder: Path) -> None:
        write(folder)
        for path in folder.glob("*.safetensors"):  # safetensors creates files that only their owner can read
            path.chmod((folder / mark).stat().st_mode)

    with writing(target, NO_ROOM):
        target.parent.mkdir(parents=True, exist_ok=True)
        settle(target.parent, target.name)  # leftovers of a killed export
        put_folder(target, readable, replace=overwrite)
    if not (target / mark).is_file():
        raise RunError(f"{target} was created meanwhile and is not replaced: give another folder with --output")


def refuse_full_disk(target: Path, size: int) -> None:
    """Raise RunError if the weights do not fit on the disk."""
    free = shutil.disk_usage(next(parent for parent in target.absolute().parents if parent.is_dir())).free
    if free < size:
        with writing(target, NO_ROOM):
            raise OSError(errno.ENOSPC, f"{in_units(size)} needed, {in_units(free)} free")


# Files that the hub creates. A repository with other files is not empty.
MADE_BY_THE_HUB = {".gitattributes", "README.md"}
# Files of an earlier model that would be loaded together with the new files, or instead of them.
EARLIER = ["*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "adapter_config.json"]
EARLIER += ["chat_template.jinja", "generation_config.json", "quantization.json"]


def token_for(repo: str) -> str:
    """The token for the upload. Raises ModelError, before any work, if the name is invalid or no token is found."""
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ModelError(f"--push-to-hub {repo}: not a hub id such as me/my-model ({error})") from error
    token = os.environ.get("HF_TOKEN") or get_token()
    if not token:
        raise ModelError(
            "--push-to-hub needs a token with write access: set HF_TOKEN (in the environment or in .env), "
            "from https://huggingface.co/settings/tokens"
        )
    return token


def push(folder: Path, repo: str, token: str, private: bool, overwrite: bool, message: str) -> str:
    """Upload the folder as one commit to the model repository, which is created if missing; returns the commit's URL.

    Raises ModelError if the hub cannot be reached or refuses the upload; the local folder is left unchanged.
    """
    later = ["hf", "upload", repo, str(folder), *(["--private"] if private else [])]
    remedy = f"The export in {folder} is complete; upload it later with: {shlex.join(later)}"
    try:
        stay_offline_without_network()
        api = HfApi(token=token)
        there = api.create_repo(repo, private=private or None, exist_ok=True).repo_id
        info = api.model_info(there)
        if private and not info.private:
            raise ModelError(
                f"{there} exists and is public, and --private was given: nothing was uploaded. Make it private in its "
                "settings on the hub, or choose another name"
            )
        files = {file.rfilename for file in info.siblings or ()} - MADE_BY_THE_HUB
        if files and not overwrite:
            raise ModelError(
                f"{there} already has files ({min(files)} …): nothing was uploaded. Replace them with --overwrite (the "
                "hub keeps the old files in the repository's history), or choose another name"
            )
        earlier = EARLIER if files else None
        commit = api.upload_folder(repo_id=there, folder_path=folder, commit_message=message, delete_patterns=earlier)
        return str(commit.commit_url)
    except (OSError, RuntimeError, ValueError, HTTPError) as error:
        raise ModelError(f"{_reason(error, repo)}. {remedy}") from error
    except KeyboardInterrupt as error:
        error.add_note(f"the upload to {repo} was interrupted, and nothing was committed there. {remedy}")
        raise


def _reason(error: BaseException, repo: str) -> str:
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        if status in (401, 403):
            return (
                f"the hub refused the upload to {repo} ({status}): the token in HF_TOKEN is invalid, has no write "
                "access, or belongs to another account"
            )
        return f"the hub refused the upload to {repo} ({status}: {error.server_message or first_line(error)})"
    if isinstance(error, OfflineModeIsEnabled | HTTPError):  # HTTPError of httpx, or of httpx2 with huggingface_hub 2
        return f"the hub cannot be reached ({first_line(error)})"
    if error.__cause__ is not None:  # the transfer of a large file wraps the error
        return _reason(error.__cause__, repo)
    return f"the upload to {repo} failed ({first_line(error)})"
