"""Render the cards in `model_cards/` from calibrated conversions of small trained models.

    python recipes/model_cards.py --text ../shared/data/tinyshakespeare.txt --schemes qk_norm_cap qk_norm \\
        --checkpoints ../shared/checkpoints/llama-shakespeare ../shared/checkpoints/gpt2-shakespeare
    python recipes/model_cards.py --text ../shared/data/wikitext2-valid.txt --tokens 16384 \\
        --checkpoints "$(python recipes/real_model.py)"

Each conversion searches a knee and gains on the first tokens of the text. It takes about a minute on one core, and four
for the real model. The reports are kept, the converted checkpoints are not.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from hf_qknorm import SCHEMES, convert_checkpoint
from hf_qknorm.files.names import CARD, PLOT, REPORT


def make_card(checkpoint: Path, scheme: str, text: str, tokens: int, out: Path) -> None:
    """Convert a checkpoint in a temporary folder, and keep its card, plot and report in `out`."""
    with TemporaryDirectory() as temporary:
        converted = Path(temporary) / "converted"
        print(convert_checkpoint(checkpoint, converted, scheme, data=text, max_tokens=tokens), flush=True)
        out.mkdir(parents=True, exist_ok=True)
        for name in (CARD, REPORT, PLOT):
            shutil.copyfile(converted / name, out / name)
    print(f"written: {out}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoints", nargs="+", type=Path, required=True)
    parser.add_argument("--text", required=True, help="a file, a folder, or a Hub dataset's name")
    parser.add_argument("--tokens", type=int, default=262_144, help="of the text, by default %(default)s")
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=["qk_norm_cap"])
    parser.add_argument("--out", type=Path, default=Path("model_cards"))
    options = parser.parse_args()
    for checkpoint in options.checkpoints:
        for scheme in options.schemes:
            make_card(checkpoint, scheme, options.text, options.tokens, options.out / f"{checkpoint.name}-{scheme}")


if __name__ == "__main__":
    main()
