"""Conversion: putting a scheme on a trained model so that it keeps what it knew."""

from hf_qknorm.convert.calibrate import calibrate
from hf_qknorm.convert.checkpoint import convert_checkpoint, plan_conversion
from hf_qknorm.convert.inspect import Inspection, inspect_model
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
