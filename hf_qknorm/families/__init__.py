"""The model types that can be patched: one line each in `FAMILIES`, and one small file per style."""

from __future__ import annotations

from typing import Any, Final

from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from hf_qknorm.families import gpt2
from hf_qknorm.families.encoder import ENCODER
from hf_qknorm.families.family import Family
from hf_qknorm.families.fused import DBRX, NEOX, PHI3
from hf_qknorm.families.gated import AFMOE, BEAM, HRM, LAGUNA, LFM3, QWEN3_NEXT
from hf_qknorm.families.latent import BAILING, LATENT, LATENT_COMPLEX, LATENT_CONFIGURED, LATENT_UNROTATED, LONGCAT
from hf_qknorm.families.learned import BIGCODE, BIOGPT, OPT
from hf_qknorm.families.normed import (
    EXAONE4,
    FLINT,
    HUNYUAN,
    LFM2,
    NORMED,
    NORMED_AFTER,
    NORMED_IF_CONFIGURED,
    NORMED_TRANSPOSED,
    NORMED_WIDE,
    OLMOE,
)
from hf_qknorm.families.partial import PERSIMMON, PHI, STABLELM
from hf_qknorm.families.refused import REFUSED
from hf_qknorm.families.scaled import LLAMA4, MINISTRAL3, RECURRENT_GEMMA, ZAMBA, ZAMBA2, unsupported_zamba2
from hf_qknorm.families.separate import (
    CLIPPED,
    COHERE2,
    COHERE2_MOE,
    DROPPED,
    MIMO,
    MODERNBERT,
    MULTIPLIED,
    SEPARATE,
    SMOLLM3,
    SUB_NORMED,
    UNROTATED,
)
from hf_qknorm.families.shared import SHARED
from hf_qknorm.families.vision import TOWER, VIT
from hf_qknorm.families.windows import by_kind, by_layer, everywhere
from hf_qknorm.scheme import Scheme

__all__ = ["FAMILIES", "REFUSED", "Family", "check_scheme", "family_of", "known_families"]

