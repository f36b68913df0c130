"""`--push-to-hub`: uploads an exported folder as one commit, by huggingface_hub."""

import os
import shlex
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

from posttrain.base.errors import ModelError
from posttrain.base.hub import stay_offline_without_network
from posttrain.base.words import first_line

# What a hub makes itself; a repository with anything else is not empty.
MADE_BY_THE_HUB = {".gitattributes", "README.md"}
# Files of an earlier model, which would be loaded beside or instead of the new ones.
EARLIER = ["*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "adapter_config.json"]
EARLIER += ["chat_template.jinja", "generation_config.json", "quantization.json"]


def check_target(repo: str) -> str:
    """The token to upload with. Raises ModelError for an impossible name or without a token, before any work."""
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
    """Upload the folder as one commit to the model repository, which is created if it is missing; returns its address.

    Raises ModelError when the hub cannot be reached or refuses; the local folder stays as it is.
    """
    later = ["hf", "upload", repo, str(folder), *(["--private"] if private else [])]
    stays = f"The export in {folder} is complete; upload it later with: {shlex.join(later)}"
    try:
        stay_offline_without_network()
        return _push(folder, repo, token, private, overwrite, message)
    except (OSError, RuntimeError, ValueError, HTTPError) as error:
        raise ModelError(f"{_reason(error, repo)}. {stays}") from error
    except KeyboardInterrupt as error:
        error.add_note(f"the upload to {repo} was interrupted, and nothing was committed there. {stays}")
        raise


def _push(folder: Path, repo: str, token: str, private: bool, overwrite: bool, message: str) -> str:
    api = HfApi(token=token)
    repo = api.create_repo(repo, private=private or None, exist_ok=True).repo_id
    info = api.model_info(repo)
    if private and not info.private:
        raise ModelError(
            f"{repo} exists and is public, and --private was given: nothing was uploaded. Make it private in its "
            "settings on the hub, or choose another name"
        )
    there = {file.rfilename for file in info.siblings or ()} - MADE_BY_THE_HUB
    if there and not overwrite:
        raise ModelError(
            f"{repo} has files already ({min(there)} …): nothing was uploaded. Replace them with --overwrite (the hub "
            "keeps the old ones in its history), or choose another name"
        )
    done = api.upload_folder(
        repo_id=repo, folder_path=folder, commit_message=message, delete_patterns=EARLIER if there else None
    )
    return str(done.commit_url)


def _reason(error: BaseException, repo: str) -> str:
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        if status in (401, 403):
            return (
                f"the hub refused the upload to {repo} ({status}): the token in HF_TOKEN is invalid, has no write "
                "access, or is of another account"
            )
        return f"the hub refused the upload to {repo} ({status}: {error.server_message or first_line(error)})"
    if isinstance(error, OfflineModeIsEnabled | HTTPError):  # the second is httpx's; with huggingface_hub 2, httpx2's
        return f"the hub cannot be reached ({first_line(error)})"
    if error.__cause__ is not None:  # of a large file's transfer
        return _reason(error.__cause__, repo)
    return f"the upload to {repo} failed ({first_line(error)})"
