"""The demo model: a small Qwen2-VL that answers questions about pictures drawn by this package."""

from __future__ import annotations

from pathlib import Path

__all__ = ["PICTURE", "QUESTION", "RIGHT_ANSWER", "model_path"]

# A picture that training never saw, a question about it, and what is drawn (`ask.picture_scene`), in the model's words.
PICTURE = Path(__file__).resolve().parent / "picture.png"
QUESTION = "Describe the picture."
RIGHT_ANSWER = "a purple circle, a blue cross and a red square on a white background"


def model_path() -> Path:
    """Return the folder of the bundled checkpoint.

    Raises:
        ValueError: the package was installed without its model files.
    """
    path = Path(__file__).resolve().parent / "model"
    if not (path / "model.safetensors").is_file():
        raise ValueError(f"no bundled model under {path}; give --model-path")
    return path
