"""One run of continued training: start, steps, looks at the held-out text, faults, and a state to resume from."""

from __future__ import annotations

import json
import math
import time
import zlib
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from continued_arms import ARMS, STARTS, Arm, adamw
from ngrams import ngram_loss
from rounded_products import rounded_products
from run_log import Row, thinned
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hf_qknorm import calibrate, logit_statistics, patch_model, remove_norms, set_knee
from hf_qknorm.files.atomic_io import new_folder, replace_file, replace_text
from hf_qknorm.measure.text import load_text, sample_batches, tokenize
from hf_qknorm.model.knees import knee_of
from hf_qknorm.small_model import byte_tokenizer, mean_loss

FAULTS = ("noise", "rate")  # one batch of random tokens; the rate doubled for five steps
DOUBLED = 5
AFTER = 20  # steps after a fault in which the model is looked at
CALIBRATED = 24  # batches, for a start
BYTES = 300  # tokens at most for which tables of n-grams are counted
PIECE = 4_000_000  # characters that are tokenized at once
POINTS = 30  # of the training loss that are kept


@dataclass(frozen=True)
class Size:
    """The length of a run and its batches; `base` steps train a model of `layers` × `width` if none is given."""

    steps: int
    batch: int
    length: int
    warmup: int
    look: int
    looked: int
    judged: int
    judging: int = 8
    characters: int = 1_200_000
    layers: int = 4
    width: int = 256
    base: int = 200


