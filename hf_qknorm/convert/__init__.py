"""Conversion: putting a scheme on a trained model so that it keeps what it knew."""

from hf_qknorm.convert.calibrate import calibrate
from hf_qknorm.convert.checkpoint import convert_checkpoint, plan_conversion
from hf_qknorm.convert.inspect import Inspection, inspect_model
from hf_qknorm.convert.native import NativeExport, export_native
from hf_qknorm.convert.plan import Plan
from hf_qknorm.convert.report import Calibration

__all__ = [
    "Calibration",
    "Inspection",
    "NativeExport",
    "Plan",
    "calibrate",
    "convert_checkpoint",
    "export_native",
    "inspect_model",
    "plan_conversion",
]
