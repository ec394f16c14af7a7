"""The kernels in graphs, on streams, under inductor and in training: tests that need a GPU."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

pytest.importorskip("triton", reason="needs Triton, which comes with torch on CUDA and with the test extra")
from hf_qknorm import patch_model
from hf_qknorm.ops import library
from hf_qknorm.ops.types import Norm, Rotary
from qknorm_tests.error_budget import assert_within_budget
from qknorm_tests.norm_cases import knee_at
from qknorm_tests.operator_calls import call
from qknorm_tests.tables import TRIED, assert_identical, randomise

DEVICE = torch.device("cuda")
BRAIN = torch.bfloat16
KERNELS = "hf_qknorm"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
Tensors = dict[str, Tensor]


class Scale(NamedTuple):
    """The sizes of the problems: batches and heads, texts and caches, a model."""

    rows: int
    heads: tuple[int, int]
    head_dim: int
    length: int
    keys: int
    hidden: int
    layers: int


SCALE = Scale(2, (8, 2), 128, 1000, 4000, 512, 4)


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = BRAIN) -> Tensor:
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def left_padding(generator: torch.Generator, queries: int, filled: int) -> Tensor:
    """Causal ranges over a partly filled cache, with left padding of random lengths."""
    start = torch.randint(filled - queries, (SCALE.rows, 1), generator=generator).expand(-1, queries)
    stop = torch.arange(filled - queries, filled).expand(SCALE.rows, -1) + 1
    return torch.stack([torch.minimum(start, stop), stop], -1).int().to(DEVICE)


class Run(NamedTuple):
    """A named computation, and `draw`, which makes its inputs from a seed."""

    draw: Callable[[int], Tensors]
    compute: Callable[[Tensors], Tensors]


def draw_heads(seed: int) -> Tensors:
    """Raw heads in a projection's layout, gains for each head, angles, ranges, and the gradient of the output."""
    generator, (heads, heads_kv), d, t = torch.Generator().manual_seed(seed), SCALE.heads, SCALE.head_dim, SCALE.length
    angle = torch.rand(1, t, d // 2, generator=generator).mul(6).to(DEVICE)
    return {
        **{
            name: normal(generator, SCALE.rows, t, count, d).transpose(1, 2)
            for name, count in (("q", heads), ("k", heads_kv), ("v", heads_kv), ("grad", heads))
        },
        "q_gain": 1.5 + normal(generator, heads, d) / 4,
        "k_gain": 1.5 + normal(generator, heads_kv, d) / 4,
        "cos": angle.cos(),
        "sin": angle.sin(),
        "knee": knee_at(1.0 + seed),
        "ranges": left_padding(generator, t, t + 1),
    }


def attend(x: Tensors, *, knee: bool = False, **options: Any) -> Tensors:
    """Output and gradients of norm, RoPE and attention."""
    leaves = {name: x[name].detach().requires_grad_() for name in ("q", "k", "v", "q_gain", "k_gain")}
    q, k, v, q_gain, k_gain = leaves.values()
    shape = x["knee"] if knee else None
    norms = {"q_norm": Norm("rms", q_gain, knee=shape), "k_norm": Norm("rms", k_gain, knee=shape)}
    ends = {**norms, "rotary": Rotary(x["cos"], x["sin"])}
    out = library.fused_attention(*call(q, k, v, **ends, **options))
    return {
        "out": out.detach(),
        **dict(zip(leaves, torch.autograd.grad(out, [*leaves.values()], x["grad"]), strict=True)),
    }


def draw_step(seed: int) -> Tensors:
    """A query over a static cache; the ranges are its filled part."""
    generator, (heads, heads_kv), d = torch.Generator().manual_seed(seed), SCALE.heads, SCALE.head_dim
    return {
        "q": normal(generator, SCALE.rows, heads, 1, d),
        "k": normal(generator, SCALE.rows, heads_kv, SCALE.keys, d),
        "v": normal(generator, SCALE.rows, heads_kv, SCALE.keys, d),
        "ranges": left_padding(generator, 1, SCALE.keys // (seed + 1)),
    }


@cache
def model(seed: int = 0, scheme: str = "qk_norm_cap") -> Any:
    """A patched Llama with random gains, and knees where the scheme has one."""
    (heads, heads_kv), rows = SCALE.heads, 4 * SCALE.length
    config = LlamaConfig(
        hidden_size=SCALE.hidden,
        intermediate_size=2 * SCALE.hidden,
        num_hidden_layers=SCALE.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads_kv,
        head_dim=SCALE.head_dim,
        vocab_size=64,
        max_position_embeddings=rows,
        initializer_range=0.1,
        use_cache=False,
    )
    torch.manual_seed(seed)
    return randomise(patch_model(LlamaForCausalLM(config), TRIED[scheme])).to(DEVICE)


def draw_texts(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 64, (SCALE.rows, SCALE.length), generator=generator)
    mask = torch.arange(SCALE.length) >= torch.randint(SCALE.length // 2, (SCALE.rows, 1), generator=generator)
    return {"input_ids": tokens.to(DEVICE), "attention_mask": mask.long().to(DEVICE)}


def outcome(of: nn.Module, texts: Tensors) -> Tensors:
    """Each token's loss, and the gradients of their sum: those of their mean would underflow in fp16."""
    logits = of(**texts).logits[:, :-1]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    targets = texts["input_ids"][:, 1:].where(texts["attention_mask"][:, :-1] > 0, -100)
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    parameters = dict(of.named_parameters())
    grads = torch.autograd.grad(losses.sum(), [*parameters.values()])
    return {"losses": losses.detach(), **dict(zip(parameters, grads, strict=True))}


def model_step(texts: Tensors) -> Tensors:
    of = model().to(BRAIN)
    of.set_attn_implementation(KERNELS)
    return outcome(of, texts)


RUNS = {
    "causal": Run(draw_heads, lambda x: attend(x, causal=True, softcap=50.0)),
    "knee": Run(draw_heads, lambda x: attend(x, causal=True, softcap=50.0, knee=True)),
    "window": Run(draw_heads, lambda x: attend(x, causal=True, window=20)),
    "ranges": Run(draw_heads, lambda x: attend(x, ranges=x["ranges"], softcap=15.0)),
    "decode": Run(draw_step, lambda x: {"out": library.fused_attention(*call(**x, softcap=50.0))}),
    "model": Run(draw_texts, model_step),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_rerun_gives_the_same_bits(name: str) -> None:
    run = RUNS[name]
    assert_identical(run.compute(run.draw(1)), run.compute(run.draw(1)))


@pytest.mark.parametrize("name", RUNS)
def test_a_graph_replay_equals_a_plain_call(name: str) -> None:
    run = RUNS[name]
    inputs = run.draw(0)
    graph, results = captured(lambda: run.compute(inputs))
    for seed in (1, 2):
        fresh = run.draw(seed)
        expected = run.compute(fresh)
        assert not any(torch.equal(results[part], x) for part, x in expected.items())
        for part, x in inputs.items():
            x.copy_(fresh[part])
        graph.replay()
        assert_identical(results, expected)


def captured(compute: Callable[[], Tensors]) -> tuple[torch.cuda.CUDAGraph, Tensors]:
    """A graph of the computation and the results that replays overwrite; a first run on another stream compiles."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        compute()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = compute()
    return graph, results


@pytest.mark.parametrize("name", [name for name in RUNS if name != "model"])  # cuBLAS computes its products
def test_two_streams_do_not_interfere(name: str) -> None:
    run = RUNS[name]
    inputs = [run.draw(seed) for seed in (0, 1)]
    expected = [run.compute(x) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)  # a tenth of a second, in which both queues fill
    found = []
    for _ in range(5):
        for stream, x, wanted in zip(streams, inputs, expected, strict=True):
            with torch.cuda.stream(stream):
                found.append((run.compute(x), wanted))
    torch.cuda.synchronize()
    for got, wanted in found:
        assert_identical(got, wanted)


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("dtype", [BRAIN, torch.float16, torch.float32])
def test_the_compiled_model_keeps_the_budget(dtype: torch.dtype) -> None:
    """Compiled as one graph by inductor."""
    torch.compiler.reset()
    texts, of = draw_texts(0), model(1, "knee").to(dtype)  # the same rounded weights for all
    found = []
    for backend, precision in (("hf_qknorm_eager", torch.float64), ("hf_qknorm_eager", dtype)):
        of.set_attn_implementation(backend)
        found.append(outcome(of.to(precision), texts))
    of.set_attn_implementation(KERNELS)
    got = outcome(torch.compile(of, fullgraph=True), texts)
    got = {name.removeprefix("_orig_mod."): x for name, x in got.items()}
    exact, eager = found
    for name, x in got.items():
        assert_within_budget(x, exact[name], eager[name], name)
