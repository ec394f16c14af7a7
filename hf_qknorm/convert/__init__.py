"""Conversion of trained models and checkpoints to a scheme, with a calibration that keeps their predictions."""

from hf_qknorm.convert.calibrate import calibrate
from hf_qknorm.convert.checkpoint import convert_checkpoint, plan_conversion
from hf_qknorm.convert.inspect import inspect_model
from hf_qknorm.convert.inspection import Inspection
from hf_qknorm.convert.plan import Plan
from hf_qknorm.stats.report import Calibration

__all__ = [
    "Calibration",
    "Inspection",
    "Plan",
    "calibrate",
    "convert_checkpoint",
    "inspect_model",
    "plan_conversion",
]
