"""Fixtures for every test: where the real data is, a small model with its tokenizer, and no model hub.

One thread: two workers of the suite on two cores would otherwise wait for one another at every barrier.
"""

import gc
import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import mkdtemp

import pytest
from filelock import FileLock
from proofs import figure, pytest_addoption, pytest_configure  # noqa: F401  (of `make prove`)

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TRITON_INTERPRET"] = "1"  # kernels on a CPU, in NumPy
if os.environ.get("ATEN_CPU_CAPABILITY") in ("default", "avx2"):
    # As an older processor, on which oneDNN has no newer instructions either: PyTorch's attention fails otherwise.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell started the suite in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["TRACKIO_DIR"] = mkdtemp(prefix="posttrain-trackio-")

SEED = int(os.environ.get("POSTTRAIN_TEST_SEED", "0"))  # of the models that fixtures make: `make test-processors`

SLOW = frozenset(Path(__file__).with_name("slow.txt").read_text(encoding="utf-8").splitlines())
SAVED_SUMS = Path(__file__).with_name("sums")
SHARED = Path(__file__).parents[1].parent / "shared"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items) -> None:
    """Marks as slow what tests/slow.txt lists: costly tests whose kind a cheaper one shows in `make test`."""
    ids = {item.nodeid.removeprefix("tests/"): item for item in items}
    for name in SLOW & ids.keys():
        ids[name].add_marker(pytest.mark.slow)
    whole = {Path(argument).name for argument in config.args} == {"tests"}
    if whole and SLOW - ids.keys():
        raise pytest.UsageError(f"tests/slow.txt lists tests that do not exist: {sorted(SLOW - ids.keys())}")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data and models that lies beside the checkout."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the real data in {SHARED.name}/ beside the checkout")
    return SHARED


def int8_is_wrong() -> bool:
    """Whether PyTorch multiplies 8-bit integers wrongly, as with ONEDNN_MAX_CPU_ISA=AVX2 alone: such models are
    refused."""
    import torch

    from posttrain.base.errors import ModelError
    from posttrain.models.quantised import check_int8

    try:
        check_int8(torch.device("cpu"))
    except ModelError:
        return True
    return False


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> None:
    """Every run collects garbage: it need not look at what libraries have made, those of the test's module too."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def quick_and_apart(tmp_path_factory):
    """What tests do without, also in the fixtures of a module or a session that train.

    Tokenised data goes to a folder of the test session, never to the user's own cache.

    What a killed process has written stays with the system, so waiting for the disk matters to a power cut alone. That
    and when files are synced is looked at by tests/test_store_checkpoint.py; processes started by a test sync.

    A run of a few steps takes less time than its `curves.png`: drawn where a test is marked `pictures`, and by
    tests/test_store_show.py. A file stays, so that the report, which takes the picture from there, does not draw it
    either.
    """
    one = import_module("posttrain.runner.one")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POSTTRAIN_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(one, "write_curves", lambda lines, path, title: path.write_bytes(b""))
        yield


@pytest.fixture(autouse=True)
def pictures(request, monkeypatch) -> None:
    """Pictures are drawn where a test is marked `pictures`."""
    if request.node.get_closest_marker("pictures") is not None:
        drawn = import_module("posttrain.reports.curves").write_curves
        monkeypatch.setattr(import_module("posttrain.runner.one"), "write_curves", drawn)


@pytest.fixture(autouse=True)
def forgotten_modules(request):
    """The next test may import other modules of these names from its own folder."""
    before = set(sys.modules)
    yield
    folder = request.node.funcargs.get("tmp_path")
    for name in set(sys.modules) - before if folder else ():
        if folder in Path(getattr(sys.modules[name], "__file__", None) or "/").parents:
            del sys.modules[name]


@pytest.fixture(scope="module")
def browser():
    """A real browser, for tests marked `ui`."""
    from browser import a_browser

    with a_browser() as found:
        yield found


@pytest.fixture
def power_cut(monkeypatch):
    """`with power_cut(step=5):` a run in it ends in an error after that step, as if the machine had gone off."""
    from posttrain.training.loop import Loop
    from posttrain.training.saving import Saver

    @contextmanager
    def cut(step: int):
        after_step = Loop._after_step

        def crash(self):
            after_step(self)
            if self.state.step == step:
                raise RuntimeError("power cut")

        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
            patch.setattr(Loop, "_after_step", crash)
            patch.setattr(Saver, "save_after", lambda self, error: None)
            yield

    return cut


@pytest.fixture(scope="session")
def made_once(tmp_path_factory):
    """`made_once(name, make)`: a folder that `make(folder)` fills, once for all workers."""

    def once(name: str, make: Callable[[Path], object]) -> Path:
        base = tmp_path_factory.getbasetemp()
        folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
        done = folder.with_suffix(".done")
        with FileLock(f"{folder}.lock"):
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a worker that failed
                make(folder)
                done.touch()
        return folder

    return once


@pytest.fixture(scope="session")
def sums_home(made_once) -> Path:
    """The task of benchmarks/sums.py: `model/`, `train.jsonl`, `test.jsonl`.

    Half of the answers are right, so that of a few completions some are and some are not, whatever is drawn.
    """
    return made_once("sums", lambda folder: put_sums(folder, "half"))


@pytest.fixture(scope="session")
def calculator_home() -> Path:
    """The task of benchmarks/calculator.py: `model/`, `train.jsonl`, `test.jsonl`."""
    return SAVED_SUMS / "calculator"


@pytest.fixture
def users_module(tmp_path, monkeypatch):
    """Writes a file of a user's into the current folder, where functions and classes of that name are then found."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def write(name: str, code: str) -> None:
        (tmp_path / f"{name}.py").write_text(code)
        sys.modules.pop(name, None)

    return write


@pytest.fixture(scope="session")
def hard_sums_home(made_once) -> Path:
    """`sums_home` with one right answer in ten."""
    return made_once("hard sums", lambda folder: put_sums(folder, "tenth"))


def put_sums(folder: Path, name: str) -> None:
    """The task of tests/sums, which `make sums` trains; with another seed it is trained here, in a quarter of a
    minute."""
    from benchmarks import sums

    if SEED == 0:
        sums.check_saved(SAVED_SUMS)
        shutil.copytree(SAVED_SUMS / name, folder)
    else:
        sums.make(folder, SEED, right=sums.SAVED[name])


@pytest.fixture(scope="session")
def grading_pool():
    """One grading worker as in training; a deadline that a busy machine keeps."""
    from posttrain.grading.pool import Pool
    from posttrain.rewards.rules import RULES, modules_of

    with Pool(1, deadline=20.0, modules=modules_of(RULES)) as pool:
        yield pool


@pytest.fixture(scope="session")
def scratch_model(shared, tmp_path_factory) -> Path:
    """A tiny Qwen3 with random weights and the minimind tokenizer (with its chat template)."""
    from benchmarks.models import write_model

    folder = tmp_path_factory.mktemp("models") / "tiny-qwen3"
    write_model(
        folder, shared / "tokenizers/minimind6400", seed=SEED, hidden_size=48, num_hidden_layers=2,
        intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=12, tie_word_embeddings=True,
    )  # fmt: skip
    return folder
