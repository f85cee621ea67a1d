"""Keeps optional dependencies from filling the terminal and /dev/shm. Import it before SGLang.

SGLang depends on torchcodec for audio and video. Where FFmpeg's libraries are absent, importing it fails, and SGLang
prints the failure with all its tracebacks, once in every process. Marked as absent, it is passed over in one line and
SGLang takes its own fallbacks (soundfile, decord).
"""

from __future__ import annotations

import ctypes
import os
import sys

# libavutil of FFmpeg 4 to 8, the versions for which torchcodec has builds.
FFMPEG_LIBRARIES = tuple(f"libavutil.so.{version}" for version in range(60, 55, -1))


def has_ffmpeg() -> bool:
    """Whether one of FFmpeg's libraries that torchcodec can use is there."""
    for name in FFMPEG_LIBRARIES:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return True
    return False


# joblib, which comes with transformers' dependencies and which nothing here uses, would create a named semaphore in
# /dev/shm at its import and leave it behind in a process that is killed.
os.environ.setdefault("JOBLIB_MULTIPROCESSING", "0")

if "torchcodec" not in sys.modules and not has_ffmpeg():
    sys.modules["torchcodec"] = None  # type: ignore[assignment]
