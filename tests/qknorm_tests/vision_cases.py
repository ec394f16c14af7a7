"""Tiny models that are no causal language models of tokens alone: how each is made, called and trained."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED

from hf_qknorm.families import FAMILIES, family_of_type, known_families
from hf_qknorm.families.style import CACHE, FROM_5_24
from hf_qknorm.model.install import own_layers
from qknorm_tests.tables import make_batch, out_of, real
from qknorm_tests.tiny import tiny_config

IMAGES = ("clip_vision_model", "deit", "dinov2", "ijepa", "siglip_vision_model", "vit", "vit_msn")

AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}

# The class that a type is loaded by, and what its tiny config has besides. Of encoders, the first stands for all.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("bert", "AutoModelForMaskedLM", {"is_decoder": False}),
    "clip_text_model": ("clip_text_model", "AutoModel", {"attention_dropout": 0.1}),
    "clip_vision_model": ("clip_vision_model", "AutoModel", {"attention_dropout": 0.1}),
    "siglip_text_model": ("siglip_text_model", "SiglipTextModel", {"attention_dropout": 0.1}),
    "siglip_vision_model": ("siglip_vision_model", "AutoModel", {"attention_dropout": 0.1}),
    "vit": (
        "vit",
        "AutoModelForImageClassification",
        {"attention_probs_dropout_prob": 0.1, "problem_type": "single_label_classification"},  # else a loss writes it
    ),
    "deit-classifier": (  # one of two, which transformers tells apart by `architectures`
        "deit",
        "AutoModelForImageClassification",
        {"problem_type": "single_label_classification", "architectures": ["DeiTForImageClassification"]},
    ),
    # The text models alone, whose positions have three axes
    "qwen2_vl_text": ("qwen2_vl_text", "Qwen2VLTextModel", {"rope_parameters": AXES}),
    "qwen2_5_vl_text": ("qwen2_5_vl_text", "Qwen2_5_VLTextModel", {"rope_parameters": AXES}),
    "vit-masked": ("vit", "AutoModelForMaskedImageModeling", {"encoder_stride": 4}),
}
ENCODERS = [name for name, family in FAMILIES.items() if family.causal == "is_decoder" and name in known_families()]
MORE = {
    f"{name}-encoder": (name, "AutoModelForMaskedLM" if name in MASKED else "AutoModel", {"is_decoder": False})
    for name in ENCODERS
} | {name: (name, "AutoModel", {"attention_probs_dropout_prob": 0.1}) for name in ("deit", "ijepa", "vit_msn")}

SEQ2SEQ = ("bart", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus", "plbart")
# Encoder-decoders, whose three attentions are patched alike, and the codebooks of MusicGen
OTHERS = {
    **{name: (name, "AutoModelForSeq2SeqLM", {"attention_dropout": 0.1}) for name in SEQ2SEQ},
    "whisper": ("whisper", "AutoModelForSpeechSeq2Seq", {"attention_dropout": 0.1}),
    "musicgen_decoder": ("musicgen_decoder", "MusicgenForCausalLM", {"attention_dropout": 0.1}),
    "musicgen_melody_decoder": ("musicgen_melody_decoder", "MusicgenMelodyForCausalLM", {"attention_dropout": 0.1}),
}
# Of types that no family describes, which take a cap alone
LARGE = {"initializer_range": 0.3}
CAPPED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dinov2": ("dinov2", "AutoModel", LARGE),
    "modernbert": ("modernbert", "AutoModelForMaskedLM", {**LARGE, "local_attention": 8, "cls_token_id": 1}),
    "t5": (
        "t5",
        "AutoModelForSeq2SeqLM",
        {"d_ff": 96, "num_decoder_layers": 2, "initializer_factor": 2.0, "decoder_start_token_id": 0},
    ),
}
if FROM_5_24:
    CAPPED |= {x: (x, "AutoModelForCausalLM", {**LARGE, "rotary_dim": 8, "n_ctx": 128}) for x in ("codegen", "gptj")}
EVERY = CASES | MORE | OTHERS | CAPPED
CONTINUED = {*OTHERS, "codegen", "gptj", "t5"}
LENGTH, FIRST, BOOKS = 12, 8, 2  # of MusicGen: tokens, those before the ones that are continued, and codebooks


def type_of(case: str) -> str:
    return EVERY[case][0]


def made(case: str) -> PreTrainedModel:
    """A tiny model in eval mode whose attention logits spread over several nats, with no bias at zero."""
    model_type, name, settings = EVERY[case]
    config = tiny_config(model_type, **settings)
    torch.manual_seed(0)
    auto = getattr(transformers, name)
    model = auto._from_config(config) if issubclass(auto, PreTrainedModel) else auto.from_config(config)
    family = family_of_type(model_type)
    for layer in own_layers(model, family).values() if family.attention else ():
        for part in family.style.weights[:2]:
            nn.init.normal_(layer.get_submodule(part).weight, std=0.2)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    return model.eval()


def batches(case: str) -> list[dict[str, Any]]:
    """Images, or text without padding and with it at either side; with labels where the model has a loss for them."""
    model_type, auto, _ = EVERY[case]
    if case in OTHERS or case == "t5":
        return [codebooks(case)] if "musicgen" in case else [translation(case, kind) for kind in ("plain", "left")]
    if model_type not in IMAGES:
        labels = auto in ("AutoModelForMaskedLM", "AutoModelForCausalLM")
        found = [make_batch(kind, labels=labels) for kind in ("plain", "left", "right")]
        if "mrope_section" in EVERY[case][2].get("rope_parameters", ()):
            positions = torch.arange(20).expand(3, 2, 20) // torch.tensor([1, 2, 4])[:, None, None]
            found = [batch | {"position_ids": positions} for batch in found]
        return found
    generator = torch.Generator().manual_seed(0)
    batch: dict[str, Any] = {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    if auto == "AutoModelForImageClassification":
        batch["labels"] = torch.tensor([0, 1])
    if auto == "AutoModelForMaskedImageModeling":
        batch["bool_masked_pos"] = torch.arange(16).expand(2, -1) % 3 == 1
    return [batch]


def unlabelled(case: str) -> dict[str, Any]:
    """The last batch, without a loss."""
    batch = {name: x for name, x in batches(case)[-1].items() if name != "labels"}
    return batch | ({"decoder_input_ids": batch["input_ids"][:, -9:].contiguous()} if case == "t5" else {})


def codebooks(case: str) -> dict[str, Any]:
    """Tokens of which the first row is padded at the left, and a text to attend to."""
    generator = torch.Generator().manual_seed(0)
    mask, seen = torch.ones(2, LENGTH, dtype=torch.long), torch.ones(2, 7, dtype=torch.long)
    mask[0, :4], seen[1, 5:] = 0, 0
    batch = {
        "input_ids": torch.randint(3, 64, (2 * BOOKS, LENGTH), generator=generator),
        "encoder_hidden_states": torch.randn(2, 7, 64, generator=generator),
        "labels": torch.randint(3, 64, (2, LENGTH, BOOKS), generator=generator),
    }
    if case == "musicgen_decoder":  # the other puts the states in front of its input, and its steps mask neither
        batch |= {"attention_mask": mask, "encoder_attention_mask": seen}
    return batch


def translation(case: str, kind: str) -> dict[str, Any]:
    """A source, with padding or without, and a target of another length."""
    batch = make_batch(kind, labels=False)
    if case == "whisper":
        batch = {"input_features": torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0))}
    return batch | {"labels": torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))}


def seen(model: PreTrainedModel, batch: dict[str, Any]) -> Tensor:
    """The model's logits for the batch, without those of padding."""
    out = out_of(model(**batch))
    if "encoder_hidden_states" in batch:
        rows = batch.get("attention_mask", torch.ones(2, LENGTH)).bool().repeat_interleave(BOOKS, 0)
        return out[:, -LENGTH:][rows]
    return out[real(batch)] if "attention_mask" in batch and out.shape[:2] == batch["attention_mask"].shape else out


def continued_codebooks(model: PreTrainedModel, case: str, batch: dict[str, Any], *, use_cache: bool) -> Tensor:
    """The logits of MusicGen's last tokens, each computed by itself with a cache, or all at once."""
    if not use_cache:
        return model(**batch).logits[:, FIRST - LENGTH :]
    others = {name: x for name, x in batch.items() if name not in ("input_ids", "attention_mask")}
    cache, found = None, []
    for start, stop in [(0, FIRST), *((n, n + 1) for n in range(FIRST, LENGTH))]:
        inputs = {"input_ids": batch["input_ids"][:, start:stop]}
        if "attention_mask" in batch:
            inputs["attention_mask"] = batch["attention_mask"][:, :stop]
        if start == 0 or case == "musicgen_decoder":  # the other has them in the cache
            inputs |= others
        out = model(**inputs, **{CACHE: cache}, use_cache=True)
        cache = out[CACHE]
        found.append(out.logits[:, -1])
    return torch.stack(found[1:], 1)
