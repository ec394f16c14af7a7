"""Adapters with random weights, and whether transformers adds PEFT's adapters here."""

from typing import Any

import peft
import pytest
import torch
from packaging.version import Version
from transformers import PreTrainedModel
from transformers.integrations.peft import MIN_PEFT_VERSION

from hf_qknorm import FAMILIES

# A mark, of a test or of one of its cases: transformers 5.24 needs PEFT 0.22.
needs_add_adapter = pytest.mark.skipif(
    Version(peft.__version__) < Version(MIN_PEFT_VERSION),
    reason=f"add_adapter of this transformers needs PEFT {MIN_PEFT_VERSION}, and this is {peft.__version__}",
)


@torch.no_grad()
def adapted(model: PreTrainedModel, *, seed: int = 0, **options: Any) -> peft.PeftModel:
    """LoRA on all projections to q, k and v, with random weights in both matrices."""
    family = FAMILIES[model.config.base_model_type]
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=list(family.style.weights), **options))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return wrapped.eval()
