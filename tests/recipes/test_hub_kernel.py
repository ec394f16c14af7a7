"""The kernel for the Hub: its layout and rules, and models that transformers runs with it, without the package."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import hub_kernel
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import hf_qknorm as qk
from hf_qknorm.ops import reference
from qknorm_tests.children import child
from qknorm_tests.hub_kernel_run import NAME, load
from qknorm_tests.tiny import tiny_model

RUN = Path(__file__).parents[1] / "qknorm_tests" / "hub_kernel_run.py"
CAP = 2.0  # small, so that it changes the logits of tiny models
SETTINGS = {"initializer_range": 0.3}
# Model types with what is special in their attention.
MODELS = {
    "gemma2": {"attn_logit_softcapping": CAP},  # the model passes its cap; windows in every second layer
    "llama": {},  # the cap is the config's
    "gpt_oss": {},  # sinks; no cap
}


@pytest.fixture(scope="module")
def kernel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("kernel") / "qknorm-attention"
    hub_kernel.build("org", folder)
    return folder


VARIANTS = ("torch-cpu", "torch-cuda")


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_build_has_the_metadata_that_the_hub_asks_for(kernel, variant):
    folder = kernel / "build" / variant
    metadata = json.loads((folder / "metadata.json").read_text())
    assert {key: metadata[key] for key in ("name", "version", "license", "python-depends")} == {
        "name": "qknorm-attention", "version": 1, "license": "Apache-2.0", "python-depends": []
    }  # fmt: skip
    archs = {"archs": ["8.0", "8.6", "8.9", "9.0", "10.0", "12.0"]} if variant == "torch-cuda" else {}
    assert metadata["backend"] == {"type": variant.removeprefix("torch-"), **archs}
    assert metadata["id"].isidentifier()
    assert f"{metadata['id']}::" in (folder / "_ops.py").read_text()
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert metadata["digest"]["files"].keys() == files - {"metadata.json"}
    assert {"__init__.py", "qknorm_attention/__init__.py", "ops/triton/attention_forward.py"} <= files


def test_builds_and_sources_are_the_same_code(kernel):
    source = kernel / "torch-ext" / "qknorm_attention"
    assert not (source / "_ops.py").exists()  # kernel-builder writes it
    identifiers = set()
    for variant in VARIANTS:
        folder = kernel / "build" / variant
        for path in source.rglob("*.py"):
            assert (folder / path.relative_to(source)).read_text() == path.read_text()
        identifiers.add(json.loads((folder / "metadata.json").read_text())["id"])
    assert len(identifiers) == 2


def test_the_code_imports_itself_relatively_and_nothing_else_but_torch_and_triton(kernel):
    for path in (kernel / "build").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(), feature_version=(3, 9))):
            if isinstance(node, ast.ImportFrom) and node.level:
                inside = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                assert inside.with_suffix(".py").is_file() or inside.is_dir(), f"{path}: {ast.unparse(node)}"
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                assert {name.partition(".")[0] for name in names} <= hub_kernel.ALLOWED, f"{path}: {names}"


def test_the_publisher_is_named_everywhere(tmp_path, monkeypatch):
    parts = tmp_path / "hub_kernel"
    shutil.copytree(hub_kernel.PARTS, parts)
    (parts / "__pycache__").mkdir(exist_ok=True)  # as after pytest in this folder
    monkeypatch.setattr(hub_kernel, "PARTS", parts)
    hub_kernel.build("someone", tmp_path / "kernel")
    text = "".join(path.read_text() for path in (tmp_path / "kernel").rglob("*") if path.is_file())
    assert "someone/qknorm-attention" in text
    assert NAME not in text


@pytest.mark.parametrize(
    "code", ["import transformers", "from transformers.utils import logging", "import numpy as np"]
)
def test_other_imports_are_refused(code):
    with pytest.raises(ValueError, match="ops.none, line 2: a kernel must not import (transformers|numpy)"):
        list(hub_kernel.targets("hf_qknorm.ops.none", f"\n{code}"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_kernels_library_accepts_the_build(kernel, variant):
    rust = pytest.importorskip("kernels._rust")
    assert [str(x) for x in rust.Build.open(kernel).general.backends] == ["cpu", "cuda"]
    metadata = rust.Metadata.read_from_file(kernel / "build" / variant / "metadata.json")
    metadata.digest.validate(rust.Digest.hash_variant(rust.DigestAlgorithm.SHA256, kernel / "build" / variant))


def model_folder(folder: Path, model_type: str) -> tuple[Path, dict[str, Tensor]]:
    """A tiny model with a batch in a folder, and the logits, loss and gradients that eager attention gives."""
    torch.manual_seed(0)
    model = tiny_model(model_type, **SETTINGS, **MODELS[model_type])
    ids = torch.randint(3, 64, (2, 16))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0  # left padding
    labels = ids.masked_fill(mask.cumsum(1) < 2, -100)  # the first token is predicted from padding
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    folder /= model_type
    if model_type == "llama":
        model.config.attn_logit_softcapping = CAP
    model.save_pretrained(folder)
    save_file(batch, folder / "batch.safetensors")
    if model_type == "llama":
        qk.patch_model(model, qk.Scheme(softcap=CAP), attn_implementation="hf_qknorm_eager")
    else:
        model.set_attn_implementation("eager")
    result = model(**batch)
    result.loss.backward()
    expected = {f"gradient {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    tokens = {name: x[:, :12] for name, x in batch.items() if name != "labels"}
    generated = model.generate(**tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
    expected |= {"logits": result.logits.detach(), "loss": result.loss.detach()}
    return folder, expected | {"dynamic": generated, "static": generated}


@pytest.mark.parametrize(
    ("loader", "triton", "models"),
    [
        ("file", "0", MODELS),
        pytest.param("file", "1", ["gemma2", "gpt_oss"], marks=pytest.mark.slow),
        ("kernels", "0", ["gemma2"]),
    ],
    ids=["tiled", "triton", "tiled, by the kernels library"],
)
def test_transformers_runs_models_with_the_kernel(kernel, tmp_path, monkeypatch, loader, triton, models):
    """Padding, windows, grouped queries, sinks and caches: as with eager attention, and a patched model's cap."""
    if loader == "kernels":
        pytest.importorskip("kernels")
    if triton == "1":
        pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", triton)
    monkeypatch.setenv("LOCAL_KERNELS", f"{NAME}={kernel}")
    expected = dict(model_folder(tmp_path, model_type) for model_type in models)
    modules = child(RUN, loader, kernel, *expected, home=tmp_path).split()
    assert any(name.endswith(".ops.triton.attention") for name in modules) == (triton == "1")
    for folder, values in expected.items():
        found = load_file(folder / "kernel.safetensors")
        seen = load_file(folder / "batch.safetensors")["attention_mask"].bool()
        found["logits"], values["logits"] = found["logits"][seen], values["logits"][seen]
        assert found.keys() == values.keys()
        for name, value in values.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def heads(**settings) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return tuple(3 * torch.randn(2, count, 9, 16, **settings) for count in (4, 2, 2))


