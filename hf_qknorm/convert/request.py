"""The request of a conversion: a scheme, and whether and how it is calibrated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hf_qknorm.convert.calibrate import Knee, settled
from hf_qknorm.convert.memory import parse_size
from hf_qknorm.scheme import Scheme


@dataclass(frozen=True)
class Request:
    """A scheme, and the `method` and `knee` of its calibration as `calibrate` takes them; None without calibration."""

    scheme: Scheme
    method: str | None = None
    knee: Knee | None = None

    @classmethod
    def of(
        cls,
        scheme: Scheme | str | Mapping[str, Any],
        calibration: Any,
        method: str | None,
        knee: Knee | None,
        max_loss_increase: float | None = None,
        max_memory: int | str | None = None,
    ) -> Request:
        """The request that these arguments of `convert_checkpoint` make, each default in its place.

        Raises ValueError for a method, knee, limit or memory that is not possible, and for arguments of a calibration
        without one.
        """
        scheme = Scheme.of(scheme)
        if calibration is None:
            limits = {"max_loss_increase": max_loss_increase, "max_memory": max_memory}
            for name, value in {"method": method, "knee": knee, **limits}.items():
                if value is not None:
                    raise ValueError(f"{name} is for a calibration, on text: pass calibration= as well")
            if scheme.knee:
                raise ValueError(
                    f"knee={scheme.knee:g} sets each norm's ε in proportion to what arrives there in text: pass "
                    "calibration= (--calibrate TEXT) as well"
                )
            return cls(scheme)
        if max_memory is not None:
            parse_size(max_memory)
        method, knee = settled(scheme, method, knee, max_loss_increase)
        return cls(replace(scheme, knee=0.0 if isinstance(knee, str) else knee), method, knee)

    @property
    def searched(self) -> bool:
        """Whether the calibration finds the knee."""
        return self.knee == "auto"

    @property
    def moves(self) -> bool:
        """Whether the calibration moves the projections' weights."""
        return self.method == "fit_qk" or (self.method is not None and not self.scheme.pre_norm)
