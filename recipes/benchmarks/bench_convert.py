"""Benchmark conversions: memory and time without calibration beside a copy, and calibration in limited memory.

    python recipes/benchmarks/bench_convert.py --gigabytes 4 --folder /tmp --output convert.md
    python recipes/benchmarks/bench_convert.py --gigabytes 4 --folder /tmp --max-memory 2GB --output streamed.md

A synthetic Llama of bfloat16 noise, in shards, is copied and converted by turns, each in a fresh process that has
finished its imports and has read the source once. Times end when everything is on the disk (fsync). Memory is the
largest resident size of the process (VmHWM, Linux). The benchmark needs three times the checkpoint's size on the disk.

With `--max-memory` the checkpoint is converted once, with calibration on random tokens. The exit status is 1 if the
largest resident size is above the limit. This is stricter than a limit of the system: it counts the pages of mapped
files, which the kernel can drop. (RLIMIT_AS and RLIMIT_DATA cannot be set as low: they count mapped files in full.) The
weights are dropped from the page cache before each forward pass, as on a machine without memory to cache them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from hf_qknorm import convert_checkpoint
from hf_qknorm.checkpoint.memory import parse_size
from hf_qknorm.files.atomic_io import replace_text

SCHEMES = ("qk_norm_cap", "qkv_norm")
WORKERS = ("copy", *SCHEMES)
LENGTH = 64  # of the sequences of a calibration


def synthesise(folder: Path, gigabytes: float, shards: int) -> int:
    """Write a sharded Llama of noise of about this size; return the bytes of its largest shard."""
    layers = max(round((gigabytes * 1e9 / 2 - 2 * 32000 * 2048) / 52e6), shards)
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5504,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in LlamaForCausalLM(config).state_dict().items()}
    total = 2 * sum(shape.numel() for shape in shapes.values())
    weight_map: dict[str, str] = {}
    names, sizes = list(shapes), []
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        while names and (sum(2 * t.numel() for t in tensors.values()) < total / shards or i == shards - 1):
            name = names.pop(0)
            start = torch.ones if name.endswith("norm.weight") else partial(torch.normal, 0.0, 0.02)
            tensors[name] = start(size=shapes[name], dtype=torch.bfloat16)
            weight_map[name] = file
        save_file(tensors, folder / file, {"format": "pt"})
        sizes.append((folder / file).stat().st_size)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.save_pretrained(folder)
    return max(sizes)


def work(what: str, source: Path, target: Path) -> dict[str, float]:
    """Copy or convert, in this process; its time and its memory before and after."""
    for path in source.iterdir():  # into the page cache
        with path.open("rb") as file:
            while file.read(2**24):
                pass
    before = peak()
    start = time.perf_counter()
    if what == "copy":
        shutil.copytree(source, target)
        for path in target.iterdir():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)
    else:
        convert_checkpoint(source, target, what)
    return {"seconds": time.perf_counter() - start, "before": before, "peak": peak()}


def calibrate(source: Path, target: Path, max_memory: str, tokens: int) -> dict[str, float]:
    """Convert with calibration, in this process; its time, memory, forward passes and bytes read."""
    passes, shards = 0, sorted(source.glob("*.safetensors"))
    forward = LlamaModel.forward

    def counted(*args: Any, **inputs: Any) -> Any:
        nonlocal passes
        passes += 1
        for path in shards:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return forward(*args, **inputs)

    LlamaModel.forward = counted
    before, read, start = peak(), bytes_read(), time.perf_counter()
    text = torch.randint(32000, (tokens // LENGTH, LENGTH), generator=torch.Generator().manual_seed(0)).split(8)
    report = convert_checkpoint(source, target, "qk_norm_cap", calibration=text, max_memory=max_memory)
    seconds = time.perf_counter() - start
    print(report, file=sys.stderr)
    return {
        "seconds": seconds,
        "before": before,
        "peak": peak(),
        "passes": passes,
        "read": bytes_read() - read,
        "knee": report.scheme.knee,
        "rise": report.loss - report.base_loss,
    }


def bytes_read() -> int:
    """Return the bytes that this process has read from the disk so far, mapped files included."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def streamed(source: Path, target: Path, max_memory: str, tokens: int, size: int) -> tuple[str, bool]:
    """Convert with calibration in a process of its own; return its figures, and whether the limit held."""
    command = [sys.executable, __file__, "--worker", "calibrate", str(source), str(target)]
    command += ["--max-memory", max_memory, "--tokens", str(tokens)]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    run = json.loads(finished.stdout.splitlines()[-1])
    within = run["peak"] * 1e6 <= parse_size(max_memory)
    rows = {
        "checkpoint": f"{size / 1e9:.2f} GB",
        "`max_memory`": max_memory,
        "largest resident size": f"{run['peak']:,.0f} MB, of which imports {run['before']:,.0f} MB",
        "stayed within": "yes" if within else "NO",
        "calibration": f"{tokens:,} tokens, knee {run['knee']:g}, loss {run['rise']:+.4f} nats",
        "forward passes": f"{run['passes']:.0f}",
        "read from the disk": f"{run['read'] / 1e9:.1f} GB",
        "seconds": f"{run['seconds']:.0f}",
    }
    return "\n".join(
        [machine(), "", "| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items())]
    ), within


def peak() -> float:
    """The largest resident size of this process so far, in MB."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) * 1024 / 1e6


def measure(source: Path, target: Path, runs: int) -> dict[str, list[dict[str, float]]]:
    """Run every worker by turns, each run in a process of its own."""
    results: dict[str, list[dict[str, float]]] = {what: [] for what in WORKERS}
    for _ in range(runs):
        for what in WORKERS:
            command = [sys.executable, __file__, "--worker", what, str(source), str(target)]
            finished = subprocess.run(command, capture_output=True, text=True, check=True)
            results[what].append(json.loads(finished.stdout.splitlines()[-1]))
            shutil.rmtree(target)
    return results


def report(results: dict[str, list[dict[str, float]]], size: int, shard: int) -> str:
    copy = [run["seconds"] for run in results["copy"]]
    lines = [
        f"{size / 1e9:.2f} GB in shards of at most {shard / 1e6:,.0f} MB; {len(copy)} runs in turns; {machine()}",
        "",
        "| | seconds: median | min | max | × copying, in the same turn | peak MB | of which imports |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for what, runs in results.items():
        seconds = [run["seconds"] for run in runs]
        ratio = statistics.median(ours / theirs for ours, theirs in zip(seconds, copy, strict=True))
        most, before = max(run["peak"] for run in runs), max(run["before"] for run in runs)
        lines.append(
            f"| {what} | {statistics.median(seconds):.2f} | {min(seconds):.2f} | {max(seconds):.2f} | {ratio:.2f} | "
            f"{most:,.0f} | {before:,.0f} |"
        )
    return "\n".join(lines)


def machine() -> str:
    """Describe the machine, the versions, the commit and the date."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    return (
        f"{platform.machine()}, {os.cpu_count()} CPUs, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, Python {platform.python_version()}, commit {commit.strip()}, "
        f"{datetime.date.today()}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", default=None, help="where to work: the disk that is measured")
    parser.add_argument("--output", help="write the table here as well")
    parser.add_argument("--max-memory", help="convert with calibration instead, within this memory, as 2GB")
    parser.add_argument(
        "--tokens", type=int, default=1024, help=f"random tokens to calibrate on, in sequences of {LENGTH}"
    )
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        what, source, target = options.worker[0], *map(Path, options.worker[1:])
        run = partial(calibrate, max_memory=options.max_memory, tokens=options.tokens)
        print(json.dumps(run(source, target) if what == "calibrate" else work(what, source, target)))
        return
    within = True
    with TemporaryDirectory(dir=options.folder) as folder:
        source = Path(folder) / "source"
        source.mkdir()
        shard = synthesise(source, options.gigabytes, options.shards)
        size = sum(path.stat().st_size for path in source.iterdir())
        target = Path(folder) / "target"
        if options.max_memory:
            text, within = streamed(source, target, options.max_memory, options.tokens, size)
        else:
            text = report(measure(source, target, options.runs), size, shard)
    print(text)
    if options.output:
        replace_text(Path(options.output), text + "\n")
    if not within:
        sys.exit(1)


if __name__ == "__main__":
    main()
