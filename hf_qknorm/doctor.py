"""`hf-qknorm doctor`: versions, devices, which attention runs, and its numbers beside the specification in fp64.

Versions need no torch: they are shown also where the package can't be imported.
"""

from __future__ import annotations

import copy
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from packaging.requirements import Requirement
from packaging.version import Version

from hf_qknorm.version import __version__

if TYPE_CHECKING:
    import torch

    from hf_qknorm.ops.error_budget import Verdict

PROJECT: Final = "hf-qknorm"
# The oldest and the newest version that the tests have run with.
TESTED: Final[dict[str, tuple[str, str]]] = {
    "python": ("3.11", "3.13"),
    "torch": ("2.11", "2.15"),
    "transformers": ("5.17", "5.24"),
    "accelerate": ("1.15", "1.15"),
    "peft": ("0.21", "0.21"),
    "safetensors": ("0.8", "0.8"),
    "triton": ("3.6", "3.9"),
}
UNTESTED_DEVICE: Final = "the tests have run on CPUs and an H100 alone, never on such a device"
DTYPES: Final = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "bfloat16", "float16")}
TOKENS, VOCABULARY = 200, 64  # of the self-check


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
        yield from find_devices()
        yield from find_attention()
        yield check_numbers()
    except Exception as error:  # broken installations, drivers and compilers raise anything
        yield Finding("machine", f"{type(error).__name__}: {' '.join(str(error).split())}", "problem")


def check_versions() -> Iterator[Finding]:
    """Yield a line with the versions as they should be, and one for each that is not."""
    installed, place = _installed(PROJECT), Path(__file__).parent
    stale = installed not in (None, __version__)
    again = f", installed as {installed}: install it again, to bring its requirements along" if stale else ""
    yield Finding(PROJECT, f"{__version__}, in {place}{again}", "note" if stale else "ok")
    lines = [Requirement(line) for line in (requires(PROJECT) or [])] if installed else []
    needed = {r.name: str(r.specifier) for r in lines if r.marker is None or r.marker.evaluate({"extra": ""})}
    names = [name for name in dict.fromkeys([*TESTED, *needed]) if name in needed or _installed(name)]
    found = [check_version("python", platform.python_version(), ">=3.11")]
    found += [check_version(name, _installed(name), needed.get(name, "")) for name in names if name != "python"]
    yield Finding("packages", ", ".join(f"{each.topic} {each.text}" for each in found if each.level == "ok"))
    yield from (each for each in found if each.level != "ok")


def check_version(name: str, number: str | None, needed: str) -> Finding:
    """Compare a package's version, None if it is not installed, with the needed and the tested versions.

    Every release of a tested minor version counts as tested.

    >>> check_version("transformers", "5.9.0", ">=5.17,<6").level
    'problem'
    >>> str(check_version("transformers", "5.99.0", ">=5.17,<6"))
    'transformers NOTE: 5.99.0, which is untested: the tests have run with 5.17 to 5.24'
    """
    if number is None:
        return Finding(name, f'not installed: pip install "{name}{needed}"', "problem")
    if not Requirement(f"{name}{needed}").specifier.contains(number, prereleases=True):
        return Finding(name, f'{number}, but {needed} is needed: pip install "{name}{needed}"', "problem")
    oldest, newest = TESTED.get(name, (number, number))
    if _minor(oldest) <= _minor(number) <= _minor(newest):
        return Finding(name, number)
    tested = oldest if newest == oldest else f"{oldest} to {newest}"
    return Finding(name, f"{number}, which is untested: the tests have run with {tested}", "note")


def _minor(number: str) -> tuple[int, ...]:
    return Version(number).release[:2]


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


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
        yield (
            Finding("GPU", "none that torch can use") if other is None else Finding(other.type, UNTESTED_DEVICE, "note")
        )


def find_attention() -> Iterator[Finding]:
    """Yield whether each implementation serves a training step of a capped model, in the order of the choice.

    Kernels are compiled first if they were not before.
    """
    import torch

    from hf_qknorm.attend.implementations import IMPLEMENTATIONS
    from hf_qknorm.ops.types import Call, Heads, Options, Visible

    device, served = _device(), False
    q = torch.zeros(1, 4, TOKENS, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    call = Call(Heads(q, q, q), Visible(), Options(0.125, 50.0, causal=True))
    for implementation in IMPLEMENTATIONS:
        if not implementation.devices or device.type in implementation.devices:
            implementation.prepare()
            reason = implementation.why_not(call)
            text = "can't run here: " + " ".join(reason.split()) if reason else "runs" if not served else "would run"
            served = served or reason is None
            yield Finding("attention", f"{implementation.name} {text}", "note" if reason else "ok")


def check_numbers() -> Finding:
    """Compare a small patched model's logits and gradients in each dtype with the specification's, in fp64.

    A dtype passes by the error budget of `ops/error_budget.py`.
    """
    device = _device()
    texts, right = [], True
    for dtype in DTYPES[device.type]:
        try:
            found = attention_error(device, dtype)
        except Exception as failure:  # drivers and compilers raise anything
            text = f"attention fails in {dtype} on {device}: {type(failure).__name__}: {failure}"
            return Finding("numbers", " ".join(text.split()), "problem")
        texts.append(f"{found.error:.1e} in {dtype} ({found.budget:.1e} is allowed)")
        right &= found.passed
    text = f"{'right' if right else 'wrong'} on {device}: relative error {', '.join(texts)}"
    return Finding("numbers", text, "ok" if right else "problem")


def attention_error(device: torch.device, dtype: str) -> Verdict:
    """The verdict on a model with `hf_qknorm` attention on the device: on logits and gradients, each of length 1."""
    import torch

    from hf_qknorm.ops.error_budget import Verdict, verdict

    exact = _small_model().to(getattr(torch, dtype))
    ids = torch.arange(2 * TOKENS).view(2, TOKENS) * 7 % VOCABULARY
    got, eager = (
        _numbers(copy.deepcopy(exact).to(device), name, ids.to(device)) for name in ("hf_qknorm", "hf_qknorm_eager")
    )
    expected = _numbers(exact.double(), "hf_qknorm_eager", ids)
    actual, wanted, plain = (
        torch.cat([(x.double().cpu() / y.norm()).flatten() for x, y in zip(numbers, expected, strict=True)])
        for numbers in (got, expected, eager)
    )
    error, budget = verdict(actual, wanted, plain)
    return Verdict(error, budget + torch.finfo(getattr(torch, dtype)).eps)


def _device() -> torch.device:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _small_model() -> Any:
    """A patched Llama of one layer on the CPU: grouped queries, head_dim 64, and a cap that bends the logits."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from hf_qknorm import Scheme, patch_model

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=TOKENS, initializer_range=0.1,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return patch_model(LlamaForCausalLM(config), Scheme(q="rms", k="rms", softcap=5.0))


def _numbers(model: Any, attention: str, ids: Any) -> list[Any]:
    """The logits, and the gradients of the attention layer's parameters."""
    model.set_attn_implementation(attention)
    found = model(input_ids=ids, labels=ids)
    found.loss.backward()
    return [found.logits.detach(), *(p.grad for p in model.model.layers[0].self_attn.parameters())]
