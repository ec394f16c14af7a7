"""Call the C++ operators with arguments that do not fit: each is refused by name, or has right results.

    python recipes/benchmarks/fuzz_operators.py --seconds 60 --sanitize
    python recipes/benchmarks/fuzz_operators.py --table

Arguments that fit are drawn by a seed, and edited one at a time: dtypes, shapes, layouts, devices, numbers. The table
(`--table`) says whether an edited call fits. If not, the operator has to raise an error that names an argument that
does not fit. If so, the results must have the bits of a call with each tensor in memory of its own, and memory around
its tensors, filled with NaN, must stay as it is. `--sanitize` compiles the C++ kernels with AddressSanitizer and parts
of UndefinedBehaviorSanitizer, in a folder of its own; their first finding ends the process. The exit status is 1 if
there is a fault.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import count
from pathlib import Path

import page
import torch
from fuzz.draws import Target, targets
from fuzz.edits import edits, guarded
from fuzz.lines import Values, misfits
from fuzz.tables import CPP
from torch import Tensor

from hf_qknorm.ops.cpu import build

SANITIZED = "HF_QKNORM_FUZZ_SANITIZED"
CHECKS = "address,integer-divide-by-zero,signed-integer-overflow,bounds"
FLAGS = f"-fsanitize={CHECKS} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1"


def fault(target: Target, values: Values) -> str | None:
    """The fault of a call, or None; counts neither refusals nor results as faults where the table has them."""
    wrong = misfits(target.table, values)
    inside = {name: guarded(x) if _is_plain(x) else (x, None) for name, x in values.items()}
    given, memories = ({name: pair[i] for name, pair in inside.items()} for i in range(2))
    before = {name: memory.clone() for name, memory in memories.items() if memory is not None}
    try:
        results = target.call(given)
    except Exception as error:  # torch's dispatcher refuses some calls by itself; any other error is a fault
        of_torch = isinstance(error, NotImplementedError) and any(x is None or _is_meta(x) for x in values.values())
        return None if of_torch else _refusal_fault(error, wrong)
    if any(map(_is_meta, values.values())):
        return None  # torch calls the fake, which reads no memory
    if wrong:
        return f"accepted, and {', '.join(wrong)} does not fit"
    for name, memory in before.items():
        outside = torch.ones(len(memory), dtype=torch.bool)
        x = given[name]
        outside.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(False)
        if not _same(memories[name][outside], memory[outside]):
            return f"memory around {name} was changed"
    alone = {name: x.clone(memory_format=torch.contiguous_format) if _is_plain(x) else x for name, x in values.items()}
    for number, (result, expected) in enumerate(zip(results, target.call(alone), strict=True)):
        if not _same(result, expected):
            return f"result {number} depends on memory around the arguments, or on their layout"
    return None


def _refusal_fault(error: Exception, wrong: list[str]) -> str | None:
    text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    if not wrong:
        return f"refused, and all arguments fit: {text}"
    named = any(re.search(rf"\b{name}\b", str(error)) for name in wrong)
    if not isinstance(error, (ValueError, IndexError)) and "Expected a value of type" not in str(error):
        return f"an error of another type: {text}"
    return None if named else f"refused without the name of {', '.join(wrong)}: {text}"


def _is_meta(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_meta


def _is_plain(x: object) -> bool:
    return isinstance(x, Tensor) and not x.is_meta


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(torch.nan_to_num(a, nan=12345.0), torch.nan_to_num(b, nan=12345.0))


def fuzz(seconds: float, seed: int) -> tuple[Counter[str], list[str]]:
    """Calls by operator, and the faults; runs at least one draw of each operator."""
    calls: Counter[str] = Counter()
    faults: list[str] = []
    build.why_not()  # compiled before the clock starts
    end = time.monotonic() + seconds
    for number in count(seed):
        for target in targets():
            values = target.draw(number)
            for words, edited in (("as drawn", values), *edits(values, target.table)):
                calls[target.name] += 1
                found = fault(target, edited)
                if found is not None:
                    faults.append(f"{target.name}, seed {number}, {words}: {found}")
        if time.monotonic() > end:
            return calls, faults


def table() -> str:
    """The table of operators as Markdown: a row for each argument of the operators that rely on the same."""
    operators: dict[tuple[str, str], list[str]] = {}
    for name, lines in CPP.items():
        for argument, line in lines.items():
            operators.setdefault((argument, str(line)), []).append(f"`{name}`")
    rows = [
        (f"`{argument}`", line, "all" if len(names) == len(CPP) else ", ".join(names))
        for (argument, line), names in operators.items()
    ]
    return "\n".join(page.table(["argument", "must be", "of the operators"], rows, "lll"))


def sanitizers(cache: str) -> dict[str, str]:
    """The environment of a process that compiles the C++ kernels with sanitizers, in the folder `cache`."""
    compiler = next(filter(None, map(shutil.which, ("c++", "g++"))))
    libraries = []
    # libstdc++ too: AddressSanitizer looks for its throw when it starts, and Python alone does not load it
    for name in ("libasan.so", "libstdc++.so"):
        command = [compiler, f"-print-file-name={name}"]
        libraries.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    sanitizing = Path(cache) / "c++"  # one word, as torch takes a compiler's name
    sanitizing.write_text(f'#!/bin/sh\nexec {compiler} {FLAGS} "$@"\n')
    sanitizing.chmod(0o700)
    return {
        SANITIZED: "1",
        "CXX": str(sanitizing),
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "XDG_CACHE_HOME": cache,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="after this time no new draw begins")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sanitize", action="store_true", help="compile the C++ kernels with sanitizers")
    parser.add_argument("--table", action="store_true", help="print the table of operators, and nothing else")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(), end="")
        return 0
    if arguments.sanitize and SANITIZED not in os.environ:
        with tempfile.TemporaryDirectory() as folder:  # the variables are read when the kernels are loaded
            return subprocess.run([sys.executable, *sys.argv], env=os.environ | sanitizers(folder)).returncode
    calls, faults = fuzz(arguments.seconds, arguments.seed)
    for line in (*(f"{name}: {number} calls" for name, number in calls.items()), *faults[:100]):
        print(line)
    print(f"{len(faults)} faults in {calls.total()} calls")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
