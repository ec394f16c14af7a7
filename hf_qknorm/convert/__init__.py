"""Conversion: putting a scheme on a trained model so that it keeps what it knew."""

from hf_qknorm.convert.calibrate import calibrate
from hf_qknorm.convert.native import NativeExport, export_native
from hf_qknorm.convert.report import Calibration

__all__ = ["Calibration", "NativeExport", "calibrate", "export_native"]
