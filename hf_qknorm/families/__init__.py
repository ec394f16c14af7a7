"""The model types that can be patched: one line each in `FAMILIES`, and one small file per kind of style.

A style is named after one of its models.

>>> qk.FAMILIES["llama"].attention
'LlamaAttention'
>>> [model_type for model_type, family in qk.FAMILIES.items() if family.own_cap]
['gemma2', 'vaultgemma']
"""

from __future__ import annotations

from difflib import get_close_matches
from functools import partial
from typing import Any, Final

from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from hf_qknorm.families import encoder, fused, latent, normed, rotary, separate, seq2seq
from hf_qknorm.families.class_names import TYPE_PREFIX
from hf_qknorm.families.family import CAP_ALONE, Family, by_kind, by_layer, everywhere, without
from hf_qknorm.families.refused import BY_TOWER, NORMS_REFUSED, REFUSED
from hf_qknorm.families.style import Style
from hf_qknorm.files.formatting import shorten
from hf_qknorm.scheme import SCHEMES, Scheme

__all__ = [
    "BY_TOWER", "CAPPED", "FAMILIES", "NORMS_REFUSED", "REFUSED", "Family", "check_scheme", "family_of",
    "family_of_type", "known_families", "known_types",
]  # fmt: skip

PAGE: Final = "hf_qknorm/families/FAMILIES.md"
NONE: Final = SCHEMES["none"]

NO_ADAPTER: Final = without(
    "use_shared_attention_adapter", "each layer adds projections of its own to a shared attention"
)
NO_BLOCKS: Final = without("is_encoder_decoder", "its encoder selects blocks of keys")

# BERT's relatives, and BART's, which are encoder-decoders or their decoders alone
_encoder: Final = partial(Family, norm="layer", pre_norm="", causal="is_decoder")
_decoder: Final = partial(Family, norm="layer", pre_norm="", rope=None, causal="!is_encoder_decoder")

