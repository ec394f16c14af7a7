"""Stable attention for pretrained language models: QK norm, logit caps, or both, in one line.

    import hf_qknorm as qk
    qk.patch_model(model, scheme="qk_norm_cap")

Importing the package registers its attention functions, masks and Auto classes with transformers, whose own classes
then refuse patched checkpoints.
"""

from hf_qknorm.backends import functions
from hf_qknorm.convert import (
    Calibration,
    Inspection,
    Plan,
    calibrate,
    convert_checkpoint,
    inspect_model,
    plan_conversion,
)
from hf_qknorm.export import NativeExport, export_native
from hf_qknorm.families import FAMILIES
from hf_qknorm.hub.push import push_to_hub
from hf_qknorm.model import auto, unpatched_classes
from hf_qknorm.patch import patch_model, unpatch_model
from hf_qknorm.scheme import SCHEMES, Scheme
from hf_qknorm.standalone.generate import add_standalone
from hf_qknorm.stats.logit_statistics import LogitStatistics, logit_statistics
from hf_qknorm.training import adapters
from hf_qknorm.training.adapters import peft_modules_to_save
from hf_qknorm.training.blend import BlendSchedule, CapSchedule, set_blend, set_cap
from hf_qknorm.training.clip import QKClip
from hf_qknorm.training.knee import KneeSchedule, set_knee
from hf_qknorm.training.logit_monitor import LogitMonitor
from hf_qknorm.training.quack import QuacK
from hf_qknorm.version import __version__

__all__ = [
    "FAMILIES",
    "SCHEMES",
    "BlendSchedule",
    "Calibration",
    "CapSchedule",
    "Inspection",
    "KneeSchedule",
    "LogitMonitor",
    "LogitStatistics",
    "NativeExport",
    "Plan",
    "QKClip",
    "QuacK",
    "Scheme",
    "__version__",
    "add_standalone",
    "calibrate",
    "convert_checkpoint",
    "export_native",
    "inspect_model",
    "logit_statistics",
    "patch_model",
    "peft_modules_to_save",
    "plan_conversion",
    "push_to_hub",
    "set_blend",
    "set_cap",
    "set_knee",
    "unpatch_model",
]

functions.register()
auto.register()
unpatched_classes.register()
adapters.register()
