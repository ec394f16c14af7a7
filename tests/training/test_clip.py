"""QK-Clip against its rule computed from all logits, and in training loops."""

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import default_collate
from transformers import PreTrainedModel

from hf_qknorm import QKClip, Scheme, logit_statistics, patch_model
from hf_qknorm.families.style import CACHE
from hf_qknorm.model.attention import QKNormAttention, patched_layers
from hf_qknorm.ops.reference import visible
from hf_qknorm.ops.types import Call
from hf_qknorm.training.clip import largest_logits
from qknorm_tests.covering import covering
from qknorm_tests.head_rows import ROWS, attention_layers, outputs_first
from qknorm_tests.operator_calls import call
from qknorm_tests.short_runs import counting, trainer
from qknorm_tests.tables import fingerprint, hooks, make_batch, real, sharp_model
from qknorm_tests.tiny import tiny_model


class Recorder:
    """Records queries, keys, scale and inputs of the last call of every layer."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.heads: dict[str, tuple[Tensor, Tensor, float]] = {}
        self.inputs: dict[str, tuple[Any, Any]] = {}
        for name, layer in patched_layers(model).items():
            layer.observers = (partial(self.note, name),)
            layer.register_forward_pre_hook(partial(self.keep, name), with_kwargs=True)

    def note(self, name: str, _: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]) -> None:
        self.heads[name] = q.detach().double(), k.detach().double(), options["scaling"]

    def keep(self, name: str, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.inputs[name] = args, {key: value for key, value in kwargs.items() if key not in (CACHE, "layer_past")}


def dense_maxima(layer: QKNormAttention, q: Tensor, k: Tensor, scale: float, batch: dict[str, Any]) -> Tensor:
    """The largest visible logit of each head, from all logits."""
    logits = scale * q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2)
    row, column = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    seen = (column <= row) & (column > row - (layer.window or 1000))
    tokens = real(batch)
    seen = seen & tokens[:, None, None, :] & tokens[:, None, :, None]
    return logits.masked_fill(~seen, -math.inf).amax((0, 2, 3))


def clip_by_hand(model: PreTrainedModel, model_type: str, maxima: list[Tensor], threshold: float) -> None:
    rows = ROWS[model_type]
    for layer, largest in zip(attention_layers(model, model_type), maxima, strict=True):
        gamma = [min(1.0, threshold / float(m)) for m in largest]
        keys = len(rows["k"][1]) if "k" in rows else len(gamma)
        group = len(gamma) // keys
        shared = [min(gamma[g * group : (g + 1) * group]) for g in range(keys)]
        for part, (where, heads) in rows.items():
            power = {"q": 0.5, "k": 0.5, "uq": 0.5, "uk": 0.5, "qr": 1.0}.get(part, 0.0)
            for p in outputs_first(layer, where):
                for head, outputs in enumerate(heads if power else ()):
                    p[outputs] *= shared[head // (len(heads) // keys)] ** power


def made(model_type: str, scheme: Scheme | str = "none", **settings: Any) -> PreTrainedModel:
    return patch_model(sharp_model(model_type, initializer_range=0.5, **settings), scheme)


@pytest.mark.parametrize(("model_type", "kind"), covering(ROWS, ["plain", "left", "right"], strength=1))
def test_heads_are_clipped_by_the_rule(model_type, kind):
    model, expected = made(model_type), made(model_type)
    recorder, batch = Recorder(model), make_batch(kind)
    clip = QKClip(model, threshold=1e9)
    model(**batch)
    layers = patched_layers(model)
    maxima = [dense_maxima(layer, *recorder.heads[name], batch) for name, layer in layers.items()]
    assert clip.step() == {}
    clip.threshold = threshold = float(torch.cat(maxima).median())
    inputs = dict(recorder.inputs)
    model(**batch)
    clipped = clip.step()
    assert clipped
    assert all((factor < 1).any() for factor in clipped.values())
    clip_by_hand(expected, model_type, maxima, threshold)
    torch.testing.assert_close(dict(model.named_parameters()), dict(expected.named_parameters()), rtol=1e-5, atol=1e-6)
    for name, layer in layers.items():
        args, kwargs = inputs[name]
        layer(*args, **kwargs)
        assert float(dense_maxima(layer, *recorder.heads[name], batch).max()) <= threshold * (1 + 1e-4)
    assert max(float(m.max()) for m in maxima) > 1.1 * threshold


@pytest.mark.parametrize(
    ("scheme", "moved"),
    [(Scheme(q="rms"), {"k_proj": 1.0}), (Scheme(k="rms"), {"q_proj": 1.0}), (Scheme(v="rms", softcap=5.0), None)],
)
def test_with_one_side_normed_the_other_takes_the_whole_factor(scheme, moved):
    model = made("llama", scheme, num_hidden_layers=1)
    before, recorder, batch = copy.deepcopy(model), Recorder(model), make_batch("plain")
    clip = QKClip(model, threshold=2.0)
    model(**batch)
    ((name, layer),) = patched_layers(model).items()
    (factor,) = clip.step().values()
    changed = {
        path for (path, p), old in zip(model.named_parameters(), before.parameters(), strict=True) if (p != old).any()
    }
    assert {path.split(".")[-2] for path in changed} == set(moved or {"q_proj", "k_proj"})
    layer(*recorder.inputs[name][0], **recorder.inputs[name][1])
    largest = dense_maxima(layer, *recorder.heads[name], batch)
    torch.testing.assert_close(largest[factor < 1].max(), torch.tensor(2.0).double(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("frozen", [["layers.0"], ["q_proj"], ["layers.0", "k_proj"]])
def test_frozen_weights_stay_as_they_are(frozen):
    model = made("llama")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.requires_grad_(not any(part in name for part in frozen))
    clip = QKClip(model, threshold=1e-3)
    model(**make_batch("plain"))
    clip.step()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {n for n, p in model.named_parameters() if p.requires_grad and ("q_proj" in n or "k_proj" in n)}


@pytest.mark.parametrize("kind", ["causal", "window", "ranges", "boolean", "additive", "mask by head"])
def test_the_largest_logits_are_those_of_visible_keys(kind):
    q, k = (torch.randn(2, heads, 9, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2))
    q[:, ::2], k[:, 0] = 0.01 * q[:, ::2], 0.1 * k[:, 0]
    shown = visible(9, 9, True, 3 if kind == "window" else None).expand(2, 1 if kind != "mask by head" else 4, 9, 9)
    if kind not in ("causal", "window"):
        hidden = torch.rand(shown.shape, generator=torch.Generator().manual_seed(0)) < 0.7
        shown = shown & hidden.logical_not() if kind != "ranges" else visible(9, 9, True, 2)[None, None]
    ranges = torch.stack([(torch.arange(9) - 1).clamp_min(0), torch.arange(9) + 1], -1)[None].int()
    mask = torch.ones(shown.shape).masked_fill(~shown, torch.finfo().min) if kind == "additive" else shown
    rules = {"causal": {"causal": True}, "window": {"causal": True, "window": 3}, "ranges": {"ranges": ranges}}
    made = Call(*call(q, k, k, scale=0.5, **rules.get(kind, {"mask": mask})))
    logits = 0.5 * q @ k.repeat_interleave(2, 1).transpose(2, 3)
    expected = logits.masked_fill(~shown, -math.inf).amax((0, 2, 3))
    for threshold in (-1e9, *expected.sort().values.tolist()):
        found = largest_logits(made, threshold - 1e-3)
        torch.testing.assert_close(found[expected >= threshold], expected[expected >= threshold])
    q[0, 0, 3] = math.nan  # does not hide the other heads of its group
    torch.testing.assert_close(largest_logits(made, -1e9)[1:], expected[1:])


def clipped_after(model: PreTrainedModel, *batches: dict[str, Any]) -> dict[str, Tensor]:
    clip = QKClip(model, threshold=1.0)
    for batch in batches:
        model(**batch).loss.backward()
    return clip.step()


def other_batch(rows: int = 2, length: int = 13) -> dict[str, Any]:
    tokens = torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


def test_the_largest_logit_of_all_micro_batches_counts_once():
    first, second, both = (made("llama") for _ in range(3))
    one, two = clipped_after(first, make_batch("plain")), clipped_after(second, other_batch())
    clip = QKClip(both, threshold=1.0)
    for batch in (make_batch("plain"), other_batch()):
        both(**batch)
    for name, factor in clip.step().items():
        torch.testing.assert_close(factor, torch.minimum(one[name], two[name]))
    assert any(not torch.equal(one[name], two[name]) for name in one)
    assert clip.step() == {}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable:FutureWarning")  # renamed in v6
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    plain, model = made("llama"), made("llama")
    model.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
    clip = QKClip(model, threshold=1.0)
    losses = [model(**batch).loss for batch in (make_batch("right"), other_batch(rows=3))]
    sum(losses).backward()  # recomputes the layers after the second batch
    torch.testing.assert_close(clip.step(), clipped_after(plain, make_batch("right"), other_batch(rows=3)))


def test_other_observers_and_removal():
    model = made("llama")
    before = fingerprint(model)
    with logit_statistics(model) as outside:
        clip = QKClip(model, threshold=1.0)
        model(**make_batch("plain"))
    with logit_statistics(model) as inside:
        model(**make_batch("plain"))
        assert clip.step()
    assert inside.keys() == outside.keys() == patched_layers(model).keys()
    clip.watch()  # watching twice changes nothing
    assert all(len(layer.observers) == 1 for layer in patched_layers(model).values())
    clip.remove()
    assert fingerprint(model) == before
    assert not hooks(model)
    with pytest.raises(RuntimeError, match=r"layers\.0\.self_attn is not watched"):
        clip.step()


def test_a_copy_of_a_watched_model_has_a_clip_of_its_own():
    model, expected = made("llama"), clipped_after(made("llama"), make_batch("plain"))
    clip = QKClip(model, threshold=1.0)
    other, other_clip = copy.deepcopy((model, clip))
    copy.deepcopy(model)(**make_batch("plain"))  # watched by a copy of `clip`
    other(**make_batch("plain"))
    torch.testing.assert_close(other_clip.step(), expected)
    assert clip.step() == {}
    model(**make_batch("plain"))
    torch.testing.assert_close(clip.step(), expected)


def test_the_trainer_clips_as_a_bare_loop_does(tmp_path):
    model, expected = made("llama"), made("llama")
    trainer(
        model, tmp_path, QKClip(model, threshold=3.0), max_steps=3, per_device_train_batch_size=32,
        gradient_accumulation_steps=2, optim="sgd", learning_rate=0.1, lr_scheduler_type="constant", max_grad_norm=0,
    ).train()  # fmt: skip
    all_rows = default_collate(counting())
    clip, optimizer = QKClip(expected.train(), threshold=3.0), torch.optim.SGD(expected.parameters(), 0.1)
    clipped = 0
    for _ in range(3):
        expected(**all_rows).loss.backward()
        optimizer.step()
        clipped += len(clip.step())
        optimizer.zero_grad()
    assert clipped
    torch.testing.assert_close(dict(model.named_parameters()), dict(expected.named_parameters()), rtol=1e-4, atol=1e-5)
    assert not hooks(model)


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_pass_neither_ends_the_watch_nor_counts_in_the_next_run():
    model = made("llama")
    clip, batch = QKClip(model, threshold=1.0), make_batch("plain")
    hook = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(**batch)
    hook.remove()
    assert clip.largest
    clip.watch()
    assert not clip.largest
    with torch.no_grad():
        model(**batch)
    assert not clip.largest
    model(**batch)
    assert clip.largest.keys() == patched_layers(model).keys()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # in PEFT
def test_later_adapters_are_refused_and_nothing_is_scaled(tmp_path):
    """In a step, and when a Trainer begins."""
    model = made("llama")
    clip = QKClip(model, threshold=1e-3)
    adapted = get_peft_model(model, LoraConfig(target_modules=["v_proj", "q_proj"]))
    before = copy.deepcopy(adapted.state_dict())
    adapted(**make_batch("plain"))
    for change in (clip.step, trainer(adapted, tmp_path, clip).train):
        with pytest.raises(ValueError, match=r"q_proj is a peft.*Merge adapters first"):
            change()
    assert all(torch.equal(value, before[name]) for name, value in adapted.state_dict().items())


def test_heads_with_logits_that_overflowed_are_unchanged():
    """A factor of threshold / ∞ would set their weights to zero, where the gradient scaler skips the step."""
    model = made("gpt2")  # RoPE would make all of the head's logits NaN
    before, clip = copy.deepcopy(model), QKClip(model, threshold=1e6)
    bias = clip.layers["transformer.h.0.attn"].c_attn.bias
    with torch.no_grad():
        bias[0] = math.inf
    model(**make_batch("plain"))
    assert not clip.largest["transformer.h.0.attn"].isfinite().all()
    with torch.no_grad():
        bias[0] = before.transformer.h[0].attn.c_attn.bias[0]
    assert clip.step() == {}
    assert all(torch.equal(p, other) for p, other in zip(model.parameters(), before.parameters(), strict=True))


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="Linear is not patched: call patch_model"):
        QKClip(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="threshold is -1, expected a finite number > 0"):
        QKClip(made("llama"), threshold=-1)
    for model, sides in (
        (made("llama", "qk_norm"), "queries and keys"),
        (patch_model(tiny_model("qwen3"), "soft_cap"), "queries and keys"),
        (made("deepseek_v3", Scheme(q="rms")), "queries"),  # its heads share the key that rotates
    ):
        with pytest.raises(ValueError, match=f"norms its {sides}: scaling"):
            QKClip(model)
    with pytest.raises(ValueError, match="no layer of the model that the Trainer trains"):
        trainer(made("llama"), tmp_path, QKClip(made("llama"))).train()