FAMILIES: Final[dict[str, Family]] = {
    "afmoe": Family("AfmoeAttention", normed.AFMOE, own_norms=True, slides=by_layer),
    "apertus": Family("ApertusAttention", normed.HEADS, own_norms=True),
    "apertus1p5_text": Family("Apertus1p5TextAttention", normed.HEADS, own_norms=True),
    "arcee": Family("ArceeAttention", separate.LLAMA),
    "aria_text": Family("AriaTextAttention", separate.LLAMA),
    "axk1": Family("AXK1Attention", latent.DEEPSEEK_V3, latent=True, rope=None),
    "bailing_hybrid": Family("BailingHybridAttention", latent.BAILING, latent=True, rope=None),
    "bamba": Family("BambaAttention", separate.LLAMA, restarts="BambaModel"),
    "bart": _decoder("BartAttention", seq2seq.BART),
    "beam": Family("BeamAttention", normed.BEAM, own_norms=True, slides=by_layer),
    "bert": _encoder("BertSelfAttention", encoder.BERT),
    "bert-generation": _encoder("BertGenerationSelfAttention", encoder.BERT),
    "bigbird_pegasus": _decoder("BigBirdPegasusDecoderAttention", seq2seq.BIGBIRD, unsupported=NO_BLOCKS),
    "biogpt": Family("BioGptAttention", separate.BIOGPT, "layer", "self_attn_layer_norm"),
    "bitnet": Family("BitNetAttention", separate.BITNET),
    "blenderbot": _decoder("BlenderbotAttention", seq2seq.BART),
    "blenderbot-small": _decoder("BlenderbotSmallAttention", seq2seq.BART),
    "camembert": _encoder("CamembertSelfAttention", encoder.BERT),
    "clip_text_model": Family("CLIPAttention", encoder.CLIP, "layer", "layer_norm1"),
    "clip_vision_model": Family("CLIPAttention", encoder.CLIP, "layer", "layer_norm1", causal=False),
    "cohere": Family("CohereAttention", separate.LLAMA, "layer", "", "pairs", own_norms="use_qk_norm"),
    "cohere2": Family("Cohere2Attention", separate.COHERE2, "layer", "", "pairs", slides=by_layer),
    "cohere2_moe": Family("Cohere2MoeAttention", separate.COHERE2_MOE, "layer", "", "pairs", slides=by_layer),
    "cohere_compass_text": Family("CohereCompassAttention", separate.LLAMA, "layer", "", slides=by_layer),
    "ctrl": Family("MultiHeadAttention", separate.CTRL, "layer", "layernorm1", None),
    "cwm": Family("CwmAttention", separate.LLAMA, slides=by_layer),
    "data2vec-text": _encoder("Data2VecTextSelfAttention", encoder.BERT),
    "dbrx": Family("DbrxAttention", fused.DBRX, "layer", ""),
    "deepseek_v2": Family("DeepseekV2Attention", latent.DEEPSEEK_V2, latent=True, rope=None),
    "deepseek_v3": Family("DeepseekV3Attention", latent.DEEPSEEK_V3, latent=True, rope=None),
    "deit": Family("DeiTAttention", encoder.VIT, "layer", "layernorm_before", causal=False),
    "doge": Family("DogeAttention", normed.HEADS, own_norms=True, slides=everywhere),
    "dots1": Family("Dots1Attention", normed.HEADS, own_norms=True, slides=by_layer),
    "electra": _encoder("ElectraSelfAttention", encoder.BERT),
    "emu3_text_model": Family("Emu3Attention", separate.LLAMA),
    "ernie": _encoder("ErnieSelfAttention", encoder.BERT),
    "ernie4_5": Family("Ernie4_5Attention", separate.LLAMA, rope="pairs_by_halves"),
    "ernie4_5_moe": Family("Ernie4_5_MoeAttention", separate.LLAMA, rope="pairs_by_halves"),
    "exaone4": Family("Exaone4Attention", normed.EXAONE4, own_norms=True, slides=by_kind),
    "exaone_moe": Family("ExaoneMoeAttention", normed.EXAONE4, own_norms=True, slides=by_kind),
    "falcon_h1": Family("FalconH1Attention", separate.FALCON_H1, pre_norm=""),
    "flex_olmo": Family("FlexOlmoAttention", normed.TOGETHER, own_norms=True),
    "flint": Family("FlintAttention", normed.WINDOWED, own_norms=True, slides=by_layer),
    "gemma": Family("GemmaAttention", separate.LLAMA, gain_plus_one=True),
    "gemma2": Family("Gemma2Attention", separate.LLAMA, gain_plus_one=True, own_cap=True, slides=by_layer),
    "gemma3_text": Family("Gemma3Attention", normed.HEADS, own_norms=True, slides=by_layer),
    "gemma3n_text": Family("Gemma3nTextAttention", normed.HEADS, own_norms=True, slides=by_layer),
    "gemma4_text": Family("Gemma4TextAttention", normed.HEADS, own_norms=True, slides=by_layer),
    "gemma4_unified_text": Family("Gemma4UnifiedTextAttention", normed.HEADS, own_norms=True, slides=by_layer),
    "glm": Family("GlmAttention", separate.LLAMA, rope="pairs_by_halves"),
    "glm4": Family("Glm4Attention", separate.LLAMA, rope="pairs_by_halves"),
    "glm4_moe": Family("Glm4MoeAttention", separate.LLAMA, own_norms="use_qk_norm"),
    "glm4_moe_lite": Family("Glm4MoeLiteAttention", latent.DEEPSEEK_V3, latent=True, rope=None),
    "gpt2": Family("GPT2Attention", fused.GPT2, "layer", "ln_1"),
    "gpt_bigcode": Family("GPTBigCodeAttention", fused.BIGCODE, "layer", "ln_1"),
    "gpt_neox": Family("GPTNeoXAttention", fused.NEOX, "layer"),
    "gpt_oss": Family("GptOssAttention", separate.LLAMA, rope="once", slides=by_layer),
    "granite": Family("GraniteAttention", separate.LLAMA),
    "granite_swa": Family("GraniteSWAAttention", separate.LLAMA, slides=by_layer),
    "granitemoe": Family("GraniteMoeAttention", separate.LLAMA),
    "granitemoe_swa": Family("GraniteMoeSWAAttention", separate.LLAMA, slides=by_layer),
    "granitemoehybrid": Family("GraniteMoeHybridAttention", separate.LLAMA),
    "granitemoeshared": Family("GraniteMoeSharedAttention", separate.LLAMA),
    "helium": Family("HeliumAttention", separate.LLAMA, rope="pairs_by_halves"),
    "hrm_text": Family("HrmTextAttention", separate.HRM, pre_norm=""),
    "hunyuan_v1_dense": Family("HunYuanDenseV1Attention", normed.HUNYUAN, own_norms=True),
    "hunyuan_v1_moe": Family("HunYuanMoEV1Attention", normed.HUNYUAN, own_norms=True),
    "hy_v3": Family("HYV3Attention", normed.HEADS, own_norms=True),
    "hyperclovax": Family("HyperCLOVAXAttention", separate.LLAMA),
    "ijepa": Family("IJepaAttention", encoder.VIT, "layer", "layernorm_before", causal=False),
    "inkling_text": Family("InklingAttention", normed.INKLING, own_norms=True, slides=by_layer),
    "internlm3": Family("LlamaAttention", separate.LLAMA),
    "iquestcoder": Family("LlamaAttention", separate.LLAMA),
    "jais2": Family("Jais2Attention", separate.LLAMA, "layer"),
    "jamba": Family("JambaAttention", separate.JAMBA),
    "kimi_linear": Family("KimiLinearAttention", latent.KIMI_LINEAR, latent=True, rope=None),
    "kolibri1": Family("Kolibri1Attention", normed.EXAONE4, own_norms=True, slides=by_kind),
    "laguna": Family("LagunaAttention", normed.HEADS, own_norms=True, slides=by_layer),
    "lara_mini": Family("LaraMiniAttention", normed.WINDOWED, own_norms=True, slides=by_layer),
    "lfm2": Family("Lfm2Attention", normed.LFM2, own_norms=True),
    "lfm2_moe": Family("Lfm2MoeAttention", normed.LFM2, own_norms=True),
    "lfm3": Family("Lfm3Attention", normed.HEADS, own_norms=True, slides=by_layer),
    "llama": Family("LlamaAttention", separate.LLAMA),
    "llama4_text": Family("Llama4TextAttention", rotary.LLAMA4, rope=None, own_norms="use_qk_norm"),
    "longcat_flash": Family("LongcatFlashMLA", latent.LONGCAT, latent=True, rope=None),
    "marian": _decoder("MarianAttention", seq2seq.BART),
    "mbart": _decoder("MBartAttention", seq2seq.BART),
    "mellum": Family("MellumAttention", normed.HEADS, own_norms=True, slides=by_layer),
    "mimo_v2_flash": Family("MiMoV2FlashAttention", separate.MIMO, rope=None, slides=by_layer),
    "minicpm3": Family("MiniCPM3Attention", latent.MINICPM3, latent=True, rope=None),
    "minimax": Family("MiniMaxAttention", separate.LLAMA, pre_norm="", slides=everywhere),
    "minimax_m2": Family("MiniMaxM2Attention", normed.TOGETHER, own_norms=True),
    "ministral": Family("MinistralAttention", separate.LLAMA, slides=by_layer),
    "ministral3": Family("Ministral3Attention", rotary.MINISTRAL3, rope=None, slides=everywhere),
    "mistral": Family("MistralAttention", separate.LLAMA, slides=everywhere),
    "mixtral": Family("MixtralAttention", separate.LLAMA, slides=everywhere),
    "mllama_text_model": Family("MllamaTextSelfAttention", separate.MLLAMA),
    "modernbert-decoder": Family("ModernBertDecoderAttention", separate.MODERNBERT, "layer", "", slides=by_layer),
    "moshi": Family("MoshiAttention", rotary.MOSHI, rope=None),
    "musicgen_decoder": Family("MusicgenAttention", seq2seq.BART, "layer", "", None),
    "musicgen_melody_decoder": Family("MusicgenMelodyAttention", seq2seq.BART, "layer", "", None),
    "nanochat": Family("NanoChatAttention", normed.ROTATED, own_norms=True),
    "nemotron": Family("NemotronAttention", separate.LLAMA, "layer", gain_plus_one=True),
    "nemotron_h": Family("NemotronHAttention", separate.JAMBA, pre_norm=""),
    "olmo": Family("OlmoAttention", separate.OLMO, "layer", ""),
    "olmo2": Family("Olmo2Attention", normed.TOGETHER, own_norms=True),
    "olmo3": Family("Olmo3Attention", normed.TOGETHER, own_norms=True, slides=by_layer),
    "olmo_hybrid": Family("OlmoHybridAttention", normed.TOGETHER, own_norms=True),
    "olmoe": Family("OlmoeAttention", normed.TOGETHER, own_norms=True),
    "opt": Family("OPTAttention", separate.OPT, "layer", ""),
    "pegasus": _decoder("PegasusAttention", seq2seq.BART),
    "persimmon": Family("PersimmonAttention", rotary.PERSIMMON, "layer", own_norms="qk_layernorm"),
    "phi": Family("PhiAttention", rotary.PHI, "layer", "", own_norms="qk_layernorm"),
    "phi3": Family("Phi3Attention", fused.PHI3, slides=everywhere),
    "phi4_multimodal": Family("Phi4MultimodalAttention", fused.PHI3, slides=everywhere),
    "phimoe": Family("PhimoeAttention", separate.LLAMA, "layer", slides=everywhere),
    "plbart": _decoder("PLBartAttention", seq2seq.BART),
    "qwen2": Family("Qwen2Attention", separate.LLAMA, slides=by_layer),
    "qwen2_5_vl_text": Family("Qwen2_5_VLAttention", separate.LLAMA, slides=by_layer),
    "qwen2_moe": Family("Qwen2MoeAttention", separate.LLAMA, slides=by_layer),
    "qwen2_vl_text": Family("Qwen2VLAttention", separate.LLAMA, slides=by_layer),
    "qwen3": Family("Qwen3Attention", normed.HEADS, own_norms=True, slides=by_layer),
    "qwen3_5_moe_text": Family("Qwen3_5MoeAttention", normed.HEADS, own_norms=True),
    "qwen3_5_text": Family("Qwen3_5Attention", normed.HEADS, own_norms=True),
    "qwen3_moe": Family("Qwen3MoeAttention", normed.HEADS, own_norms=True, slides=by_layer),
    "qwen3_next": Family("Qwen3NextAttention", normed.HEADS, own_norms=True),
    "recurrent_gemma": Family(
        "RecurrentGemmaAttention",
        rotary.RECURRENT_GEMMA,
        rope=None,
        gain_plus_one=True,
        pre_norm="temporal_pre_norm",
        slides=by_layer,
    ),
    "roberta": _encoder("RobertaSelfAttention", encoder.BERT),
    "roberta-prelayernorm": _encoder("RobertaPreLayerNormSelfAttention", encoder.BERT),
    "roc_bert": _encoder("RoCBertSelfAttention", encoder.BERT),
    "seed_oss": Family("SeedOssAttention", separate.STARCODER2),
    "siglip_text_model": Family("SiglipAttention", encoder.CLIP, "layer", "layer_norm1", causal=False),
    "siglip_vision_model": Family("SiglipAttention", encoder.CLIP, "layer", "layer_norm1", causal=False),
    "smollm3": Family("SmolLM3Attention", separate.SMOLLM3, slides=by_layer),
    "solar_open": Family("SolarOpenAttention", separate.LLAMA),
    "stablelm": Family("StableLmAttention", rotary.STABLELM, "layer", "", own_norms="qk_layernorm"),
    "starcoder2": Family("Starcoder2Attention", separate.STARCODER2, "layer", slides=everywhere),
    "vaultgemma": Family("VaultGemmaAttention", separate.LLAMA, gain_plus_one=True, own_cap=True, slides=by_layer),
    "vit": Family("ViTAttention", encoder.VIT, "layer", "layernorm_before", causal=False),
    "vit_msn": Family("ViTMSNAttention", encoder.VIT, "layer", "layernorm_before", causal=False),
    "whisper": _decoder("WhisperAttention", seq2seq.WHISPER),
    "xlm-roberta": _encoder("XLMRobertaSelfAttention", encoder.BERT),
    "xlm-roberta-xl": _encoder("XLMRobertaXLSelfAttention", encoder.BERT),
    "xmod": _encoder("XmodSelfAttention", encoder.BERT),
    "youtu": Family("YoutuAttention", latent.DEEPSEEK_V3, latent=True, rope=None),
    "zamba": Family("ZambaAttention", separate.ZAMBA, pre_norm=""),
    "zamba2": Family("Zamba2Attention", separate.ZAMBA2, pre_norm="", unsupported=NO_ADAPTER),
    "zaya": Family("ZayaAttention", normed.ZAYA, own_norms=True, slides=by_layer),
}


