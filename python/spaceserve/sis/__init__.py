"""Space inference scheduler: curves, roofline estimate, policy, and the decode side's state board."""

from .curves import DeviceCurves, find_curves
from .policy import Decision, GpuState, SpaceInferenceScheduler, Split
from .roofline import device_spec, estimate_curves
from .shapes import ModelShape, shape_from_hf_config, shape_from_model_path
from .state_board import DecodeState, StateBoardReader, StateBoardTornError, StateBoardWriter

__all__ = [
    "Decision",
    "DecodeState",
    "DeviceCurves",
    "GpuState",
    "ModelShape",
    "SpaceInferenceScheduler",
    "Split",
    "StateBoardReader",
    "StateBoardTornError",
    "StateBoardWriter",
    "curves_for",
    "device_spec",
    "estimate_curves",
    "find_curves",
    "shape_from_hf_config",
    "shape_from_model_path",
]


def curves_for(device_name: str, total_units: int, model: ModelShape) -> DeviceCurves:
    """Shipped curves of this device and model, or else the roofline estimate (its `provenance` says which)."""
    shipped = find_curves(device_name, total_units, model.fingerprint())
    return shipped or estimate_curves(model, device_spec(device_name, total_units))