FAMILIES: Final[dict[str, Family]] = {
    "afmoe": Family("AfmoeAttention", AFMOE, own_norms=True, slides=by_layer),
    "apertus": Family("ApertusAttention", NORMED_TRANSPOSED, own_norms=True),
    "arcee": Family("ArceeAttention", SEPARATE),
    "aria_text": Family("AriaTextAttention", SEPARATE),
    "axk1": Family("AXK1Attention", LATENT_CONFIGURED, latent=True, rope=None),
    "bailing_hybrid": Family("BailingHybridAttention", BAILING, latent=True, rope=None),
    "bamba": Family("BambaAttention", SEPARATE),
    "beam": Family("BeamAttention", BEAM, rope=None, own_norms=True, slides=by_layer),
    "bert": Family("BertSelfAttention", ENCODER, "layer", "", causal="is_decoder"),
    "bert-generation": Family("BertGenerationSelfAttention", ENCODER, "layer", "", causal="is_decoder"),
    "biogpt": Family("BioGptAttention", BIOGPT, "layer", "self_attn_layer_norm"),
    "bitnet": Family("BitNetAttention", SUB_NORMED),
    "camembert": Family("CamembertSelfAttention", ENCODER, "layer", "", causal="is_decoder"),
    "clip_text_model": Family("CLIPAttention", TOWER, "layer", "layer_norm1"),
    "clip_vision_model": Family("CLIPAttention", TOWER, "layer", "layer_norm1", causal=False),
    "cohere": Family("CohereAttention", NORMED_IF_CONFIGURED, "layer", "", "pairs", own_norms="use_qk_norm"),
    "cohere2": Family("Cohere2Attention", COHERE2, "layer", "", "pairs", slides=by_layer),
    "cohere2_moe": Family("Cohere2MoeAttention", COHERE2_MOE, "layer", "", "pairs", slides=by_layer),
    "cohere_compass_text": Family("CohereCompassAttention", SEPARATE, "layer", "", slides=by_layer),
    "cwm": Family("CwmAttention", SEPARATE, slides=by_layer),
    "data2vec-text": Family("Data2VecTextSelfAttention", ENCODER, "layer", "", causal="is_decoder"),
    "dbrx": Family("DbrxAttention", DBRX, "layer", ""),
    "deepseek_v2": Family("DeepseekV2Attention", LATENT_COMPLEX, latent=True, rope=None),
    "deepseek_v3": Family("DeepseekV3Attention", LATENT_CONFIGURED, latent=True, rope=None),
    "deit": Family("DeiTAttention", VIT, "layer", "layernorm_before", causal=False),
    "dots1": Family("Dots1Attention", NORMED, own_norms=True, slides=by_layer),
    "electra": Family("ElectraSelfAttention", ENCODER, "layer", "", causal="is_decoder"),
    "ernie": Family("ErnieSelfAttention", ENCODER, "layer", "", causal="is_decoder"),
    "ernie4_5": Family("Ernie4_5Attention", SEPARATE, rope="pairs_by_halves"),
    "ernie4_5_moe": Family("Ernie4_5_MoeAttention", SEPARATE, rope="pairs_by_halves"),
    "exaone4": Family("Exaone4Attention", EXAONE4, own_norms=True, slides=by_kind),
    "exaone_moe": Family("ExaoneMoeAttention", EXAONE4, own_norms=True, slides=by_kind),
    "falcon_h1": Family("FalconH1Attention", MULTIPLIED, pre_norm=""),
    "flex_olmo": Family("FlexOlmoAttention", NORMED_WIDE, own_norms=True),
    "flint": Family("FlintAttention", FLINT, own_norms=True, slides=by_layer),
    "gemma": Family("GemmaAttention", SEPARATE, gain_plus_one=True),
    "gemma2": Family("Gemma2Attention", SEPARATE, gain_plus_one=True, own_cap=True, slides=by_layer),
    "gemma3_text": Family("Gemma3Attention", NORMED_TRANSPOSED, own_norms=True, slides=by_layer),
    "gemma3n_text": Family("Gemma3nTextAttention", SHARED, rope=None, own_norms=True, slides=by_layer),
    "gemma4_text": Family("Gemma4TextAttention", SHARED, rope=None, own_norms=True, slides=by_layer),
    "gemma4_unified_text": Family("Gemma4UnifiedTextAttention", SHARED, rope=None, own_norms=True, slides=by_layer),
    "glm": Family("GlmAttention", SEPARATE, rope="pairs_by_halves"),
    "glm4": Family("Glm4Attention", SEPARATE, rope="pairs_by_halves"),
    "glm4_moe": Family("Glm4MoeAttention", NORMED_IF_CONFIGURED, own_norms="use_qk_norm"),
    "glm4_moe_lite": Family("Glm4MoeLiteAttention", LATENT_CONFIGURED, latent=True, rope=None),
    "gpt2": Family("GPT2Attention", gpt2.GPT2, "layer", "ln_1"),
    "gpt_bigcode": Family("GPTBigCodeAttention", BIGCODE, "layer", "ln_1"),
    "gpt_neox": Family("GPTNeoXAttention", NEOX, "layer"),
    "gpt_oss": Family("GptOssAttention", SEPARATE, rope="once", slides=by_layer),
    "granite": Family("GraniteAttention", SEPARATE),
    "granite_swa": Family("GraniteSWAAttention", SEPARATE, slides=by_layer),
    "granitemoe": Family("GraniteMoeAttention", SEPARATE),
    "granitemoe_swa": Family("GraniteMoeSWAAttention", SEPARATE, slides=by_layer),
    "granitemoehybrid": Family("GraniteMoeHybridAttention", SEPARATE),
    "granitemoeshared": Family("GraniteMoeSharedAttention", SEPARATE),
    "helium": Family("HeliumAttention", SEPARATE, rope="pairs_by_halves"),
    "hrm_text": Family("HrmTextAttention", HRM, pre_norm=""),
    "hunyuan_v1_dense": Family("HunYuanDenseV1Attention", HUNYUAN, rope=None, own_norms=True),
    "hunyuan_v1_moe": Family("HunYuanMoEV1Attention", HUNYUAN, rope=None, own_norms=True),
    "hy_v3": Family("HYV3Attention", NORMED_TRANSPOSED, own_norms=True),
    "hyperclovax": Family("HyperCLOVAXAttention", SEPARATE),
    "ijepa": Family("IJepaAttention", VIT, "layer", "layernorm_before", causal=False),
    "internlm3": Family("LlamaAttention", SEPARATE),
    "iquestcoder": Family("LlamaAttention", SEPARATE),
    "jais2": Family("Jais2Attention", SEPARATE, "layer"),
    "jamba": Family("JambaAttention", UNROTATED),
    "kimi_linear": Family("KimiLinearAttention", LATENT_UNROTATED, latent=True, rope=None),
    "kolibri1": Family("Kolibri1Attention", EXAONE4, own_norms=True, slides=by_kind),
    "laguna": Family("LagunaAttention", LAGUNA, own_norms=True, slides=by_layer),
    "lfm2": Family("Lfm2Attention", LFM2, own_norms=True),
    "lfm2_moe": Family("Lfm2MoeAttention", LFM2, own_norms=True),
    "lfm3": Family("Lfm3Attention", LFM3, own_norms=True, slides=by_layer),
    "llama": Family("LlamaAttention", SEPARATE),
    "llama4_text": Family("Llama4TextAttention", LLAMA4, rope=None, own_norms="use_qk_norm"),
    "longcat_flash": Family("LongcatFlashMLA", LONGCAT, latent=True, rope=None),
    "mellum": Family("MellumAttention", NORMED, own_norms=True, slides=by_layer),
    "mimo_v2_flash": Family("MiMoV2FlashAttention", MIMO, rope=None, slides=by_layer),
    "minicpm3": Family("MiniCPM3Attention", LATENT, latent=True, rope=None),
    "minimax": Family("MiniMaxAttention", SEPARATE, pre_norm="", slides=everywhere),
    "minimax_m2": Family("MiniMaxM2Attention", NORMED_WIDE, own_norms=True),
    "ministral": Family("MinistralAttention", SEPARATE, slides=by_layer),
    "ministral3": Family("Ministral3Attention", MINISTRAL3, rope=None, slides=everywhere),
    "mistral": Family("MistralAttention", SEPARATE, slides=everywhere),
    "mixtral": Family("MixtralAttention", SEPARATE, slides=everywhere),
    "modernbert-decoder": Family("ModernBertDecoderAttention", MODERNBERT, "layer", "", slides=by_layer),
    "nanochat": Family("NanoChatAttention", NORMED_AFTER, rope=None, own_norms=True),
    "nemotron": Family("NemotronAttention", SEPARATE, "layer", gain_plus_one=True),
    "nemotron_h": Family("NemotronHAttention", UNROTATED, pre_norm=""),
    "olmo": Family("OlmoAttention", CLIPPED, "layer", ""),
    "olmo2": Family("Olmo2Attention", NORMED_WIDE, own_norms=True),
    "olmo3": Family("Olmo3Attention", NORMED_WIDE, own_norms=True, slides=by_layer),
    "olmo_hybrid": Family("OlmoHybridAttention", NORMED_WIDE, own_norms=True),
    "olmoe": Family("OlmoeAttention", OLMOE, own_norms=True),
    "opt": Family("OPTAttention", OPT, "layer", ""),
    "persimmon": Family("PersimmonAttention", PERSIMMON, "layer", own_norms="qk_layernorm"),
    "phi": Family("PhiAttention", PHI, "layer", "", own_norms="qk_layernorm"),
    "phi3": Family("Phi3Attention", PHI3, slides=everywhere),
    "phimoe": Family("PhimoeAttention", SEPARATE, "layer", slides=everywhere),
    "qwen2": Family("Qwen2Attention", SEPARATE, slides=by_layer),
    "qwen2_moe": Family("Qwen2MoeAttention", SEPARATE, slides=by_layer),
    "qwen3": Family("Qwen3Attention", NORMED, own_norms=True, slides=by_layer),
    "qwen3_5_moe_text": Family("Qwen3_5MoeAttention", QWEN3_NEXT, own_norms=True),
    "qwen3_5_text": Family("Qwen3_5Attention", QWEN3_NEXT, own_norms=True),
    "qwen3_moe": Family("Qwen3MoeAttention", NORMED, own_norms=True, slides=by_layer),
    "qwen3_next": Family("Qwen3NextAttention", QWEN3_NEXT, own_norms=True),
    "recurrent_gemma": Family(
        "RecurrentGemmaAttention",
        RECURRENT_GEMMA,
        rope=None,
        gain_plus_one=True,
        pre_norm="temporal_pre_norm",
        slides=by_layer,
    ),
    "roberta": Family("RobertaSelfAttention", ENCODER, "layer", "", causal="is_decoder"),
    "roberta-prelayernorm": Family("RobertaPreLayerNormSelfAttention", ENCODER, "layer", "", causal="is_decoder"),
    "roc_bert": Family("RoCBertSelfAttention", ENCODER, "layer", "", causal="is_decoder"),
    "seed_oss": Family("SeedOssAttention", DROPPED),
    "siglip_text_model": Family("SiglipAttention", TOWER, "layer", "layer_norm1", causal=False),
    "siglip_vision_model": Family("SiglipAttention", TOWER, "layer", "layer_norm1", causal=False),
    "smollm3": Family("SmolLM3Attention", SMOLLM3, slides=by_layer),
    "solar_open": Family("SolarOpenAttention", SEPARATE),
    "stablelm": Family("StableLmAttention", STABLELM, "layer", "", own_norms="qk_layernorm"),
    "starcoder2": Family("Starcoder2Attention", DROPPED, "layer", slides=everywhere),
    "vaultgemma": Family("VaultGemmaAttention", SEPARATE, gain_plus_one=True, own_cap=True, slides=by_layer),
    "vit": Family("ViTAttention", VIT, "layer", "layernorm_before", causal=False),
    "vit_msn": Family("ViTMSNAttention", VIT, "layer", "layernorm_before", causal=False),
    "xlm-roberta": Family("XLMRobertaSelfAttention", ENCODER, "layer", "", causal="is_decoder"),
    "xlm-roberta-xl": Family("XLMRobertaXLSelfAttention", ENCODER, "layer", "", causal="is_decoder"),
    "xmod": Family("XmodSelfAttention", ENCODER, "layer", "", causal="is_decoder"),
    "youtu": Family("YoutuAttention", LATENT_CONFIGURED, latent=True, rope=None),
    "zamba": Family("ZambaAttention", ZAMBA, pre_norm=""),
    "zamba2": Family("Zamba2Attention", ZAMBA2, pre_norm="", unsupported=unsupported_zamba2),
}


def known_families() -> list[str]:
    """Return the model types of `FAMILIES` that the installed transformers has."""
    return [model_type for model_type in FAMILIES if model_type in CONFIG_MAPPING_NAMES]


def family_of(config: Any) -> Family:
    """Return the family of a model's config. Raises ValueError, with the reason, if the model can't be patched."""
    if config.model_type not in FAMILIES:
        why = f": {REFUSED[config.model_type]}" if config.model_type in REFUSED else ""
        raise ValueError(
            f"model_type {config.model_type!r} is not supported{why}. Supported model types: "
            f"{', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES[config.model_type]
    reason = family.unsupported_by(config)
    if reason:
        raise ValueError(f"{config.model_type} {reason}")
    return family


def check_scheme(model_type: str, config: Any, scheme: Scheme) -> None:
    """Raise ValueError if `scheme` can't be put on a model of this type with this config."""
    reason = FAMILIES[model_type].refusal(config, scheme)
    if reason:
        raise ValueError(f"{model_type} {reason}")
