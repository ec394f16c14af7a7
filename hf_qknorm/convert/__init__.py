"""Conversion: putting a scheme on a trained model so that it keeps what it knew."""

from hf_qknorm.convert.calibrate import Calibration, calibrate

__all__ = ["Calibration", "calibrate"]
