"""The demo model: a small Qwen2-VL that answers questions about pictures drawn by this package."""

from __future__ import annotations

from pathlib import Path

__all__ = ["model_path"]


def model_path() -> Path:
    """Return the folder of the bundled checkpoint.

    Raises:
        ValueError: the package was installed without its model files.
    """
    path = Path(__file__).resolve().parent / "model"
    if not (path / "model.safetensors").is_file():
        raise ValueError(f"no bundled model under {path}; give --model-path")
    return path
