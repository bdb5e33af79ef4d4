"""Publish a Hugging Face folder on the Hub: send it, and verify that it arrived.

huggingface_hub sends the files. It can resume because the Hub keeps every object that arrived whole; it finds the token
(HF_TOKEN or `hf auth login`) and honours HF_ENDPOINT. It is imported where it is used, as its import is slow.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from shlex import join, quote
from types import FrameType
from typing import TYPE_CHECKING

from converters.assets.files import QUANTIZATION
from converters.assets.token_files import (
    ADDED,
    NAMED_TEMPLATES,
    OLD_TEMPLATE,
    SPECIAL,
    TEMPLATE,
    TOKENIZER,
    TOKENIZER_CONFIG,
)
from converters.common.atomic import handling_signals
from converters.common.hub_names import one_line
from converters.hub.files import File
from converters.hub.model_card import version
from converters.hub.push_plan import MAIN, STEP, WEIGHTS, Push
from formats.errors import (
    Interrupted,
    NetworkError,
    RefusedError,
    SourceError,
    UsageError,
    VerificationError,
    VitruvianError,
    some,
)
from formats.huggingface.lora_config import CONFIG as ADAPTER

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import ModelInfo, RepoSibling

LIBRARIES = ("httpx2", "httpx", "requests", "hf_xet")
"""The network libraries of huggingface_hub: their errors are network errors."""
LATER = (408, 409, 412, 425, 429)
"""HTTP statuses that are worth a retry, besides all errors of the server (5xx)."""
NO_TOKEN = ("LocalTokenNotFoundError", "OIDCError")
"""Errors without a token, by class name, since not every version of huggingface_hub has these classes."""
XET = {"HF_XET_DATA_MAX_CONCURRENT_FILE_INGESTION": "1", "HF_XET_CLIENT_AC_MAX_UPLOAD_CONCURRENCY": "4"}
"""hf_xet 1.8.0 would read 8 files at a time and send 64 blocks of 64 MB: that takes gigabytes."""
LOGIN = "hf auth login   # or set HF_TOKEN to a token that may write"
PULLS = "refs/pr/"
STALE = {
    (ADAPTER, "adapter_model.*"): "transformers would load the base of an adapter, or add the adapter to the model",
    WEIGHTS: "frameworks would mix the weights of two models",
    QUANTIZATION: "frameworks would take the weights for quantized ones",
    (TEMPLATE, OLD_TEMPLATE, f"{NAMED_TEMPLATES}*.jinja"): "a chat template of another model would be taken",
    (TOKENIZER, TOKENIZER_CONFIG, ADDED, SPECIAL, "tekken.json"): "tokens of another tokenizer would be read",
}
"""Patterns of files that are loaded from a repository beside those that were sent, and what would come of it.