def test_the_cap_is_the_arguments_or_the_configs(kernel):
    attention = load(kernel / "build" / "torch-cpu").flash_attn_forward
    module, (q, k, v) = nn.Module(), heads()

    def close_to(expected_cap: float | None, **options) -> bool:
        out, weights = attention(module, q, k, v, None, **options)
        assert weights is None
        expected = reference.attention(q, k, v, scale=None, softcap=expected_cap, causal=True).out
        return torch.allclose(out.transpose(1, 2), expected, atol=1e-5)

    assert close_to(None)
    assert close_to(CAP, softcap=CAP)
    module.config = SimpleNamespace(attn_logit_softcapping=CAP)
    assert close_to(CAP)
    assert close_to(5.0, softcap=5.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_attentions": True}, "never formed"),
        ({"cache": torch.zeros(1)}, "does not support the argument 'cache'"),
        ({"softcap": 0.0}, "softcap must be finite and greater than 0"),
        ({"dropout": 1.5}, "dropout must be in"),
        ({"attention_mask": torch.ones(2, 9)}, "the mask must broadcast"),
        ({"attention_mask": torch.zeros(2, 1, 9, 9, requires_grad=True)}, "the mask requires a gradient"),
    ],
)
def test_what_it_cannot_do_is_refused(kernel, options, message):
    attention = load(kernel / "build" / "torch-cpu").flash_attn_forward
    with pytest.raises(ValueError, match=message):
        attention(nn.Module(), *heads(), **{"attention_mask": None, **options})


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
def test_masks_without_gaps_run_in_the_kernels(kernel):
    """In the interpreter. The masks of a window and of padding are ranges, one with gaps is not."""
    pytest.importorskip("triton")
    module = load(kernel / "build" / "torch-cpu")
    place = torch.arange(9)
    causal = (place[:, None] >= place).expand(2, 1, 9, 9)
    window = causal & (place[:, None] - place < 4)
    padded = causal & (place >= torch.tensor([3, 0])[:, None, None, None])
    gaps = causal & (place != 2)
    for mask, fits in ((causal, True), (window, True), (padded, True), (gaps, False), (causal.float(), False)):
        assert (module._as_ranges(mask, 9).dtype == torch.int32) == fits
    q, k, v = heads()
    for mask in (window, padded, gaps):
        out, _ = module.flash_attn_forward(nn.Module(), q, k, v, mask, softcap=CAP)
        expected = reference.attention(q, k, v, scale=None, softcap=CAP, mask=mask).out
        torch.testing.assert_close(out.transpose(1, 2), expected, rtol=1e-4, atol=1e-5)
