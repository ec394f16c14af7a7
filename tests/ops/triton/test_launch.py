"""Launches: tiles by size, variants of the inner loop by the logits' bound, heads in the copy engine's layout."""

from __future__ import annotations

import math

import pytest
import torch
import triton

from hf_qknorm.ops.triton import launch
from hf_qknorm.ops.triton.architectures import AMPERE, ARCHITECTURES, HOPPER, Tile
from hf_qknorm.ops.triton.arguments import Constants
from hf_qknorm.ops.triton.launch import (
    BOUND_WITHOUT_MAXIMUM,
    INTERPRETED,
    POLYNOMIAL_LIMIT,
    LoopVariant,
    as_tiles,
    backward_variants,
    columns,
    dense,
    forward_variants,
    head_arguments,
    padded,
    split,
    tiles,
)
from qknorm_tests.norm_cases import DEVICE, lay_out

FULL, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
APPROX = "exact" if INTERPRETED else "approx"
LOG2_UNITS = BOUND_WITHOUT_MAXIMUM / math.log(2)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ((BRAIN, None, False, False), [LoopVariant("none", True)]),
        (
            (FULL, None, True, False),
            [LoopVariant("none", False, "within", LOG2_UNITS), LoopVariant("none", True, "beyond", LOG2_UNITS)],
        ),
        ((HALF, None, True, False), [LoopVariant("none", True)]),
        ((BRAIN, None, True, True), [LoopVariant("none", True)]),
        ((BRAIN, 50.0, False, False), [LoopVariant(APPROX, False)]),
        (
            (BRAIN, 64.0, True, False),
            [
                LoopVariant("polynomial", False, "within", POLYNOMIAL_LIMIT),
                LoopVariant(APPROX, False, "beyond", POLYNOMIAL_LIMIT),
            ],
        ),
        (
            (BRAIN, 65.0, True, False),
            [
                LoopVariant("polynomial", True, "within", POLYNOMIAL_LIMIT),
                LoopVariant(APPROX, True, "beyond", POLYNOMIAL_LIMIT),
            ],
        ),
        (
            (BRAIN, 50.0, True, True),
            [
                LoopVariant("polynomial", True, "within", POLYNOMIAL_LIMIT),
                LoopVariant(APPROX, True, "beyond", POLYNOMIAL_LIMIT),
            ],
        ),
        (
            (HALF, 50.0, True, False),
            [
                LoopVariant("polynomial", True, "within", POLYNOMIAL_LIMIT),
                LoopVariant("exact", True, "beyond", POLYNOMIAL_LIMIT),
            ],
        ),
        ((FULL, 50.0, True, False), [LoopVariant("exact", False)]),
        ((FULL, 100.0, False, False), [LoopVariant("exact", True)]),
    ],
)
def test_variants(call: tuple[torch.dtype, float | None, bool, bool], expected: list[LoopVariant]) -> None:
    assert [(*x[:3], pytest.approx(x.limit)) for x in forward_variants(*call)] == expected
    backward = backward_variants(*call)
    if call[1] is None:
        assert backward == [LoopVariant("none", False)]
    else:
        assert [x.tanh for x in backward] == [x.tanh for x in expected]
        assert [x.when for x in backward] == [x.when for x in expected]


