"""`LogitMonitor`: every N steps of a training, what its attention logits, entropies and gradients look like."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_qknorm.convert.measurements import COLLAPSED
from hf_qknorm.files.paths import user_path
from hf_qknorm.training.logit_log import LayerSample, Sample, alarm, append, continue_log
from hf_qknorm.training.logit_sampler import Sampling, is_first_rank

if TYPE_CHECKING:
    from transformers import Trainer

logger = logging.getLogger(__name__)


class LogitMonitor(TrainerCallback):
    """Trainer callback: measures the attention of a patched model every `every` steps, and is nowhere in between.

        LogitMonitor(every=10, path="logits.jsonl").attach(trainer)

    Of a sampled step it looks at the first micro-batch's first `rows` sequences on each rank: per layer and head the
    largest |logit|, the entropy, the share of logits over the cap, the rms of q, k and v before any norm; and at the
    gradients of the projections to q and k as the optimizer gets them, so after clipping. Recomputed and evaluating
    passes don't count. Compiled models run eagerly in that step, and attention kernels without norm and RoPE in them.

    Each sample goes to the Trainer's loggers (`Sample.scalars`), to `path` (JSONL, all heads; `hf-qknorm monitor` draws
    it; a resumed run goes on in it) and to `last`. A log line a layer warns, of each head once until it recovers, of
    those whose |logit| is over `limit` (default: twice the cap, or 100 without one), and of those whose entropy is
    under `collapsed` of even attention's with |logit| over half the cap. Without a cap 50 stands for it.

    In a bare loop, around forward and backward of a step, before gradients are clipped or cleared:

        with monitor.watch(model, step):
            model(**batch).loss.backward()

    Raises ValueError for a model that is not patched (scheme "none" will do), or is spread by tensor parallelism or
    nn.DataParallel, and FileExistsError where `path` holds another run.
    """

    def __init__(
        self,
        every: int = 10,
        path: str | Path | None = None,
        *,
        rows: int = 2,
        limit: float | None = None,
        collapsed: float = COLLAPSED,
    ) -> None:
        if every < 1 or rows < 1:
            raise ValueError(f"every={every}, rows={rows}: expected whole numbers ≥ 1")
        if not (limit is None or limit > 0) or not 0 <= collapsed <= 1:
            raise ValueError(f"limit={limit}, collapsed={collapsed}: expected a |logit| > 0, and a share from 0 to 1")
        self.every, self.rows, self.limit, self.collapsed = every, rows, limit, collapsed
        self.path = None if path is None else user_path(path, "path")
        self.last: Sample | None = None
        self._trainer: Trainer | None = None
        self._sampling: Sampling | None = None
        self._opened = False
        self._warned: set[tuple[str, int, str]] = set()

    def attach(self, trainer: Trainer) -> LogitMonitor:
        """Add the monitor to a Trainer and let it use that Trainer's loggers; returns the monitor.

        A callback does not get to know its Trainer: given as `callbacks=[monitor]`, its numbers reach the Trainer's
        `log_history` and `path`, and nothing that `report_to` names.
        """
        self._trainer = trainer
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        return self

    @contextmanager
    def watch(self, model: Any, step: int) -> Iterator[None]:
        """Sample what happens within, if it is the turn of `step`: a multiple of `every`. Else nothing is done."""
        if step % self.every:
            yield
            return
        self._open(step - 1, resumed=False)
        with Sampling(model, self.rows) as sampling:
            yield
            sampling.read_gradients()
        self._finish(sampling, step)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._stop()
        if args.n_gpu > 1:
            raise ValueError(f"LogitMonitor can't watch nn.DataParallel over {args.n_gpu} GPUs: start with torchrun")
        if self._trainer is None and args.report_to:
            logger.warning(f"LogitMonitor is not heard by {args.report_to}: use LogitMonitor(...).attach(trainer)")
        self._opened = False
        self._open(state.global_step, resumed=state.global_step > 0)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._stop()
        if (state.global_step + 1) % self.every == 0:
            self._sampling = Sampling(kwargs["model"], self.rows, training=True, compiled=args.torch_compile)
            self._sampling.__enter__()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._sampling is not None:
            self._sampling.read_gradients()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        sampling = self._stop()
        if sampling is None:
            return
        self._finish(sampling, state.global_step)
        if self.last is None or self.last.step != state.global_step:
            return
        if self._trainer is None:
            state.log_history.append({**self.last.scalars(), "epoch": state.epoch, "step": state.global_step})
            return
        due = control.should_log  # logging clears it, and the Trainer's own numbers may be due too
        self._trainer.log(self.last.scalars())
        control.should_log = due

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._stop()

    def _stop(self) -> Sampling | None:
        """Leave the model alone; returns what was under way, if anything."""
        sampling, self._sampling = self._sampling, None
        if sampling is not None:
            sampling.close()
        return sampling

    def _open(self, step: int, *, resumed: bool) -> None:
        if self.path is not None and not self._opened and is_first_rank():
            continue_log(self.path, step, resumed=resumed)
        self._opened = True

    def _finish(self, sampling: Sampling, step: int) -> None:
        sample = sampling.sample(step)
        if sample is None:
            logger.warning(f"LogitMonitor saw no forward pass in training mode in step {step}: nothing is recorded")
            return
        self.last = sample
        if is_first_rank():
            if self.path is not None:
                append(self.path, sample)
            for name, layer in sample.layers.items():
                self._warn(step, name, layer)

    def _warn(self, step: int, name: str, layer: LayerSample) -> None:
        """Tell of a layer's heads what is wrong with them, where it was not at the last sample."""
        limit = 2 * layer.cap if self.limit is None else self.limit
        least = self.collapsed * layer.even
        pairs = list(zip(layer.max_logit, layer.entropy, strict=True))
        causes = {
            f"|logit| over {limit:g}": [not largest <= limit for largest, _ in pairs],  # what is no number is over it
            f"entropy under {least:.2g} nats, {self.collapsed:.0%} of even attention's": [
                entropy < least and largest > layer.cap / 2 for largest, entropy in pairs
            ],
        }
        for (cause, heads), kind in zip(causes.items(), ("logit", "entropy"), strict=True):
            here = {(name, head, kind) for head, wrong in enumerate(heads) if wrong}
            before = {key for key in self._warned if key[0] == name and key[2] == kind}
            new = sorted(head for _, head, _ in here - before)
            if new:
                largest = max((pairs[head][0] for head in new), key=alarm)
                entropy = max((pairs[head][1] for head in new), key=lambda value: alarm(-value))
                told = f"|logit| up to {largest:.4g}, entropy down to {entropy:.3g}"
                which = f"head{'s' if len(new) > 1 else ''} {', '.join(map(str, new))}"
                logger.warning(f"step {step}: {name}, {which}: {cause} ({told})")
            self._warned = self._warned - before | here
