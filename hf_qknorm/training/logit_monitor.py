"""`LogitMonitor`: samples attention logits, entropies and gradients every N steps of a training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_qknorm.files.log import is_first_rank, logger
from hf_qknorm.files.paths import user_path
from hf_qknorm.reports.records import COLLAPSED, LayerStatistics
from hf_qknorm.training.logit_log import LogitSample, append, log_file, nan_as_inf
from hf_qknorm.training.logit_sampler import LogitSampler

if TYPE_CHECKING:
    from transformers import Trainer  # slow to import


class LogitMonitor(TrainerCallback):
    """Trainer callback: samples the attention of a model, patched or not, every `every` steps; others cost nothing.

    A sample covers the first `rows` sequences of the step's first micro-batch on each rank. It has, per layer and head,
    the largest |logit|, the entropy (nats), the share of logits over the cap, the rms of q, k and v before any norm,
    and the norms of the gradients of the projections to q and k after clipping; per layer, the rms of the outputs of
    attention and of the MLP, the largest gain of the norms of queries and keys, of a scheme or of the model itself
    (Qwen3), and the bound that they set on |logit|.
    Recomputed passes do not count, nor do passes without gradients, as of an evaluation or a generation (GRPO). In
    sampled steps compiled models run eagerly, and kernels run without norm and RoPE in them.

    The Trainer logs the largest |logit|, the least entropy and the largest bound; the loggers in its `report_to` get
    more, by `attach`; and `path`, a JSONL file that `hf-qknorm monitor` draws, gets everything, as does `last`. A
    resumed run continues its file. Another run, such as a trial of a search, writes to a new one beside it, with a
    number: logits-2.jsonl. A warning per layer names the heads with a |logit| over `limit` (default: twice
    the cap), and heads with |logit| over half the cap and an entropy under `collapsed` times uniform attention's, once
    until they recover. Without a cap, 50 stands for it.

        >>> monitor = qk.LogitMonitor(every=10, path="logits.jsonl")
        >>> ids = torch.arange(8)[None]
        >>> with monitor.watch(model, step=10):  # before clipping and zero_grad()
        ...     model(ids, labels=ids).loss.backward()
        >>> monitor.last.step, list(monitor.last.summary())
        (10, ['attention/max_logit', 'attention/min_entropy'])
        >>> monitor = qk.LogitMonitor(every=10).attach(trainer)  # or in the Trainer

    Raises ValueError for arguments out of range, for a model without an attention layer of a known family, or split by
    tensor parallelism or nn.DataParallel, and OSError for a path that can't be written.
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
        self.file: Path | None = None  # of the present run
        self.last: LogitSample | None = None
        self._trainer: Trainer | None = None
        self._sampler: LogitSampler | None = None
        self._warned: dict[tuple[str, str], set[int]] = {}  # heads outside the limits, by layer and limit

    def attach(self, trainer: Trainer) -> LogitMonitor:
        """Add the monitor to a Trainer and its loggers; returns the monitor.

        A callback has no reference to its Trainer: with `callbacks=[monitor]` alone, the numbers go to the Trainer's
        `log_history` and to `path`, but not to the loggers in `report_to`. A subclass's own
        `Trainer.log` is not called: TRL's would mix its averages in.
        """
        self._trainer = trainer
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        return self

    @contextmanager
    def watch(self, model: Any, step: int) -> Iterator[None]:
        """Sample the forward and backward pass in the block if `step` is a multiple of `every`.

        The first sampled step of a run that is resumed is more than `every`.
        """
        if step % self.every:
            yield
            return
        if self.file is None:
            self._open(resumed=step > self.every)
        with closing(LogitSampler(model, self.rows)) as sampler:
            yield
            sampler.read_gradients()
        self._finish(sampler, step)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.close()
        if args.n_gpu > 1:
            raise ValueError(f"LogitMonitor does not support nn.DataParallel ({args.n_gpu} GPUs): start with torchrun")
        if self._trainer is None and args.report_to:
            logger.warning(f"{args.report_to} get no numbers from LogitMonitor: use LogitMonitor(...).attach(trainer)")
        self._open(resumed=state.global_step > 0)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.close()
        if (state.global_step + 1) % self.every == 0:
            self._sampler = LogitSampler(kwargs["model"], self.rows, compiled=args.torch_compile)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._sampler is not None:
            self._sampler.read_gradients()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        sampler = self.close()
        sample = None if sampler is None else self._finish(sampler, state.global_step)
        if sample is None:
            return
        if self._trainer is None:
            state.log_history.append({**sample.summary(), "epoch": state.epoch, "step": state.global_step})
            return
        from transformers import Trainer  # slow to import, and loaded by now
        from transformers.integrations import INTEGRATION_TO_CALLBACK

        loggers: Any = tuple(INTEGRATION_TO_CALLBACK.values())
        due = control.should_log  # `log` clears it, and the Trainer's own numbers may be due
        Trainer.log(self._trainer, sample.summary())  # TRL's own `log` would add its averages so far, and clear them
        control.should_log = due
        rest = {key: value for key, value in sample.scalars().items() if key not in sample.summary()}
        for callback in self._trainer.callback_handler.callbacks:  # but for those that print
            if isinstance(callback, loggers):
                callback.on_log(args, state, control, logs=dict(rest), **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> LogitSampler | None:
        """Take the sampler of the present step off the model, and return it; None without one.

        An exception in a sampled step of a Trainer leaves it on the model. The next run takes it off too.
        """
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            sampler.close()
        return sampler

    def _open(self, *, resumed: bool) -> None:
        """Choose the file of a run that begins."""
        if self.path is None or not is_first_rank():
            return
        self.file = log_file(self.path, resumed=resumed)
        if self.file != self.path:
            other = "is continued as" if resumed else "has samples of another run, and this run's go to"
            logger.warning(f"LogitMonitor: {self.path} {other} {self.file}")

    def _finish(self, sampler: LogitSampler, step: int) -> LogitSample | None:
        """Record the sample of a step on the first rank; None, with a warning, without one."""
        sample = sampler.sample(step)
        self.last = sample or self.last
        if not is_first_rank():
            return sample
        if sample is None:
            logger.warning(f"LogitMonitor saw no forward pass to sample in step {step}: nothing is recorded")
            return None
        if self.file is not None:
            append(self.file, sample)
        for name, layer in sample.layers.items():
            self._warn(step, name, layer)
        return sample

    def _warn(self, step: int, name: str, layer: LayerStatistics) -> None:
        """Warn of the layer's heads that are outside the limits and were not at the last sample."""
        limit = 2 * layer.cap if self.limit is None else self.limit
        least = self.collapsed * layer.even
        pairs = list(zip(layer.max_logit, layer.entropy, strict=True))
        too_large = {head for head, (largest, _) in enumerate(pairs) if not largest <= limit}  # NaN is over the limit
        sharp_cause = f"entropy under {least:.2g} nats, {self.collapsed:.0%} of uniform attention's"
        for kind, cause, now in (
            ("logit", f"|logit| over {limit:g}", too_large),
            ("entropy", sharp_cause, set(layer.collapsed(layer.cap, self.collapsed))),
        ):
            new = sorted(now - self._warned.get((name, kind), set()))
            self._warned[name, kind] = now
            if new:
                largest = max((pairs[head][0] for head in new), key=nan_as_inf)
                entropy = max((pairs[head][1] for head in new), key=lambda value: nan_as_inf(-value))
                numbers = f"|logit| up to {largest:.4g}, entropy down to {entropy:.3g}"
                heads = f"head{'s' if len(new) > 1 else ''} {', '.join(map(str, new))}"
                logger.warning(f"step {step}: {name}, {heads}: {cause} ({numbers})")
