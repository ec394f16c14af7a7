"""Other libraries look models up by their type, or compare it: a patched model is found as its base is."""

import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import peft
import pytest
from transformers import AutoConfig
from transformers.integrations.awq import AWQ_SCALES_MAPPINGS
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING

from hf_qknorm import patch_model, unpatch_model
from hf_qknorm.families.class_names import COMPARED
from hf_qknorm.model.derived import derived_config
from qknorm_tests.tables import sharp_model

# The comparisons of a model's type in transformers' shared code, PEFT and TRL, by file: what they compare it with
# beside COMPARED. None of these types is a family's own, or the comparison is of a config as data.
REVIEWED: dict[str, set[str]] = {
    "transformers/generation/utils.py": {"vision-encoder-decoder"},
    "transformers/pipelines/automatic_speech_recognition.py": {"kyutai_speech_to_text", "lasr_ctc"},
    "transformers/pipelines/document_question_answering.py": {"donut-swin"},
    "transformers/pipelines/text_to_audio.py": {"bark", "csm", "dia"},
    "transformers/exporters/exporter_dynamo.py": {"layoutlmv2"},
    "transformers/modeling_gguf_pytorch_utils.py": {  # from a GGUF file's own config, which has the base's type
        *("cohere", "qwen2_moe", "qwen3_moe", "gemma3_text", "gemma4_text", "umt5", "minimax_m2", "gpt_oss"),
        *("gemma3", "gemma4", "lfm2"),
    },
    "peft/tuners/adaption_prompt/model.py": {"gpt2"},  # refused before: a derived type is not in its table
    "peft/tuners/tuners_utils.py": {"bert", "falcon", "llama"},  # by the type of the module that it has found
    "peft/peft_model.py": {"mpt"},
    "transformers/models/auto/configuration_auto.py": {"mistral"},  # in a config.json
    "peft/tuners/shadow/config.py": {"causal_lm_with_hidden_projection"},  # an adapter's own type
    "transformers/tokenization_utils_tokenizers.py": {"BPE"},  # a tokenizer's type
    "trl/trainer/utils.py": {"gpt_oss"},  # below transformers 5.6
}
COMPARISON = re.compile(r"""model_type(?:["']\])? *(?:==|!=) *["']([\w.-]+)["']""")
ROOTS = {name: Path(find_spec(name).origin).parent for name in ("transformers", "peft", "trl") if find_spec(name)}


def comparisons() -> Iterator[tuple[str, str]]:
    """File and type of each comparison of a model's type with a name, outside of transformers' folders of one model."""
    for name, root in ROOTS.items():
        for file in root.rglob("*.py"):
            place = file.relative_to(root)
            if place.parts[:1] == ("models",) and place.parts[1:2] != ("auto",):
                continue
            for found in COMPARISON.findall(file.read_text(encoding="utf-8")):
                yield f"{name}/{place.as_posix()}", found


def test_every_comparison_of_a_type_has_been_reviewed():
    new = {(file, name) for file, name in comparisons() if name not in {*COMPARED, *REVIEWED.get(file, ())}}
    assert not new, "add it to REVIEWED, and to COMPARED if a patched model of that type would be taken for another"


@pytest.mark.parametrize(("model_type", "seen"), [("llama", "qknorm_llama"), ("falcon_h1", "falcon_h1")])
def test_the_type_in_memory(model_type, seen, tmp_path):
    model = patch_model(sharp_model(model_type), "qk_norm")
    assert model.config.model_type == seen
    assert type(model.config).model_type == f"qknorm_{model_type}"
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == f"qknorm_{model_type}"
    assert AutoConfig.from_pretrained(tmp_path).model_type == seen
    assert unpatch_model(model).config.model_type == model_type


@pytest.mark.parametrize("model_type", COMPARED)
def test_a_compared_type_is_the_base_s_in_memory(model_type):
    assert derived_config(model_type)(qk_norm="qk_norm_cap").model_type == model_type


def test_processors_are_found_by_the_base():
    cases = ((FEATURE_EXTRACTOR_MAPPING, "whisper"), (IMAGE_PROCESSOR_MAPPING, "vit"), (PROCESSOR_MAPPING, "whisper"))
    for table, model_type in cases:
        derived = derived_config(model_type)
        assert derived in table
        assert table[derived] == table[derived.__mro__[2]]
    assert all(VIDEO_PROCESSOR_MAPPING._reverse_config_mapping[f"QKNorm{x}Config"] for x in ("Llama", "ViT"))


def test_awq_knows_derived_types():
    assert AWQ_SCALES_MAPPINGS["qknorm_gpt_neox"] == AWQ_SCALES_MAPPINGS["gpt_neox"]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning")  # peft uses the old name
def test_adapters_reach_experts():
    """By the names of modules from before transformers 5, which PEFT turns into parameters by the type."""

    def trained(model: Any) -> set[str]:
        config = peft.LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj", "w1", "w2", "w3"])
        return {name for name, p in peft.get_peft_model(model, config).named_parameters() if p.requires_grad}

    plain = trained(sharp_model("mixtral"))
    assert any("experts" in name for name in plain)
    assert trained(patch_model(sharp_model("mixtral"), "qk_norm_cap")) == plain