Facts: transformers 5.23.0, models/auto/auto_factory.py (an adapter_config.json names the model that is loaded),
tokenization_utils_base.py `from_pretrained`, models/auto/tokenization_auto.py (tekken.json); vLLM,
transformers_utils/config.py `get_config` (hf_quant_config.json). pytorch_model.bin is not taken beside safetensors,
code only if config.json names it, and generation_config.json has defaults alone."""
STOPPED = "stopped by a signal; complete files are not sent again"


@dataclass(frozen=True)
class Pushed:
    """The result of a push.

    Attributes:
        commit: the commit that holds the files.
        url: the address of the commit, or of the pull request.
        revision: the ref that the commit is on.
        notes: messages for the user.
    """

    commit: str
    url: str
    revision: str
    notes: tuple[str, ...]


def require_token() -> None:
    """Check, before any work, that there is a token for the Hub.

    Raises:
        UsageError: there is no token, or it has characters that no token has.
    """
    from huggingface_hub import get_token

    with _explained("the Hub", LOGIN):
        token = get_token()
    if token is None:
        raise UsageError("no token for the Hub is known", LOGIN)
    if not re.fullmatch("[!-~]+", token):  # an HTTP library would quote it in its error
        raise UsageError("the token for the Hub holds characters that no token has", LOGIN)


def push(plan: Push, *, quiet: bool = False) -> Pushed:
    """Send the planned files, then compare the commit on the Hub with the plan.

    Objects that the Hub has are not sent again, so the same call resumes an interrupted one.

    Raises:
        UsageError: the Hub refuses: token, rights, names.
        RefusedError: the repository is public and should not be, or holds files that would be loaded with those of the
            plan (`STALE`).
        NetworkError: the Hub cannot be reached.
        VerificationError: the commit on the Hub differs from the plan.
        Interrupted: Control-C, before files are sent; later a signal ends the process with the same exit code.
    """
    from huggingface_hub import HfApi

    quiet_hub_logging(quiet=quiet)
    api, target, url = HfApi(library_name="vitruvian", library_version=version()), plan.revision or MAIN, ""
    with _explained(plan.repo, command(plan)):
        before = _prepared(api, plan, target)
        if plan.create_pr and not differences(plan, before.siblings or ()):
            note = f"{plan.repo} holds exactly this already: no pull request is opened"
            return Pushed(str(before.sha), f"{api.endpoint}/{plan.repo}", target, (note,))
        if plan.create_pr:
            pull = api.create_pull_request(plan.repo, title=_title(plan))
            target, url = str(pull.git_reference), pull.url
    retry = command(plan, target)
    with _explained(plan.repo, retry), warnings.catch_warnings(record=True) as caught:
        with tempfile.TemporaryDirectory(prefix="vitruvian-push-") as staging, _ended_by_signals(staging, retry):
            _stage(plan, Path(staging))
            done = api.upload_folder(
                repo_id=plan.repo, folder_path=staging, revision=target, commit_message=_title(plan)
            )
        after = api.model_info(plan.repo, revision=done.oid, files_metadata=True)
    wrong = differences(plan, after.siblings or ())
    if wrong:
        lines = "; ".join(wrong[:5]) + (" …" if len(wrong) > 5 else "")
        raise VerificationError(f"{plan.repo} does not hold what was planned: {lines}", retry)
    notes = [*_kept(plan, after), *(one_line(str(warning.message)) for warning in caught)]
    notes += [f"{url} is a draft until you publish it there"] if plan.create_pr else []
    return Pushed(done.oid, url or str(done.commit_url), target, tuple(notes))


def command(plan: Push, target: str = "") -> str:
    """The command that resumes a push, for a hint."""
    revision = target if target.startswith(PULLS) else plan.revision or ""
    words = ["convert", "push", str(plan.folder), plan.repo, *([] if plan.private else ["--public"])]
    words += ["--revision", revision] if revision else ["--create-pr"] if plan.create_pr else []
    return join([*words, *(["--base-model", plan.base_model] if plan.base_model else [])])


def differences(plan: Push, siblings: Iterable[RepoSibling]) -> list[str]:
    """The differences between a revision on the Hub and the plan: in names, sizes, and the hash of every file."""
    there = {sibling.rfilename: sibling for sibling in siblings}
    return [why for file in plan.files if (why := _difference(plan, file, there.get(file.name)))]


def _difference(plan: Push, file: File, sibling: RepoSibling | None) -> str:
    if sibling is None:
        return f"{file.name} is missing"
    if sibling.size != file.size:
        return f"{file.name} has {sibling.size} bytes instead of {file.size}"
    if sibling.lfs is not None:
        same = sibling.lfs.sha256 == file.sha256
    else:
        same = (sibling.blob_id, file.sha256) == _hashes(plan, file)
    return "" if same else f"{file.name} has another hash"


def _hashes(plan: Push, file: File) -> tuple[str, str]:
    """The git blob hash of a small file, and its SHA-256, both computed now."""
    blob, sha256 = hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False), hashlib.sha256()
    if file.path is None:
        blob.update(plan.card.encode())
        return blob.hexdigest(), file.sha256
    with file.path.open("rb") as reader:
        while piece := reader.read(STEP):
            blob.update(piece)
            sha256.update(piece)
    return blob.hexdigest(), sha256.hexdigest()


# --- steps -----------------------------------------------------------------------------------------------------------


def quiet_hub_logging(*, quiet: bool) -> None:
    """Bound huggingface_hub's buffers, show its progress on terminals only, and silence logs with signed addresses."""
    os.environ.update({name: value for name, value in XET.items() if name not in os.environ})
    from huggingface_hub import utils

    if (quiet or not sys.stderr.isatty()) and "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ:
        utils.disable_progress_bars()  # type: ignore[attr-defined]  # public, though its package does not say so
    if "HF_HUB_VERBOSITY" not in os.environ:
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def _title(plan: Push) -> str:
    return f"Upload {plan.folder.resolve().name} with vitruvian {version()}"


def _prepared(api: HfApi, plan: Push, target: str) -> ModelInfo:
    """Create the repository and the branch if they do not exist, and refuse them if they conflict with the plan.

    Raises:
        RefusedError: the repository is public and should not be, or holds files that would be loaded with those of the
            plan (`STALE`).
    """
    api.create_repo(plan.repo, private=plan.private, exist_ok=True)
    info = api.model_info(plan.repo, files_metadata=True)
    if plan.private and info.private is False:
        raise RefusedError(f"{plan.repo} exists and is public", f"{command(plan)} --public")
    if target != MAIN:
        if not target.startswith(PULLS):
            api.create_branch(plan.repo, branch=target, exist_ok=True)
        info = api.model_info(plan.repo, revision=target, files_metadata=True)
    names = _unsent(plan, info)
    stale = list(dict.fromkeys(name for patterns in STALE for name in names if _matches(name, patterns)))
    if stale:
        why = [why for patterns, why in STALE.items() if any(_matches(name, patterns) for name in stale)]
        where = f" --revision {quote(target)}" if target != MAIN else ""
        raise RefusedError(
            f"{plan.repo} holds {some(stale, 3)}, which {plan.folder} does not: {', and '.join(why)}",
            f"hf repos delete-files {plan.repo}{where} {join(_globs(stale))}",
        )
    return info