# Of every other type, each module that calls transformers' attention interface: it takes a cap alone.
CAPPED: Final = Family("", Style(), pre_norm="", rope=None)


def known_families() -> list[str]:
    """Return the model types of `FAMILIES` that the installed transformers has."""
    return [model_type for model_type in FAMILIES if model_type in CONFIG_MAPPING_NAMES]


def known_types() -> list[str]:
    """Return the model types of the installed transformers that a scheme may be put on, if only a cap."""
    return [x for x in CONFIG_MAPPING_NAMES if x not in REFUSED and not x.startswith(TYPE_PREFIX)]


def family_of_type(model_type: str) -> Family:
    """Return the family of a model type: `CAPPED` for one that takes a cap alone."""
    return FAMILIES.get(model_type, CAPPED)


def family_of(config: Any, scheme: Scheme = NONE) -> Family:
    """Return the family of a model's config. Raises ValueError, with the reason, if it can't have the scheme."""
    check_scheme(config.model_type, config, scheme)
    return family_of_type(config.model_type)


def check_scheme(model_type: str, config: Any, scheme: Scheme) -> None:
    """Raise ValueError if `scheme` can't be put on a model of this type with this config."""
    family = FAMILIES.get(model_type)
    if family is not None:
        if reason := family.refusal(config, scheme):
            raise ValueError(f"{model_type} {reason}")
    elif reason := _refusal(model_type, scheme):
        near = get_close_matches(str(model_type), known_families(), n=1)
        nearest = f" The nearest supported type is {near[0]!r}." if near else ""
        raise ValueError(
            f"model_type {shorten(model_type)} is not supported: {reason}.{nearest} hf-qknorm families and {PAGE} list "
            "all supported types; the README beside that page says how to add one"
        )


def _refusal(model_type: str, scheme: Scheme) -> str | None:
    """The reason why a model of a type without a family can't have the scheme, or None."""
    if model_type in REFUSED:
        return REFUSED[model_type]
    if scheme.norms or scheme.scale is not None:
        reason = NORMS_REFUSED.get(model_type, "how it computes queries and keys is not known here")
        return f"{reason}. {CAP_ALONE}"
    if model_type not in CONFIG_MAPPING_NAMES:
        return "transformers itself does not have it"
    if scheme.softcap is not None and hasattr(CONFIG_MAPPING[model_type], "attn_logit_softcapping"):
        return "it caps its logits itself: set attn_logit_softcapping in its config"
    return None