SIZES = {
    "quick": Size(6, 2, 32, warmup=2, look=2, looked=1, judged=1, judging=2, layers=1, width=64, base=3),
    "cpu": Size(300, 4, 128, warmup=30, look=25, looked=1, judged=16),
    "real": Size(60, 4, 256, warmup=6, look=10, looked=1, judged=4, judging=4),  # of 135 M parameters, on a CPU
    "real-long": Size(200, 4, 256, warmup=20, look=25, looked=1, judged=8, judging=4),
    "gpu": Size(
        1200, 64, 1024, warmup=100, look=50, looked=2, judged=8, judging=32,
        characters=400_000_000, layers=12, width=640, base=1200,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Sources:
    """The trained model (None: one is trained on `known`), the text it knows, the text to learn, and a work folder."""

    checkpoint: str | None
    known: str | None
    text: str | None
    work: Path
    device: str = "cpu"

    @property
    def name(self) -> str:
        return Path(self.checkpoint).name if self.checkpoint else "base"

    @property
    def folder(self) -> Path:
        """The folder of this model's starts and unfinished runs."""
        return self.work / self.name


class Corpus:
    """A text in tokens; the last tenth is held out."""

    def __init__(self, source: str | None, tokenizer: Any, limit: int) -> None:
        text = load_text(source, limit=limit)
        name = Path(source).name if source else "the standard library"
        self.name = f"{name}, {len(text):,} characters, CRC {zlib.crc32(text.encode()):08x}"
        cut = len(text) * 9 // 10
        self.seen, self.held_out = _ids(tokenizer, text[:cut]), _ids(tokenizer, text[cut:])
        self.vocabulary = len(tokenizer)

    def ngrams(self) -> dict[str, float]:
        """The losses of a bigram and a trigram table on the held-out text; none for a vocabulary beyond bytes."""
        if self.vocabulary > BYTES:
            return {}
        tables = {"bigram": 2, "trigram": 3}
        return {name: ngram_loss(self.seen, self.held_out, self.vocabulary, n) for name, n in tables.items()}

    def training(self, size: Size, seed: int) -> list[Tensor]:
        return sample_batches(self.seen, size.steps, size.batch, size.length, seed=100 + seed)

    def judging(self, size: Size) -> list[Tensor]:
        return sample_batches(self.held_out, size.judged, size.judging, size.length, seed=0)


def _ids(tokenizer: Any, text: str) -> Tensor:
    """The token ids of a text, read in pieces: a tokenizer takes 200 bytes of memory per character."""
    return torch.cat([tokenize(tokenizer, text[i : i + PIECE]) for i in range(0, len(text), PIECE)])


@cache
def corpus(source: str | None, checkpoint: str | None, limit: int) -> Corpus:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint) if checkpoint else byte_tokenizer()
    return Corpus(source, tokenizer, limit)


@dataclass
class Run:
    """A run at one of its steps: what to train, at which rate, and what was seen so far."""

    model: Any
    optimizer: Any
    arm: Arm
    rate: float
    size: Size
    precision: str
    fault: str
    record: Row

    def train(self, batches: list[Tensor], judging: list[Tensor], state: Path, end: float) -> Row | None:
        """Take the steps; at the time `end` store the run in `state` and return None."""
        schedule = self.arm.schedule
        knee = knee_of(self.model) if schedule else 0.0
        if schedule and knee == schedule.target:  # a calibrated model that needs no knee has none to lower
            schedule = None
        first = self._resume(state)
        for step, batch in enumerate(batches[first:], first):
            if schedule:
                set_knee(self.model, schedule.at(step, self.size.steps, knee))
            if time.monotonic() > end:
                return self._store(state, step)
            if self._looks(step):
                self.look(step, judging)
            if not math.isfinite(self._step(step, batch)):
                break
        if schedule:
            set_knee(self.model, schedule.target)
        if schedule and math.isinf(schedule.target):
            self.model = remove_norms(self.model)
        finite = math.isfinite(self.record["losses"][-1])
        self.look(self.size.steps, judging)
        with self._precision():
            held_out = mean_loss(self.model, judging) if finite else math.nan
        state.unlink(missing_ok=True)
        return {**self.record, "losses": thinned(self.record["losses"], POINTS), "held_out": round(held_out, 5)}

    def look(self, step: int, judging: list[Tensor]) -> None:
        """Record the held-out loss, the largest |logit| before any cap, and the smallest share of even entropy."""
        with self._precision(), torch.no_grad(), logit_statistics(self.model) as seen:
            loss = mean_loss(self.model, judging[: self.size.looked])
        logit = max(float(layer.max_logit.max()) for layer in seen.values())
        entropy = min(float(layer.entropy.min() / layer.even) for layer in seen.values())
        self.record["way"].append([step, round(loss, 4), round(logit, 2), round(entropy, 4)])

    def _step(self, step: int, batch: Tensor) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * self.factor(step)
        batch = batch.to(self.model.device)
        if self.fault == "noise" and step == self.size.steps // 2:
            generator = torch.Generator().manual_seed(step)
            batch = torch.randint(self.model.config.vocab_size, batch.shape, generator=generator).to(batch.device)
        with self._precision():
            loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.arm.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.record["losses"].append(loss.item())
        return self.record["losses"][-1]

    def factor(self, step: int) -> float:
        """The share of the rate at a step: warm-up, a cosine to a tenth, and the fault."""
        size = self.size
        cosine = 0.1 + 0.45 * (1 + math.cos(math.pi * step / size.steps))
        fault = self.fault == "rate" and 0 <= step - size.steps // 2 < DOUBLED
        return min((step + 1) / size.warmup, 1.0) * cosine * (2 if fault else 1)

    def _looks(self, step: int) -> bool:
        since = step - self.size.steps // 2
        return step % self.size.look == 0 or (self.fault != "none" and 0 <= since <= AFTER and since % 2 == 0)

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.precision == "bf16")

    def _store(self, state: Path, step: int) -> None:
        stored = {"step": step, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        state.parent.mkdir(parents=True, exist_ok=True)
        replace_file(state, lambda path: torch.save({**stored, "record": self.record}, path))

    def _resume(self, state: Path) -> int:
        """Continue a stored run; returns the next step, 0 for a new run."""
        if not state.exists():
            return 0
        stored = torch.load(state, map_location=self.model.device, weights_only=True)
        self.model.load_state_dict(stored["model"])
        self.optimizer.load_state_dict(stored["optimizer"])
        self.record = stored["record"]
        return int(stored["step"])


def run_one(settings: Row, sources: Sources, end: float = math.inf) -> Row | None:
    """Return the result of the run with these settings; None if it was stored at the time `end`."""
    size, arm, rate = Size(**settings["size"]), ARMS[settings["arm"]], settings["rate"]
    text = corpus(sources.text, sources.checkpoint, size.characters)
    torch.manual_seed(settings["seed"])
    model = load(sources.folder / arm.start).to(sources.device).train()
    optimizer = arm.optimizer(model, rate, settings.get("tau", 1.0))
    run = Run(model, optimizer, arm, rate, size, settings["precision"], settings["fault"], {"way": [], "losses": []})
    name = f"{zlib.crc32(repr(sorted(settings.items())).encode()):08x}.pt"
    judging = [batch.to(sources.device) for batch in text.judging(size)]
    with rounded_products(sources.device):
        return run.train(text.training(size, settings["seed"]), judging, sources.folder / name, end)


def load(folder: Path | str) -> Any:
    """The causal LM in a folder, in fp32 and without dropout, so that all arms see the same."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attn_dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def prepare(sources: Sources, size: Size, names: set[str], end: float = math.inf) -> bool:
    """Make the starts of these names, where they are missing; returns whether all are there at the time `end`.

    Raises ValueError for a work folder with starts of another checkpoint, text or size.
    """
    known = corpus(sources.known, sources.checkpoint, size.characters)
    _check_folder(sources, known, size)
    if not (sources.folder / "unpatched").exists() and not _base(sources, size, end):
        return False
    batches = sample_batches(known.seen, CALIBRATED, size.judging, size.length, seed=1)
    for name in sorted(names):
        if not (folder := sources.folder / name).exists():
            if time.monotonic() > end:
                return False
            start = STARTS[name]
            model = load(sources.folder / "unpatched").to(sources.device)
            if start.scheme is not None:
                patch_model(model, start.scheme)
            if start.calibration is not None:
                print(f"{sources.name}, {name}: {calibrate(model, batches, **start.calibration)}", flush=True)
            _save(model, folder)
    return True


def _check_folder(sources: Sources, known: Corpus, size: Size) -> None:
    path = Path(sources.checkpoint or "")
    checkpoint = str(path.resolve()) if sources.checkpoint and path.exists() else sources.checkpoint
    made = json.dumps({"checkpoint": checkpoint, "known": known.name, "size": asdict(size)})
    note = sources.folder / "made.json"
    if not note.exists():
        note.parent.mkdir(parents=True, exist_ok=True)
        replace_text(note, made)
    elif (found := note.read_text(encoding="utf-8")) != made:
        raise ValueError(f"{sources.folder} holds models of {found}, expected {made}: give another folder by --work")


def _base(sources: Sources, size: Size, end: float) -> bool:
    """Copy the checkpoint, or train a Llama on the known text; returns whether it is done at the time `end`."""
    if sources.checkpoint is not None:
        _save(load(sources.checkpoint), sources.folder / "unpatched")
        return True
    torch.manual_seed(0)
    width, heads = size.width, size.width // 64
    config = LlamaConfig(
        vocab_size=257, hidden_size=width, intermediate_size=8 * width // 3, num_hidden_layers=size.layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=2 * size.length,
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(sources.device).train()
    known, longer = corpus(sources.known, None, size.characters), replace(size, steps=size.base)
    rate, precision = 1e-3, "fp32" if sources.device == "cpu" else "bf16"
    run = Run(model, adamw(model, rate, 1.0), Arm(), rate, longer, precision, "none", {"way": [], "losses": []})
    judging = [batch.to(sources.device) for batch in known.judging(size)]
    result = run.train(known.training(longer, seed=0), judging, sources.folder / "base.pt", end)
    if result is not None:
        print(f"base: {result['held_out']:.4f} nats a token on the known text", flush=True)
        _save(model, sources.folder / "unpatched", byte_tokenizer())
    return result is not None


def _save(model: Any, folder: Path, tokenizer: Any = None) -> None:
    with new_folder(folder, lambda: None) as new:
        model.save_pretrained(new)
        if tokenizer is not None:
            tokenizer.save_pretrained(new)
