"""`hf-qknorm doctor`. It also reports where the package can't be imported."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

from hf_qknorm_command.findings import Finding, find_versions


def examine(code: str) -> Iterator[Finding]:
    """Yield all findings about this machine. `code` is the version of the package's code."""
    yield from find_versions(code)
    topic, problem = "import", "the package can't be imported"
    try:
        from hf_qknorm import doctor

        topic, problem = "machine", "the examination failed"
        yield from doctor.find_machine()
    except Exception as error:  # broken installations, drivers and compilers raise anything
        text = f"{problem}: {type(error).__name__}: {' '.join(str(error).split())}"
        yield Finding(topic, text, "problem")


def run(code: str, as_json: bool) -> None:
    """Print the findings. Raises ValueError if there are problems."""
    found = []
    for finding in examine(code):
        found.append(finding)
        if not as_json:
            sys.stdout.write(f"{finding}\n")
            sys.stdout.flush()
    if as_json:
        sys.stdout.write(f"{json.dumps([vars(finding) for finding in found], indent=2)}\n")
    if problems := [finding.topic for finding in found if finding.level == "problem"]:
        raise ValueError(f"the doctor found problems with {', '.join(problems)}")
