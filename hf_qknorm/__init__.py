"""Stable attention for pretrained Hugging Face models: QK norm, logit caps, or both, in one line.

    import hf_qknorm as qk
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("gpt2")
    qk.patch_model(model, scheme="qk_norm_cap")  # norms with fresh gains, and a cap
    report = qk.calibrate(model, texts)  # gains that keep what the model predicts
    model.save_pretrained("gpt2-qknorm")  # AutoModelForCausalLM.from_pretrained loads it

| task | names |
|---|---|
| patch a model | `patch_model`, `unpatch_model`, `Scheme`, `SCHEMES`, `FAMILIES` |
| convert a checkpoint | `calibrate`, `Calibration`, `convert_checkpoint` |
| inspect | `inspect_model`, `logit_statistics` |
| train | `LogitMonitor`, `KneeSchedule`, `set_knee`, `remove_norms`, `peft_modules_to_save` |
| optimise | `QKClip`, `QuacK` |
| share | `push_to_hub`, `export_native` |

Importing the package registers its attention functions, its masks and the classes of patched models with transformers.
From then on, transformers' classes for plain models refuse patched checkpoints. `hf_qknorm/hooks` has all such changes.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_qknorm.scheme import SCHEMES, Scheme
from hf_qknorm.version import __version__

# Names by module, which is imported when one of them is first used: transformers' model code takes a second to load.
_LATE = {
    "calibration.calibrate": ("calibrate",),
    "convert.convert": ("convert_checkpoint",),
    "inspection.inspect": ("inspect_model",),
    "families": ("FAMILIES",),
    "convert.export": ("export_native",),
    "convert.push": ("push_to_hub",),
    "model.adapters": ("peft_modules_to_save",),
    "model.knees": ("set_knee",),
    "patch": ("patch_model", "unpatch_model"),
    "measure.logit_statistics": ("logit_statistics",),
    "reports.report": ("Calibration",),
    "training.clip": ("QKClip",),
    "training.knee": ("KneeSchedule",),
    "training.logit_monitor": ("LogitMonitor",),
    "training.quack": ("QuacK",),
    "training.removal": ("remove_norms",),
}
# Public names of versions before 1.0, and what takes their place.
_GONE = {
    "BlendSchedule": "KneeSchedule starts at the unpatched model too",
    "CapSchedule": "patch with the cap from the start",
    "Inspection": "inspect_model returns one, of hf_qknorm.reports.inspection",
    "LogitStatistics": "logit_statistics yields them, of hf_qknorm.measure.logit_statistics",
    "MuonClip": "recipes/muon_clip.py shows torch.optim.Muon with QKClip",
    "NativeExport": "export_native returns one, of hf_qknorm.convert.export",
    "Plan": "convert_checkpoint(..., dry_run=True) prints the plan",
    "add_standalone": "conversions and pushes add the code; else hf_qknorm.standalone.generate.add_standalone",
    "plan_conversion": "convert_checkpoint(..., dry_run=True) prints the plan",
    "set_blend": "set_knee moves a calibrated norm",
    "set_cap": "patch with the cap from the start",
    "start_removal": "calibrate prepares norms for their removal by KneeSchedule and remove_norms",
}
if TYPE_CHECKING:
    from hf_qknorm.calibration.calibrate import calibrate
    from hf_qknorm.convert.convert import convert_checkpoint
    from hf_qknorm.convert.export import export_native
    from hf_qknorm.convert.push import push_to_hub
    from hf_qknorm.families import FAMILIES
    from hf_qknorm.inspection.inspect import inspect_model
    from hf_qknorm.measure.logit_statistics import logit_statistics
    from hf_qknorm.model.adapters import peft_modules_to_save
    from hf_qknorm.model.knees import set_knee
    from hf_qknorm.patch import patch_model, unpatch_model
    from hf_qknorm.reports.report import Calibration
    from hf_qknorm.training.clip import QKClip
    from hf_qknorm.training.knee import KneeSchedule
    from hf_qknorm.training.logit_monitor import LogitMonitor
    from hf_qknorm.training.quack import QuacK
    from hf_qknorm.training.removal import remove_norms
else:

    def __getattr__(name: str) -> Any:
        for module, names in _LATE.items():
            if name in names:
                return getattr(import_module(f"{__name__}.{module}"), name)
        if name in _GONE:
            raise AttributeError(f"{__name__}.{name} is gone: {_GONE[name]}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "FAMILIES", "SCHEMES", "Calibration", "KneeSchedule", "LogitMonitor", "QKClip", "QuacK", "Scheme", "__version__",
    "calibrate", "convert_checkpoint", "export_native", "inspect_model", "logit_statistics", "patch_model",
    "peft_modules_to_save", "push_to_hub", "remove_norms", "set_knee", "unpatch_model",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def install_hooks() -> None:
    """Register attention functions and classes with transformers, and make the other changes of `hf_qknorm/hooks`."""
    import_module(f"{__name__}.hooks.table").install_hooks()


if Path(sys.argv[0]).stem != "hf-qknorm":  # the command's help needs no torch: its commands call it
    install_hooks()
