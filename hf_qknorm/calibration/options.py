"""The options of a calibration: their defaults, and the ones that are refused."""

from __future__ import annotations

import math
from typing import Any, Final, Literal

from hf_qknorm.calibration.knees import EXPORT_KNEE, SHARPNESS
from hf_qknorm.families.counterparts import counterpart
from hf_qknorm.files.formatting import shorten
from hf_qknorm.scheme import Scheme

METHODS: Final = ("ones", "moments")
Knee = float | Literal["auto"]


def check_method(method: str | None) -> None:
    """Raise ValueError for an unknown method, with the way out for the trained gains of earlier versions."""
    if method not in (None, *METHODS):
        raise ValueError(
            f"unknown method {shorten(method)}: expected one of {', '.join(METHODS)}. Leave it out for predictions "
            "closest to the unpatched model's; for an export give a knee, as knee=16 (--knee 16)"
        )


def resolve_method(
    scheme: Scheme, method: str | None, knee: Knee | None, max_loss_increase: float | None, exportable: bool = False
) -> tuple[str, Knee]:
    """The method and knee of a calibration, with defaults in place of None.

    Raises ValueError for an unknown method, a knee that the scheme can't have, and a limit that is not finite.
    """
    check_method(method)
    if max_loss_increase is not None and not math.isfinite(max_loss_increase):
        raise ValueError(f"max_loss_increase={max_loss_increase} is no limit: expected a finite number, or None")
    if knee is not None and knee != "auto" and (isinstance(knee, str) or not 0 <= knee < math.inf):
        raise ValueError(f'knee={shorten(knee)}: expected a number ≥ 0, "auto", or None')
    if method == "ones" and knee == "auto":
        raise ValueError('knee="auto" is found with gains by "moments": name another method than "ones", or a number')
    if exportable:
        knee = EXPORT_KNEE if knee is None else knee
        if isinstance(knee, str) or not knee:
            raise ValueError(f"knee={knee} is not exportable: expected a number above 0, as knee={EXPORT_KNEE:g}")
    if knee is None:
        possible = bool(scheme.norms) and scheme.pre_norm and scheme.gain != "none"
        knee = "auto" if possible and method is None else 0.0
    elif knee and not (scheme.norms and scheme.pre_norm):
        raise ValueError(
            f"knee={knee}: expected 0 unless q, k or v is normed and pre_norm is True: a norm with a knee keeps part "
            "of the scale"
        )
    return method or "moments", knee


def resolve_sharpness(sharpness: float | None, knee: Knee, exportable: bool) -> float:
    """The sharpness of a calibration, by default by its knee. Raises ValueError for one that is not possible."""
    if sharpness is None:
        return float(SHARPNESS if isinstance(knee, str) else 1)
    if not 1 <= sharpness < math.inf or (exportable and sharpness != 1):
        raise ValueError(f"sharpness={sharpness}: expected {'1 with exportable' if exportable else 'a number ≥ 1'}")
    return float(sharpness)


def exported_eps(config: Any) -> float:
    """The eps of a patched model's native counterpart. Raises ValueError if there is none."""
    counterpart(config)
    return float(config.rms_norm_eps)
