"""Checkpoints on the Hugging Face hub: headers by range requests, single files, and uploads.

All traffic goes through huggingface_hub, which keeps the files in its cache and resumes downloads.
It is slow to import: import this module only where the hub is needed.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
from huggingface_hub import HfApi
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from ..errors import CheckpointError, UserError
from .safetensors import StoredTensor, read_header, stored_entry
from .source import INDEX, CheckpointSource, joined, read_config, read_placed, read_tensors

SMALL_FILES = ["*.json", "*.jinja", "*.model", "LICENSE*"]
WEIGHTS = "*.safetensors"


def api() -> HfApi:
    """The hub's client."""
    return HfApi()


def open_repository(repo: str, revision: str | None, download: bool) -> CheckpointSource:
    """Open a repository: download its small files, and its weights or only their headers.

    Raises UserError: no such repository, a login is needed, no network.
    """
    wanted = [*SMALL_FILES, WEIGHTS] if download else SMALL_FILES
    with _in_one_line(repo):
        fetched = huggingface_hub.snapshot_download(
            repo, revision=revision, allow_patterns=wanted, endpoint=api().endpoint
        )
    folder = Path(fetched)
    config, placed = read_config(folder), read_placed(folder)
    commit = folder.name
    if download or _is_complete(folder, placed):
        return CheckpointSource(repo, folder, config, read_tensors(folder), commit)
    tensors = _remote_tensors(repo, commit, folder, placed)

    def fetch(file: Path) -> None:
        if not file.exists():
            with _in_one_line(repo):
                huggingface_hub.hf_hub_download(
                    repo, file.name, revision=commit, endpoint=api().endpoint
                )
        tensors.update(read_header(file))  # with their offsets in the file

    return CheckpointSource(repo, folder, config, tensors, commit, fetch)


def _is_complete(folder: Path, placed: dict[str, str]) -> bool:
    """Whether all weights are downloaded already."""
    if placed:
        return all((folder / file).is_file() for file in placed.values())
    return any(folder.glob(WEIGHTS))


def _remote_tensors(
    repo: str, commit: str, folder: Path, placed: dict[str, str]
) -> dict[str, StoredTensor]:
    """The tensors of a repository, from the headers of its weight files."""
    client = api()
    with _in_one_line(repo):
        there = client.list_repo_files(repo, revision=commit)
    files = sorted(set(placed.values())) or sorted(f for f in there if f == "model.safetensors")
    if not files:
        raise CheckpointError(f"{repo} has neither {INDEX} nor model.safetensors")
    if absent := [file for file in files if file not in there]:
        raise CheckpointError(f"{INDEX} names files that are missing: {', '.join(absent[:4])}")
    headers: dict[str, dict[str, StoredTensor]] = {}
    for file in files:
        if (folder / file).is_file():  # fetched before
            headers[file] = read_header(folder / file)
            continue
        with _in_one_line(repo):
            header = client.parse_safetensors_file_metadata(repo, file, revision=commit)
        headers[file] = {
            name: stored_entry(
                folder / file,
                name,
                {"dtype": i.dtype, "shape": i.shape, "data_offsets": i.data_offsets},
                start=0,
            )
            for name, i in header.tensors.items()
        }
    return joined(headers, placed)


def upload(folder: Path, repo: str) -> str:
    """Upload a converted folder to a model repository, created if need be; returns its address.

    Raises UserError: no login, no right to write there, no network.
    """
    client = api()
    with _in_one_line(repo, f"{folder} was not uploaded to {repo}"):
        client.create_repo(repo, exist_ok=True)
        commit = client.upload_folder(
            repo_id=repo, folder_path=folder, commit_message="Upload a model converted by mlx-kda"
        )
    return str(getattr(commit, "repo_url", None) or f"{client.endpoint}/{repo}")


@contextlib.contextmanager
def _in_one_line(repo: str, failed: str | None = None) -> Iterator[None]:
    """Turn the hub client's errors into a UserError of one line.

    ``failed`` is what it says first where the hub cannot be reached.
    """
    failed = failed or f"{repo} is not a local folder"
    try:
        yield
    except GatedRepoError as error:
        raise UserError(
            f"{repo} needs a login: accept its terms and run `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{repo} is neither a local folder nor a repository of the Hugging Face hub "
            "(a private one needs `hf auth login`)"
        ) from error
    # the hub's client raises errors of its own, of its HTTP library and of the system
    except Exception as error:
        reason = str(error).strip().partition("\n")[0].removeprefix("Got: ")
        raise UserError(
            f"{failed}, and the Hugging Face hub failed: {reason or type(error).__name__}"
        ) from error
