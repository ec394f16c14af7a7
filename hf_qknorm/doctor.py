"""`hf-qknorm doctor`: versions, devices, which attention runs, and its numbers beside the specification in fp64.

Versions need no torch: they are shown also where the package can't be imported.
"""

from __future__ import annotations

import copy
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from hf_qknorm.version import __version__

if TYPE_CHECKING:
    import torch

    from hf_qknorm.ops.error_budget import Verdict

PROJECT: Final = "hf-qknorm"
NEWEST: Final = {  # that the tests have run with
    "python": "3.13", "torch": "2.15", "transformers": "5.24", "accelerate": "1.15", "peft": "0.21",
    "safetensors": "0.8", "triton": "3.9",
}  # fmt: skip
UNTESTED_DEVICE: Final = "the tests have run on CPUs and an H100 alone, never on such a device"
DTYPES: Final = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "bfloat16", "float16")}
TOKENS: Final = 200  # of a sequence of the self-check


@dataclass(frozen=True)
class Finding:
    """A line of the report. A note is worth reading; after a problem the command's exit status is 1."""

    topic: str
    text: str
    level: Literal["ok", "note", "problem"] = "ok"

    def __str__(self) -> str:
        return f"{self.topic:13}{'' if self.level == 'ok' else f'{self.level.upper()}: '}{self.text}"


def examine() -> Iterator[Finding]:
    """Yield all findings about this machine, quick ones first."""
    yield from check_versions()
    try:
        import torch

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        yield from find_devices()
        yield from find_attention(device)
        yield check_numbers(device)
    except Exception as error:  # broken installations, drivers and compilers raise anything
        yield Finding("machine", f"{type(error).__name__}: {' '.join(str(error).split())}", "problem")


def check_versions() -> Iterator[Finding]:
    """Yield a line with the versions as they should be, and one for each that is not."""
    yield Finding(PROJECT, f"{__version__}, in {Path(__file__).parent}")
    lines = []
    with suppress(PackageNotFoundError):  # a folder on the path
        lines = [Requirement(line) for line in requires(PROJECT) or []]
    needed = {r.name: str(r.specifier) for r in lines if r.marker is None or r.marker.evaluate({"extra": ""})}
    found = [check_version("python", platform.python_version())]
    for name in dict.fromkeys([*NEWEST, *needed]):
        number = None
        with suppress(PackageNotFoundError):
            number = version(name)
        if name in needed or number is not None:
            found.append(check_version(name, number, needed.get(name, "")))
    yield Finding("packages", ", ".join(f"{each.topic} {each.text}" for each in found if each.level == "ok"))
    yield from (each for each in found if each.level != "ok")


def check_version(name: str, number: str | None, needed: str = "") -> Finding:
    """Compare a package's version, None if it is not installed, with the needed ones and the newest tested one.

    Every release of a tested minor version counts as tested.

    >>> check_version("transformers", "5.9.0", ">=5.17,<6").level
    'problem'
    >>> str(check_version("transformers", "5.99.0"))
    'transformers NOTE: 5.99.0, which is untested: the tests have run with versions up to 5.24'
    """
    if number is None or not SpecifierSet(needed).contains(number, prereleases=True):
        fault = "not installed" if number is None else f"{number}, but {needed} is needed"
        return Finding(name, f'{fault}: pip install "{name}{needed}"', "problem")
    newest = NEWEST.get(name, number)
    if Version(number).release[:2] <= Version(newest).release[:2]:
        return Finding(name, number)
    return Finding(name, f"{number}, which is untested: the tests have run with versions up to {newest}", "note")


def find_devices() -> Iterator[Finding]:
    """Yield the findings about CPU, GPUs and the C++ compiler."""
    import torch

    wanted = os.environ.get("CXX", "").split()[:1]  # with arguments, as in "ccache g++"
    compiler = next(filter(None, map(shutil.which, wanted or ("c++", "g++", "clang++", "cl"))), None)
    text = f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads of torch"
    yield Finding("CPU", f"{text}; C++ compiler: {compiler or 'none'}")
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        text = f"{found.name}, compute capability {found.major}.{found.minor}, {found.total_memory / 2**30:.0f} GiB"
        tested = (found.major, found.minor) == (9, 0)
        yield Finding(f"GPU {number}", text if tested else f"{text}: {UNTESTED_DEVICE}", "ok" if tested else "note")
    if not torch.cuda.is_available():
        other = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        yield Finding(other.type, UNTESTED_DEVICE, "note") if other else Finding("GPU", "none that torch can use")


def find_attention(device: torch.device) -> Iterator[Finding]:
    """Yield whether each implementation serves a training step of a capped model, in the order of the choice.

    Kernels are compiled first if they were not before.
    """
    import torch

    from hf_qknorm.attend.implementations import IMPLEMENTATIONS
    from hf_qknorm.ops.types import Call, Heads, Options, Visible

    served = False
    q = torch.zeros(1, 4, TOKENS, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    call = Call(Heads(q, q, q), Visible(), Options(0.125, 50.0, causal=True))
    for implementation in IMPLEMENTATIONS:
        if not implementation.devices or device.type in implementation.devices:
            implementation.prepare()
            reason = implementation.why_not(call)
            text = "can't run here: " + " ".join(reason.split()) if reason else "runs" if not served else "would run"
            served = served or reason is None
            yield Finding("attention", f"{implementation.name} {text}", "note" if reason else "ok")


def check_numbers(device: torch.device) -> Finding:
    """Compare a small patched model's logits and gradients in each dtype with the specification's, in fp64.

    A dtype passes by the error budget of `ops/error_budget.py`.
    """
    found = {dtype: attention_error(device, dtype) for dtype in DTYPES[device.type]}
    right = all(each.passed for each in found.values())
    errors = ", ".join(f"{each.error:.1e} in {name} ({each.budget:.1e} is allowed)" for name, each in found.items())
    text = f"{'right' if right else 'wrong'} on {device}: relative error {errors}"
    return Finding("numbers", text, "ok" if right else "problem")


def attention_error(device: torch.device, name: str) -> Verdict:
    """The verdict on a model of dtype `name` with `hf_qknorm` attention: on logits and gradients, each of length 1."""
    import torch

    from hf_qknorm.ops.error_budget import Verdict, verdict
    from hf_qknorm.patch import patch_model
    from hf_qknorm.scheme import Scheme
    from hf_qknorm.small_model import small_llama

    dtype = getattr(torch, name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = patch_model(small_llama(layers=1), Scheme(q="rms", k="rms", softcap=5.0)).to(dtype)  # bends logits

    def numbers(attention: str, place: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        """The logits, and the gradients of the attention layer's parameters."""
        copied = copy.deepcopy(model).to(place, dtype)
        copied.set_attn_implementation(attention)
        ids = torch.arange(2 * TOKENS, device=place).view(2, TOKENS) * 7 % 257
        found = copied(input_ids=ids, labels=ids)
        found.loss.backward()
        parts = (found.logits, *(p.grad for p in copied.model.layers[0].self_attn.parameters()))
        return [part.detach().double().cpu() for part in parts]

    exact = numbers("hf_qknorm_eager", "cpu", torch.float64)
    got, eager = (numbers(attention, device, dtype) for attention in ("hf_qknorm", "hf_qknorm_eager"))
    actual, wanted, plain = (
        torch.cat([(x / y.norm()).flatten() for x, y in zip(parts, exact, strict=True)])
        for parts in (got, exact, eager)
    )
    error, budget = verdict(actual, wanted, plain)
    return Verdict(error, budget + torch.finfo(dtype).eps)