@pytest.mark.parametrize(("head_dim", "columns"), [(8, 16), (16, 16), (40, 64), (64, 64), (96, 128), (256, 256)])
@pytest.mark.parametrize("capability", ARCHITECTURES, ids=str)
def test_gpus_have_tiles_for_all_heads(
    capability: tuple[int, int], head_dim: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert padded(head_dim) == columns
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    launch._of_gpu.cache_clear()
    found = launch.architecture(torch.device("cuda", 0))
    launch._of_gpu.cache_clear()
    assert found is ARCHITECTURES[capability]
    monkeypatch.setattr(launch, "architecture", lambda device: found)
    for dtype in (FULL, HALF, BRAIN):
        row, key = tiles(torch.empty(1, 1, 1, head_dim, dtype=dtype)), (dtype.itemsize, columns)
        assert row == found.tiles[key]._replace(**(found.split.get(key, {}) if head_dim == 96 else {}))


@pytest.mark.parametrize("interpreted", [True, False])
def test_assertions_are_compiled_on_request(interpreted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", interpreted)
    started: list[dict[str, object]] = []
    kernel = {(1,): lambda *arguments, **options: started.append(options)}
    for asserts in (False, True):
        launch.launch(kernel, (1,), torch.device("cpu"), 1, asserts=asserts, BLOCK=16)
    plain = {"BLOCK": 16, "enable_fp_fusion": True}
    asserting = {} if interpreted else {"debug": True, "sanitize_overflow": False}
    assert started == [plain, plain | asserting]


@pytest.mark.parametrize("interpreted", [True, False])
def test_fields_of_constants_are_constants_for_the_compiler(interpreted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 refuses other fields as arguments of device functions."""
    monkeypatch.setattr(launch, "INTERPRETED", interpreted)
    started: list[Constants] = []
    kernel = {(1,): lambda *, C, **options: started.append(C)}
    for _ in range(2):
        launch.launch(kernel, (1,), torch.device("cpu"), C=Constants(64, 32, 16, 16, TANH="exact"))
    assert all(isinstance(field, triton.language.constexpr) != interpreted for field in started[0])
    assert [getattr(field, "value", field) for field in started[0]] == list(Constants(64, 32, 16, 16, TANH="exact"))
    assert interpreted or started[0] is started[1]


def heads(head_dim: int = 40, dtype: torch.dtype = BRAIN) -> torch.Tensor:
    return torch.randn(2, 3, 5, head_dim, device=DEVICE).to(dtype)


@pytest.mark.parametrize("layout", ["heads", "tokens"])
def test_aligned_heads_are_not_copied(layout: str) -> None:
    x = lay_out(heads(), layout)
    assert dense(x) is x
    assert dense(x[:, :2, 1:]).data_ptr() == x[:, :2, 1:].data_ptr()


@pytest.mark.parametrize(
    "x",
    [
        lay_out(heads(), "sparse"),
        heads(20),  # rows of 40 bytes
        heads(48)[..., 4:44],  # starts 8 bytes in
        heads(41)[..., :40],
        torch.randn(1, 1, 1, 40, device=DEVICE).to(BRAIN).expand(2, 3, 5, 40),
        heads()[:, :, :1].expand(-1, -1, 5, -1),
    ],
    ids=["sparse", "short rows", "offset", "odd rows", "expanded", "one row"],
)
def test_other_heads_are_copied(x: torch.Tensor) -> None:
    copied = dense(x)
    assert copied.is_contiguous()
    assert torch.equal(copied, x)


def test_the_stride_of_an_axis_of_one_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is never used, but aligned loads need a multiple of 16 bytes."""
    x = torch.randn(5, 40, device=DEVICE).to(BRAIN).as_strided((1, 1, 5, 40), (3, 0, 40, 1))
    assert dense(x) is x
    monkeypatch.setattr(launch, "architecture", lambda device: HOPPER)
    made = as_tiles(x, 4)
    assert made.shape == [1, 1, 5, 40]
    assert made.strides == [16, 16, 40, 1]
    assert made.block_shape == [1, 1, 4, 64]
    monkeypatch.setattr(launch, "architecture", lambda device: AMPERE)
    assert as_tiles(x, 4) == (x, 16, 16, 40)


@pytest.mark.parametrize(
    ("head_dim", "main", "rest"),
    [(8, 16, 0), (40, 64, 0), (64, 64, 0), (72, 64, 16), (80, 64, 16), (96, 64, 32), (104, 128, 0), (112, 128, 0)]
    + [(128, 128, 0), (144, 128, 16), (160, 128, 32), (168, 128, 64), (192, 128, 64), (200, 256, 0), (256, 256, 0)],
)
def test_wide_heads_have_two_parts_where_these_have_fewer_columns(
    head_dim: int, main: int, rest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert split(head_dim) == ((main, rest) if rest else None)
    whole, tile, x = Tile(16, 16, 4, 1), Tile(16, 16, 4, 1, split=True), heads(head_dim)
    assert columns(head_dim, tile) == (main + rest, rest)
    assert columns(head_dim, whole) == (padded(head_dim), 0)
    monkeypatch.setattr(launch, "architecture", lambda device: HOPPER)
    made = head_arguments(tile, 4, Q=x)
    assert [part and part.block_shape[-1] for part in made.values()] == [main, rest or None]
    monkeypatch.setattr(launch, "architecture", lambda device: AMPERE)
    assert list(head_arguments(tile, 4, Q=x)) == ["Q", "Q_REST"]
