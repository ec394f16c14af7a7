"""The tiled attention in shares side by side: the oracle's numbers, one dropout mask, the caller's modes and errors."""

import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from hf_qknorm.ops import library, threads, tiled_blocks
from hf_qknorm.ops.cpu import attention as cpu
from hf_qknorm.ops.cpu import build
from hf_qknorm.ops.types import Heads, Options, Visible
from qknorm_tests.tiled_cases import Case, draw_inputs, drawn_dropout, oracle_results, tiled_results

SIZES = ((1, 6, 3), (3, 6, 3), (3, 2, 1))
CASES = [
    *(Case(batch=b, heads=h, heads_kv=kv, queries=70, causal=True, softcap=5.0) for b, h, kv in SIZES),
    *(Case(queries=70, heads_kv=kv, mask=m) for kv in (1, 2) for m in ("bool:BHTS", "bool:1H1S", "add:B1TS")),
    *(Case(batch=3, heads_kv=kv, queries=70, ranges="left_padding", window=9) for kv in (1, 2)),
    *(Case(batch=3, heads_kv=kv, queries=70, causal=True, sinks=True, dropout=0.3) for kv in (1, 4)),
]


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shares for calls of any size, in two threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(tiled_blocks, "SHARED_LOGITS", 0)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_shares_are_the_oracle(case: Case) -> None:
    inputs = draw_inputs(case, torch.float64)
    if threads.count() > 1:
        assert len(tiled_blocks.shares(inputs.heads)) > 1
    got, expected = tiled_results(case, inputs), oracle_results(case, inputs, drawn_dropout(case, inputs))
    for name, exact in expected.items():
        torch.testing.assert_close(got[name], exact, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("heads_kv", [1, 4])
def test_the_backward_pass_may_have_other_threads(heads_kv: int) -> None:
    """The dropout mask is drawn by head: it does not change with the number of threads."""
    case = Case(batch=4, heads_kv=heads_kv, queries=80, ranges="packed", dropout=0.3)
    inputs = draw_inputs(case, torch.float32)
    results = []
    for forward, backward in ((1, 1), (2, 1), (1, 2), (2, 2)):
        torch.manual_seed(0)
        torch.set_num_threads(forward)
        out = library.attention(inputs.heads, Visible(inputs.ranges), case.options)
        torch.set_num_threads(backward)
        results.append((out, *torch.autograd.grad(out, inputs.heads[:3], inputs.grad)))
    for found in results[1:]:
        torch.testing.assert_close(found, results[0])


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("threads", [1, 2])
def test_modes_of_the_caller_do_not_change_the_numbers(mode: type[torch.no_grad], threads: int) -> None:
    """Autocast would compute products of fp32 in bf16; memory of inference mode can't be written outside of it."""
    torch.set_num_threads(threads)
    heads = Heads(*(torch.randn(1, 4, 80, 16) for _ in range(3)))
    expected = library.attention(heads, Visible(), Options(1.0, 5.0))
    with mode(), torch.autocast("cpu", torch.bfloat16):
        made = Heads(*(x.clone() for x in heads[:3]))
        got = library.attention(made, Visible(), Options(1.0, 5.0))
    assert torch.equal(got, expected)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("count", [1, 2, 7])
def test_an_error_arrives_at_the_caller_and_ends_the_rest(count: int) -> None:
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        raise IndexError("of the function")

    with pytest.raises(IndexError, match="of the function"):
        threads.run([fail] * count, torch.device("cpu"))
    assert len(calls) <= 2
    threads.run([lambda: calls.append(2)] * 5, torch.device("cpu"))
    assert calls.count(2) == 5


@pytest.mark.usefixtures("two_threads")
def test_operators_of_a_function_stay_in_its_thread() -> None:
    """Two functions meet where there are two threads, and neither opens threads of its own."""
    if threads.count() < 2:
        pytest.skip("torch has no OpenMP runtime with this entry here")
    meeting = threading.Barrier(2, timeout=60)
    seen: list[int] = []

    def work() -> None:
        meeting.wait()
        torch.randn(300, 300) @ torch.randn(300, 300)
        seen.append(threading.get_ident())

    threads.run([work, work], torch.device("cpu"))
    assert len(set(seen)) == 2
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("attend", [library.attention, cpu.attention], ids=["tiled", "cpp"])
def test_a_forked_child_computes_in_one_thread(attend: Callable[..., torch.Tensor]) -> None:
    """The threads of torch's runtime do not survive a fork: without `set_num_threads`, torch's own operators hang."""
    if attend is cpu.attention and build.why_not_built() is not None:
        pytest.skip(str(build.why_not_built()))
    call = Heads(*(torch.randn(1, 4, 80, 16) for _ in range(3))), Visible(), Options(1.0, 5.0)
    expected = attend(*call)
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends a child that hangs
        torch.set_num_threads(1)
        close = torch.allclose(attend(*call), expected, atol=1e-5)
        os._exit(0 if close else 1)
    assert os.waitpid(child, 0)[1] == 0