def _unsent(plan: Push, info: ModelInfo) -> list[str]:
    """The files of a revision on the Hub that are not in the plan."""
    sent = {file.name for file in plan.files} | {".gitattributes"}
    return [sibling.rfilename for sibling in info.siblings or () if sibling.rfilename not in sent]


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a file has a name of one of the patterns, in the folder that the pattern names."""
    return any(fnmatchcase(name, each) and name.count("/") == each.count("/") for each in patterns)


def _globs(names: Iterable[str]) -> list[str]:
    """Names of files, with one pattern for numbered shards."""
    return sorted({re.sub(r"-\d{5}-of-(\d{5})\.", r"-*-of-\1.", name) for name in names})


def _stage(plan: Push, staging: Path) -> None:
    """Fill a folder with links to exactly the planned files, and with the card."""
    for file in plan.files:
        place = staging / file.name
        place.parent.mkdir(parents=True, exist_ok=True)
        if file.path is None:
            place.write_bytes(plan.card.encode())
        else:
            place.symlink_to(file.path.resolve())


@contextmanager
def _ended_by_signals(staging: str, retry: str) -> Iterator[None]:
    """A context in which a signal ends the process at once: huggingface_hub would finish every file it has begun.

    That could take hours. Nothing is lost, since no local file is written and the Hub only keeps objects that arrived
    whole.
    """

    def end(_: int, __: FrameType | None) -> None:
        shutil.rmtree(staging, ignore_errors=True)
        sys.stderr.write(f"error: {STOPPED}\nhint: {retry}\n")
        sys.stderr.flush()
        os._exit(Interrupted.exit_code)

    with handling_signals(end):
        yield


def _kept(plan: Push, info: ModelInfo) -> Iterator[str]:
    """A note on files on the Hub that are not in the plan."""
    if names := _unsent(plan, info):
        yield f"{plan.repo} also holds {len(names)} files that are not in {plan.folder}: {some(names, 5)}"


# --- errors ----------------------------------------------------------------------------------------------------------


@contextmanager
def _explained(repo: str, retry: str) -> Iterator[None]:
    """A context that raises errors of huggingface_hub with one sentence and a hint; unknown errors stay as they are."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(STOPPED, retry) from None
    except VitruvianError:
        raise
    except Exception as error:
        known = _known(error, repo, retry)
        if known is None:
            raise
        raise known from error


def _known(error: BaseException | None, repo: str, retry: str) -> VitruvianError | None:
    """The error for the user that an error, or its cause, stands for; None if it is unknown."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    while error is not None:
        message = one_line(str(error))
        if isinstance(error, HfHubHTTPError):
            status, message = error.response.status_code, str(error.server_message or "")
            if message.lstrip().startswith("<"):  # a storage service's XML, which may hold parts of a signature
                return NetworkError(f"the storage of the Hub refuses a file of {repo} ({status})", retry)
            message = str(error.response.headers.get("X-Error-Message") or message or error.response.reason_phrase)
            return _refusal(status, one_line(message), repo, retry)
        if status_text := re.search(r"HTTP status client error \((\d+)", message):  # the wording of hf_xet
            return _refusal(int(status_text[1]), message, repo, retry)
        if isinstance(error, OfflineModeIsEnabled):
            return UsageError("HF_HUB_OFFLINE is set, so nothing can be sent", "unset HF_HUB_OFFLINE")
        if type(error).__name__ in NO_TOKEN:
            return UsageError(f"no token for the Hub: {message}", LOGIN)
        if isinstance(error, ValueError) and "README.md" in message:
            return RefusedError(
                f"the Hub does not accept the card: {message}", "edit the metadata that begins README.md"
            )
        network = type(error).__module__.partition(".")[0] in LIBRARIES
        if network or isinstance(error, (ConnectionError, TimeoutError, ValueError)):
            return NetworkError(f"{repo} cannot be reached: {message or type(error).__name__}", retry)
        if isinstance(error, OSError):
            return SourceError(f"{error.filename or 'a file'}: {error.strerror or message}", retry)
        error = error.__cause__
    return None


def _refusal(status: int, message: str, repo: str, retry: str) -> VitruvianError:
    """The error for an HTTP status of the Hub: exit code 8 where a retry may help, 2 where something has to change."""
    if status >= 500 or status in LATER:
        return NetworkError(f"the Hub is not able to serve {repo} now ({status}: {message})", retry)
    match status:
        case 401:
            return UsageError(f"the Hub does not accept the token ({status}: {message})", LOGIN)
        case 403:
            return UsageError(
                f"the token may not write to {repo} ({status}: {message})",
                "hf auth whoami   # whose token it is; `hf auth login` for another, or set HF_TOKEN",
            )
        case 404:
            return UsageError(f"{repo} or its revision does not exist for this token ({status}: {message})", LOGIN)
        case _:
            return UsageError(f"the Hub refuses the push to {repo} ({status}: {message})")
