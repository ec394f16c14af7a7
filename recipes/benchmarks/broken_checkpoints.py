"""Load, convert and export broken checkpoints: each comes out right, or is refused by name.

    python recipes/benchmarks/broken_checkpoints.py --out recipes/results/broken_checkpoints.md
    python recipes/benchmarks/broken_checkpoints.py --count 200 --seed 1 --only gain
    python recipes/benchmarks/broken_checkpoints.py --case 113

Each case takes a sound checkpoint (eight model types, patched in several ways or not, in one file or in shards) and
breaks it by one or two seeded edits. "Right" means the logits of the sound checkpoint or, where the edit leaves a
possible checkpoint, those of the unpatched checkpoint with the same edit, patched as the config says. A refusal names
the file, the field or the tensor, and leaves nothing behind. The table also says where transformers alone loads the
same edit without an error, or fails with an error of its own; a process without hf_qknorm finds that out. The exit
status is 1 if any outcome is a fault: WRONG, an unnamed error, a traceback, a hang or a crash.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from broken.bases import BASES
from broken.cases import KINDS, Case, make_case
from broken.trial import COMMANDS, FAULTS, OUTCOMES, Trial, Verdict
from broken.workers import Facts, Workers, build
from machine import made
from markdown_table import publish, table
from run_log import provenance


@dataclass(frozen=True)
class Found:
    """The outcome of a case, command by command."""

    case: Case
    verdicts: dict[str, Verdict]

    @property
    def faults(self) -> dict[str, Verdict]:
        return {command: verdict for command, verdict in self.verdicts.items() if verdict.outcome in FAULTS}


class Bench:
    """The workers and the sound checkpoints of a run."""

    def __init__(self, root: Path, limit: int = 20) -> None:
        self.root, self.workers = root, Workers(limit)
        root.chmod(0o755)  # a process without rights must get into it
        self.facts: Facts = build(root, self.workers)

    def run(self, seed: int, numbers: list[int]) -> list[Found]:
        """Run the cases of these numbers, in their order."""
        cases = (make_case(self.root, seed, number) for number in numbers)
        return [Found(case, Trial(case, self.root, self.facts, self.workers).run()) for case in cases]


def counts(found: list[Found]) -> list[str]:
    """Format counts by kind of edit, command and outcome as Markdown."""
    rows = []
    for kind in (*KINDS, "all"):
        of_kind = [one for one in found if kind in ("all", one.case.kind)]
        for command in COMMANDS if of_kind else ():
            seen = Counter(one.verdicts[command].outcome for one in of_kind)
            rows.append([kind, command, str(len(of_kind)), *(str(seen[x] or "") for x in OUTCOMES)])
    return table(["broken", "command", "cases", *OUTCOMES], rows, "ll" + "r" * (1 + len(OUTCOMES)))


def listed(found: list[Found], verbose: bool) -> list[str]:
    """Format a line for each fault, or for every outcome."""
    return [
        f"--case {one.case}\n    {command}: {verdict.outcome}: {verdict.why}"
        for one in found
        for command, verdict in (one.verdicts if verbose else one.faults).items()
    ]


def page(found: list[Found], seconds: float) -> str:
    patched = sum(one.case.base.scheme is not None for one in found)
    return f"""# Broken checkpoints

`python recipes/benchmarks/broken_checkpoints.py {" ".join(sys.argv[1:])}`

{len(found):,} checkpoints ({patched:,} of them patched; {len(BASES)} models), {len(COMMANDS)} commands each, in \
{seconds:.0f} s; {provenance([{"made": made()}])}

- right: the logits of the sound checkpoint or, where the edit leaves a possible checkpoint, those that its config \
describes.
- refused, named: an error that the command line shows as one line, with the file, the field or the tensor; nothing is \
left behind.
- transformers is silent: transformers alone, in a separate process, loads the same edit without an error and gives \
the same result, or invents the same tensors.
- transformers' own error: transformers alone fails with the same error.
- WRONG, unnamed error (or a traceback), hang, crash: faults.

""" + "\n".join(counts(found))


def main(command: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--count", type=int, default=1500, help="how many checkpoints")
    add("--seed", type=int, default=0)
    add("--only", choices=KINDS, metavar="KIND", help=f"those broken in one way: {', '.join(KINDS)}")
    add("--case", type=int, action="append", metavar="N", help="this case alone, with all that was said")
    add("--out", type=Path, metavar="FILE", help="write the table there, as Markdown")
    args = parser.parse_args(command)
    numbers = args.case or [n for n in range(args.count) if args.only in (None, KINDS[n % len(KINDS)])]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="hf-qknorm-broken-") as root:
        bench = Bench(Path(root))
        try:
            found = bench.run(args.seed, numbers)
        finally:
            bench.workers.close()
    print("\n".join([*listed(found, verbose=bool(args.case)), ""]))
    publish(page(found, time.perf_counter() - start), args.out)
    return int(any(one.faults for one in found))


if __name__ == "__main__":
    sys.exit(main())
