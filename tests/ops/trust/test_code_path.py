"""The code path of a call, which is the key of a check, and its number of rows."""

from __future__ import annotations

import pytest
import torch

from hf_qknorm.ops.triton.architectures import MOST_QUERIES
from hf_qknorm.ops.trust.code_path import CodePath, NormPath, fields
from hf_qknorm.ops.types import Norm, Rotary
from qknorm_tests.operator_calls import call

RMS = Norm("rms", torch.ones(16), eps=torch.tensor(2.0))
SCALAR = Norm("lp", torch.ones(1), torch.ones(1), blend=torch.tensor(0.5), p=3.0)
ROTARY = Rotary(torch.ones(1, 9, 4), torch.ones(1, 9, 4), True)
HEADS = Q, *_ = [torch.zeros(2, n, 9, 16) for n in (4, 2, 2)]
K = torch.zeros(2, 2, 300, 16)
FULL = torch.float32
CALLS = [
    (HEADS, {"softcap": 50.0, "causal": True}, {"cap": "small", "causal": True}),
    (HEADS, {"softcap": 65.0, "window": 3, "dropout": 0.1}, {"cap": "large", "window": True, "dropout": True}),
    ((Q, K, K), {"sinks": torch.zeros(4)}, {"sinks": True, "queries": 16}),
    ((Q, K[:, :, :20], K[:, :, :20]), {}, {"queries": 16, "many_keys": False}),
    ((torch.zeros(2, 256, 9, 16), K, K), {}, {"group": 128}),
    ((Q.clone().requires_grad_(), *HEADS[1:]), {}, {"gradient": True}),
    (
        HEADS,
        {"q_norm": RMS, "k_norm": SCALAR, "rotary": ROTARY, "ranges": torch.zeros(2, 9, 2, dtype=torch.int32)},
        {
            "q_norm": NormPath("rms", 2.0, 1, None, FULL, False, True),
            "k_norm": NormPath("lp", 3.0, 0, 0, FULL, True, False),
            "rotary": (8, True, FULL),
            "gradient": True,
            "ranges": True,
        },
    ),
]


@pytest.mark.parametrize(("heads", "options", "expected"), CALLS)
def test_the_path_of_a_call(heads, options, expected):
    path = CodePath.of(fields(*call(*heads, **options), "attention"))
    assert path == CodePath("attention", FULL, 16, 2, False)._replace(**expected)
    with torch.no_grad():
        assert not CodePath.of(fields(*call(*heads, **options), "attention")).gradient
    assert eval(repr(tuple(path)), {"torch": torch, "NormPath": NormPath}) == tuple(path)


@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 12])
def test_a_check_has_as_many_rows_as_its_calls_up_to_a_power_of_two(group):
    """Kernels are chosen, and tiles sized, by 16, 64 and 1024 rows, and by powers of two between."""
    for length in range(1, 1023 // group + 1):
        heads = [torch.empty(1, n, rows, 1, device="meta") for n, rows in ((group, length), (1, 2000), (1, 2000))]
        queries = CodePath.of(fields(*call(*heads), "attention")).queries
        assert length <= queries < MOST_QUERIES / group
        assert (group * queries - 1).bit_length() == (group * length - 1).bit_length()
