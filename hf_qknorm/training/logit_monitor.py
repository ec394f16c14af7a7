"""`LogitMonitor`: samples attention logits and entropies every N steps of a training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import TrainerCallback, TrainerState, TrainingArguments

from hf_qknorm.files.log import is_first_rank, logger
from hf_qknorm.files.paths import check_writable, user_path
from hf_qknorm.files.untrusted import check_count
from hf_qknorm.measure.bounds import norm_limits
from hf_qknorm.measure.logit_statistics import watched_layers
from hf_qknorm.measure.predictions import layer_statistics
from hf_qknorm.model.passes import PassFilter
from hf_qknorm.reports.logit_log import LogitSample, nan_as_inf, read_log

if TYPE_CHECKING:
    from transformers import Trainer  # slow to import

START = b'{"format":'  # of a line in the file


class LogitMonitor(TrainerCallback):
    """Trainer callback: samples the attention of a model, patched or not, every `every` steps; others cost nothing.

    A sample covers the first `rows` sequences of the step's first micro-batch, of the first of several ranks. It has,
    per layer and head, the largest |logit|, the entropy (nats), and the shares of logits over half the cap and over the
    cap (50 without one); per layer, the largest gain of the norms of queries and keys, of a scheme or of the model
    itself (Qwen3), and the bound that they set on |logit|. Recomputed passes do not count, nor do passes without
    gradients, as of an evaluation or a generation (GRPO). In sampled steps compiled models run eagerly, and kernels run
    without norm and RoPE in them.

    The Trainer logs the largest |logit|, the least entropy and the largest bound; the loggers in its `report_to` get
    the worst of each number, by `attach`; and `path`, a JSONL file that `hf-qknorm monitor` draws, gets everything, as
    does `last`. A resumed run continues its file; give another run a path of its own, as of several runs in a file the
    last one is drawn. A warning names heads with a |logit| over `limit` (default: twice the cap), once until they
    recover.

        >>> monitor = qk.LogitMonitor(every=10, path="logits.jsonl")
        >>> ids = torch.arange(8)[None]
        >>> with monitor.watch(model, step=10):
        ...     model(ids, labels=ids).loss.backward()
        >>> monitor.last.step, list(monitor.last.summary())
        (10, ['attention/max_logit', 'attention/min_entropy'])
        >>> monitor = qk.LogitMonitor(every=10).attach(trainer)  # or in the Trainer

    Raises ValueError for arguments out of range, a `path` with something else than samples in it, a model without an
    attention layer of a known family, or split by tensor parallelism or nn.DataParallel, and OSError for a path that
    can't be written.
    """

    def __init__(
        self, every: int = 10, path: str | Path | None = None, *, rows: int = 2, limit: float | None = None
    ) -> None:
        if not (limit is None or limit > 0):
            raise ValueError(f"limit={limit}: expected a |logit| > 0, or None for twice the cap")
        self.every, self.rows, self.limit = check_count(every, "every"), check_count(rows, "rows"), limit
        self.path = None if path is None else user_path(path, "path").absolute()
        self.last: LogitSample | None = None
        self._trainer: Trainer | None = None
        self._watch: _Watch | None = None  # of the present step
        self._over: set[tuple[str, int]] = set()  # the heads over the limit
        if self.path is not None and is_first_rank():
            _prepare(self.path)

    def attach(self, trainer: Trainer) -> LogitMonitor:
        """Add the monitor to a Trainer and its loggers; returns the monitor.

        A callback has no reference to its Trainer: with `callbacks=[monitor]` alone, the numbers go to the Trainer's
        `log_history` and to `path`, but not to the loggers in `report_to`.
        """
        if not hasattr(trainer, "add_callback"):
            raise TypeError(f"LogitMonitor.attach takes a Trainer, got {type(trainer).__name__}")
        self._trainer = trainer
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        return self

    @contextmanager
    def watch(self, model: Any, step: int) -> Iterator[None]:
        """Sample the first forward pass in the block if `step` is a multiple of `every`."""
        if step % self.every:
            yield
            return
        with closing(_Watch(model, self.rows)) as watch:
            yield
        self._finish(watch, step)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.close()
        if args.n_gpu > 1:
            raise ValueError(f"LogitMonitor does not support nn.DataParallel ({args.n_gpu} GPUs): start with torchrun")
        if self._trainer is None and args.report_to:
            logger.warning(f"{args.report_to} get no numbers from LogitMonitor: use LogitMonitor(...).attach(trainer)")

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.close()
        if (state.global_step + 1) % self.every == 0:
            self._watch = _Watch(kwargs["model"], self.rows, compiled=args.torch_compile)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        watch = self._watch
        self.close()
        if watch is None or (sample := self._finish(watch, state.global_step)) is None:
            return
        from transformers.integrations import INTEGRATION_TO_CALLBACK  # slow to import, and loaded by now

        state.log_history.append({**sample.summary(), "epoch": state.epoch, "step": state.global_step})
        # not by `Trainer.log`: TRL's would add its averages so far, and clear them
        for callback in () if self._trainer is None else self._trainer.callback_handler.callbacks:
            all_numbers = isinstance(callback, tuple(INTEGRATION_TO_CALLBACK.values()))
            callback.on_log(args, state, control, logs=sample.scalars() if all_numbers else sample.summary(), **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """Remove the hooks of the present step from the model.

        An exception in a sampled step of a Trainer leaves it on the model. The next run takes it off too.
        """
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _finish(self, watch: _Watch, step: int) -> LogitSample | None:
        """Record the sample of a step on the first rank; None, with a warning, without one."""
        found = watch.found.items()
        layers = {name: layer_statistics(seen, cap=seen.cap, **watch.limits.get(name, {})) for name, seen in found}
        if not layers:
            logger.warning(f"LogitMonitor saw no forward pass to sample in step {step}: nothing is recorded")
            return None
        self.last = sample = LogitSample(step, layers)
        if is_first_rank():
            if self.path is not None:
                with self.path.open("ab", buffering=0) as file:  # one write: a killed run damages the last line at most
                    file.write(sample.line().encode())
            self._warn(sample)
        return sample

    def _warn(self, sample: LogitSample) -> None:
        """Warn of the heads over the limit that were not at the last sample."""
        limits = {name: self.limit or 2 * layer.cap for name, layer in sample.layers.items()}
        over = [found for found in sample.heads() if not found[2] <= limits[found[0]]]  # NaN is over the limit
        new = [found for found in over if found[:2] not in self._over]
        self._over = {found[:2] for found in over}
        if new:
            name, head, largest, entropy = max(new, key=lambda found: nan_as_inf(found[2]))
            logger.warning(
                f"step {sample.step}: |logit| over {limits[name]:g} in {len(new)} heads, up to {largest:.4g} "
                f"({name}, head {head}, entropy {entropy:.3g} nats)"
            )


class _Watch:
    """Watches the first forward pass of a model until `close()`: one with gradients, unless it is made without.

    Without gradients are evaluations, and the generations of trainers such as GRPO's.

    An unpatched model has the scheme "none" until then. Gains and bounds are measured at the start.

    A `compiled` model runs eagerly until then: a compiled program ignores new hooks, and another program would be
    compiled for the sampled steps. Compiled modules in the model are found without the argument.
    """

    def __init__(self, model: Any, rows: int, *, compiled: bool = False) -> None:
        if getattr(model, "tp_size", None) not in (None, 1):
            raise ValueError("LogitMonitor does not support tensor-parallel models: each rank has other heads")
        with ExitStack() as stack:  # removes all hooks if the model is refused
            first = PassFilter()
            self.found = stack.enter_context(watched_layers(model, first, rows=rows))
            first.selects = partial(_is_first, torch.is_grad_enabled(), self.found)
            fsdp1 = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
            whole = not fsdp1 and all(p.numel() for p in model.parameters())  # not parts, or nothing, as under ZeRO-3
            self.limits = norm_limits(model) if whole else {}
            modules = list(model.modules())  # compiled in place, or in a wrapper
            if compiled or any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in modules):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            self.close = stack.pop_all().close


def _is_first(with_gradients: bool, found: Mapping[str, Any], model: Any) -> bool:
    """Whether a pass is the first of its kind; neither a lambda nor a method: pickles and copies of a model hold it."""
    return torch.is_grad_enabled() is with_gradients and not found


def _prepare(path: Path) -> None:
    """Make the file if need be, without a line that has no end. Raises ValueError for another file than a log."""
    check_writable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        read_log(path)
    with path.open("ab+") as file:
        file.seek(0)
        before, end, rest = file.read().rpartition(b"\n")
        if rest[: len(START)] != START[: len(rest)]:
            raise ValueError(f"{path} ends in something else than a sample: give another path")
        file.truncate(len(before + end))
