"""Common settings and fixtures: no test uses the network; trained checkpoints are used where they exist."""

import ast
import gc
import getpass
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported, which this file does not do
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Code that inductor compiled for other instructions is wrong for these, and its cache has no key for them.
instructions = os.environ.get("ATEN_CPU_CAPABILITY", "native")
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor-{getpass.getuser()}-{instructions}"
)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined: the same kernels run on the CPU
if find_spec("triton") is None:
    sys.modules["triton"] = None  # or `import triton` would find the folder tests/ops/triton


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="add this to every seed that torch gets: other numbers")
    parser.addoption("--threads", type=int, default=1, help="threads that torch computes with")
    sweep = {"dest": "families", "action": "store_const", "default": "few"}
    parser.addoption("--all-families", const="all", help="sweep over every family, not one of each style", **sweep)
    parser.addoption("--other-families", const="others", help="sweep over the families left out by default", **sweep)


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all is imported, of which little is garbage: collections would take a tenth of that time
    os.environ["HF_QKNORM_TEST_SEED"] = str(config.getoption("--seed"))  # children inherit it
    if not torch.accelerator.is_available():
        torch.manual_seed = torch.default_generator.manual_seed  # torch's own notes the stack for each absent device
    from qknorm_tests import seeds  # noqa: F401  # before any test is imported, as some draw numbers then

    # One thread by default: tiny models are no faster with more, and waiting threads slow a busy machine.
    torch.set_num_threads(config.getoption("--threads"))
    os.environ["OMP_NUM_THREADS"] = str(config.getoption("--threads"))  # of children


def pytest_collection_finish() -> None:
    """Keep what is imported out of garbage collections: Trainer's own, after each run, would take a second."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # or Triton's bindings report them as leaks


SECONDS = float(os.environ.get("HF_QKNORM_TEST_SECONDS", "inf"))  # set by .ci/run
STARTED = pytest.StashKey[float]()


def spent() -> float:
    """Seconds of CPU of this process and its children so far: a busy machine does not lengthen them."""
    return sum(os.times()[:4])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[STARTED] = spent()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test that takes more CPU than `SECONDS`, unless it is marked as slow or costly."""
    yield
    seconds = spent() - item.stash[STARTED]
    if seconds > SECONDS and not {mark.name for mark in item.iter_markers()} & {"slow", "costly"}:
        pytest.fail(f"it takes {seconds:.1f} s of CPU, more than {SECONDS:g}: shorten it, or mark it as slow or costly")


@pytest.fixture(autouse=True, scope="session")
def _sources_parsed_once() -> None:
    """Parse the package's sources once, and not for each family whose stand-alone code is written."""
    from hf_qknorm.standalone import bundler

    vars(bundler)["ast"] = SimpleNamespace(**{**vars(ast), "parse": cache(ast.parse)})


@pytest.fixture(autouse=True)
def _own_log_level() -> Iterator[None]:
    """Restore the log level after each test, since recipes and the demo change it."""
    logger = logging.getLogger("hf_qknorm")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def default_signals() -> Iterator[None]:
    """Heed signals, also where the suite ignores SIGINT or SIGHUP: in the background, and under nohup."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that the test saves, which are not drawn."""
    from matplotlib.figure import Figure

    saved: list[Any] = []

    def save(figure: Figure, path: Path, **options: Any) -> None:
        saved.append(figure)
        path.touch()

    monkeypatch.setattr(Figure, "savefig", save)
    return saved


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of small trained checkpoints and texts beside the repository."""
    folder = Path(__file__).parents[2] / "shared"
    if not (folder / "checkpoints").is_dir():
        pytest.skip("needs ../shared/checkpoints, the small trained models, beside the repository")
    return folder


@pytest.fixture(scope="session")
def _files_of_examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from qknorm_tests.doc_examples import make_folder

    return make_folder(tmp_path_factory.mktemp("examples"))


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, _files_of_examples: Path) -> Path:
    """The working directory in which the examples of pages and docstrings run, with their files."""
    shutil.copytree(_files_of_examples, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A distributed group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def compiled() -> None:
    """Skip without the C++ kernels; HF_QKNORM_CPU=1, as CI has it, makes that a failure."""
    from hf_qknorm.ops.cpu import build

    reason = build.why_not()
    if reason is not None and os.environ.get("HF_QKNORM_CPU") != "1":
        pytest.skip(reason)
    assert reason is None
