"""Memory and time of a conversion without calibration, beside copying the same checkpoint.

    python recipes/bench_convert.py --gigabytes 4 --folder /tmp --output convert.md

A synthetic Llama of bfloat16 noise, in shards, is copied and converted in turns, each in a fresh process that has made
its imports and read the source once; both are timed until everything is on the disk (fsync). Memory is the process's
largest resident size (VmHWM, Linux). Needs three times the checkpoint's size on the disk.
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
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from hf_qknorm import convert_checkpoint
from hf_qknorm.files import replace_text

SCHEMES = ("qk_norm_cap", "qkv_norm")
WORKERS = ("copy", *SCHEMES)


def synthesise(folder: Path, gigabytes: float, shards: int) -> int:
    """Write a sharded Llama of about that size, as noise; returns the bytes of its largest shard."""
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
            noise = torch.randint(0x3C00, 0x3D00, shapes[name], dtype=torch.int16)  # small bfloat16 numbers
            tensors[name] = noise.view(torch.bfloat16)
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


def peak() -> float:
    """The largest resident size of this process so far, in MB."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) * 1024 / 1e6


def measure(source: Path, target: Path, runs: int) -> dict[str, list[dict[str, float]]]:
    """Every worker in turns, each run in a process of its own."""
    results: dict[str, list[dict[str, float]]] = {what: [] for what in WORKERS}
    for _ in range(runs):
        for what in WORKERS:
            command = [sys.executable, __file__, "--worker", what, str(source), str(target)]
            finished = subprocess.run(command, capture_output=True, text=True, check=True)
            results[what].append(json.loads(finished.stdout.splitlines()[-1]))
            shutil.rmtree(target)
    return results


def report(results: dict[str, list[dict[str, float]]], size: int, shard: int) -> str:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    copy = [run["seconds"] for run in results["copy"]]
    lines = [
        f"{size / 1e9:.2f} GB in shards of at most {shard / 1e6:,.0f} MB; {len(copy)} runs in turns; "
        f"{platform.machine()}, {os.cpu_count()} CPUs, torch {torch.__version__}, Python {platform.python_version()}, "
        f"commit {commit.strip()}, {datetime.date.today()}.",
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", default=None, help="where to work: the disk that is measured")
    parser.add_argument("--output", help="write the table here as well")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        what, source, target = options.worker
        print(json.dumps(work(what, Path(source), Path(target))))
        return
    with TemporaryDirectory(dir=options.folder) as folder:
        source = Path(folder) / "source"
        source.mkdir()
        shard = synthesise(source, options.gigabytes, options.shards)
        size = sum(path.stat().st_size for path in source.iterdir())
        text = report(measure(source, Path(folder) / "target", options.runs), size, shard)
    print(text)
    if options.output:
        replace_text(Path(options.output), text + "\n")


if __name__ == "__main__":
    main()
