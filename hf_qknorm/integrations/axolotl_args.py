"""The keys that `QKNormPlugin` adds to axolotl's YAML file. Only axolotl imports this module: it needs pydantic."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field


class QKNormPluginArgs(BaseModel):
    """The keys of `QKNormPlugin`, which axolotl adds to its own."""

    qk_norm_scheme: str | dict[str, Any] | None = Field(
        None, description="The scheme: the name of a preset, or the fields of a Scheme."
    )
    qk_norm_calibrate: str | Literal[False] | None = Field(
        None, description="The calibration text: a file, a folder or a Hub dataset. false: fresh gains."
    )
    qk_norm_knee: float | Literal["auto"] | None = Field(
        None, description="The knee of the calibration; by default calibrate() finds one."
    )
    qk_norm_knee_share: float | None = Field(
        None, description="Lower the knee to 0 over this share of the run (KneeSchedule)."
    )
    qk_norm_monitor: bool | int | None = Field(
        None, description="Sample the logits every so many steps (LogitMonitor); true: every 10."
    )
    qk_clip: bool | float | None = Field(None, description="The threshold of QKClip; true: its default.")
    quack: bool | float | None = Field(None, description="Wrap the optimiser in QuacK, with this tau; true: 1.")
