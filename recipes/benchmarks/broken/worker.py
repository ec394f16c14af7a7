"""A process that loads, converts, exports and inspects checkpoints: one request per line. It survives its requests.

    python recipes/benchmarks/broken/worker.py plain | package

`plain` imports transformers alone. The process imports everything once and forks. The child answers requests under a
time and a memory limit of the kernel. If it dies, the parent reports how, and forks the next one.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
import traceback
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parents[1])  # the benchmarks, as if one of them had been started
MEMORY = 3 * 2**30  # bytes that a request may add
NOBODY = 65534


def outputs(model: Any) -> dict[str, Any]:
    """Return the logits of a model for a few tokens, and their dtype."""
    import torch

    from broken.bases import TOKENS

    with torch.no_grad():
        out = model.eval()(torch.tensor([TOKENS]) % model.get_input_embeddings().num_embeddings)[0]
    return {"logits": out.double().flatten().tolist(), "dtype": str(model.dtype), "class": type(model).__name__}


def load(folder: str, auto: str) -> dict[str, Any]:
    import torch
    import transformers

    torch.manual_seed(0)
    model, info = getattr(transformers, auto).from_pretrained(
        folder, output_loading_info=True, trust_remote_code=False, use_safetensors=True
    )
    made_up = sorted(map(str, (*info["missing_keys"], *info["mismatched_keys"])))
    return {**outputs(model), "made_up": made_up[:3]}


def tokens(folder: str) -> dict[str, Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    try:
        return {"tokens": tokenizer("to be or not")["input_ids"]}
    except Exception as error:  # it loads, and its vocabulary lacks what it needs
        return {"tokens": str(error)}


def build(root: str) -> dict[str, Any]:
    from broken import bases

    bases.build(Path(root))
    return {}


def convert(folder: str, destination: str) -> dict[str, Any]:
    from hf_qknorm import convert_checkpoint

    convert_checkpoint(folder, destination, "qk_norm_cap")
    return {}


def export(folder: str, destination: str) -> dict[str, Any]:
    from hf_qknorm import export_native

    export_native(folder, destination)
    return {}


def inspect(folder: str, texts: str) -> dict[str, Any]:
    from hf_qknorm.inspection.inspect import inspect_checkpoint

    found = inspect_checkpoint(folder, texts=texts, tokens=32)
    prediction = found.patched or found.base
    return {"loss": prediction.loss if prediction else None, "length": found.length}


def reference(folder: str, auto: str, scheme: Any, norms: str | None = None, blend: float | None = None) -> Any:
    """Return the unpatched checkpoint in `folder`, loaded by transformers, patched, with the norms from the folder
    `norms`.

    Raises an error if those are not the norms of `scheme`.
    """
    import torch
    import transformers
    from safetensors.torch import load_file

    from hf_qknorm import Scheme, patch_model
    from hf_qknorm.training.blend import set_blend

    model, info = getattr(transformers, auto).from_pretrained(folder, output_loading_info=True)
    patch_model(model, Scheme.of(scheme))
    if blend is not None:
        set_blend(model, blend)
    if norms is not None:
        stored: dict[str, Any] = {}
        single = Path(norms, "model.safetensors")  # transformers reads this one, whatever lies beside it
        for path in [single] if single.is_file() else Path(norms).glob("*.safetensors"):
            stored |= load_file(path)
        own = {"q_norm", "k_norm", "v_norm"}
        expected = model.state_dict()
        names = {name for name in expected if own & set(name.split("."))}
        if names != {name for name in stored if own & set(name.split("."))}:
            raise KeyError("other norms")
        if not all(
            stored[name].dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16) for name in names
        ):
            raise TypeError("norms that are no floating point")
        model.load_state_dict({name: stored[name].to(expected[name].dtype) for name in names}, strict=False)
    return {**outputs(model), "made_up": sorted(map(str, (*info["missing_keys"], *info["mismatched_keys"])))[:3]}


def wait(path: str) -> dict[str, Any]:
    """Read a file, forever if it is a pipe."""
    return {"text": Path(path).read_text()}


COMMANDS = {f.__name__: f for f in (wait, load, tokens, build, convert, export, inspect, reference)}


@contextmanager
def unprivileged(wanted: bool) -> Any:
    """Drop root rights, which override file permissions."""
    if not wanted or os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a command, or the error that it raised."""
    limit, drop = request.pop("limit"), request.pop("unprivileged", False)
    command = COMMANDS[request.pop("command")]
    signal.alarm(limit)  # its default action ends the process, wherever it is
    try:
        with unprivileged(drop):
            return {"kind": "done", **command(**request)}
    except (Exception, SystemExit) as error:
        frames = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
        own = [f for f in traceback.extract_tb(error.__traceback__) if f"hf_qknorm{os.sep}" in f.filename]
        place = f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else frames[-1]
        one_line = isinstance(error, ValueError | OSError | ImportError)  # by the command line
        return {"kind": "error", "type": type(error).__name__, "one_line": one_line, "text": str(error), "place": place}
    finally:
        signal.alarm(0)


def serve(answers: int) -> None:
    """Answer requests from standard input until it ends."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    line = b""
    while data := os.read(0, 2**16):
        line += data
        if line.endswith(b"\n"):
            os.write(answers, json.dumps(answer(json.loads(line))).encode() + b"\n")
            line = b""


def main() -> None:
    answers = os.dup(1)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)  # libraries print; this channel is for answers
    warnings.simplefilter("ignore")
    import torch
    from transformers.utils import logging as transformers_logging

    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity(logging.CRITICAL + 1)
    logging.disable(logging.CRITICAL)
    if sys.argv[1] == "package":
        import hf_qknorm  # noqa: F401
        import hf_qknorm.inspection.inspect  # noqa: F401
    while True:
        child = os.fork()
        if child == 0:
            serve(answers)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if status == 0:
            return
        ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else -os.WEXITSTATUS(status)
        kind = "hang" if ended == signal.SIGALRM else "crash"
        os.write(answers, json.dumps({"kind": kind, "text": f"ended by {ended}"}).encode() + b"\n")


if __name__ == "__main__":
    main()
