"""Getting the bytes of an image or video and reading an image's header, in a thread; nothing is decoded here."""

from __future__ import annotations

import errno
import io
import os
import stat
import time
import warnings
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlparse

import pybase64
from PIL import Image, UnidentifiedImageError
from urllib3.exceptions import HTTPError

IMAGE_EXTENSIONS = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")


class BadImageInput(ValueError):
    """The image or video cannot be had or is not one; the client gets HTTP 400 with this reason."""


# A whole download; `REQUEST_TIMEOUT`, as in SGLang, bounds each wait for the server.
DOWNLOAD_LIMIT_S = 20.0


@dataclass(frozen=True)
class FetchedImage:
    """An encoded image file and what its header says."""

    data: bytes
    height: int  # pixels, not rotated by EXIF
    width: int


def is_remote(image: Any) -> bool:
    """Whether the image has to be fetched from another server."""
    url = getattr(image, "url", image)
    return isinstance(url, str) and url.startswith(("http://", "https://"))


def _shorten(text: str) -> str:
    return text if len(text) <= 100 else text[:100] + "..."


def _download(url: str, max_bytes: int, what: str) -> bytes:
    import requests
    from sglang.srt.utils.common import get_mm_http_session

    timeout_s = float(os.getenv("REQUEST_TIMEOUT", "3"))
    deadline_s = time.monotonic() + DOWNLOAD_LIMIT_S
    try:
        with get_mm_http_session().get(url, timeout=timeout_s, stream=True) as response:
            response.raise_for_status()
            chunks, num_bytes = [], 0
            # read1 returns what has come, so that a server that sends byte by byte meets the limit on the whole.
            while chunk := response.raw.read1(1 << 16, decode_content=True):
                num_bytes += len(chunk)
                if num_bytes > max_bytes:
                    raise BadImageInput(f"the {what} at {_shorten(url)} is larger than {max_bytes / 1e6:g} MB")
                if time.monotonic() > deadline_s:
                    raise BadImageInput(f"the {what} at {_shorten(url)} took longer than {DOWNLOAD_LIMIT_S:g} s")
                chunks.append(chunk)
            return b"".join(chunks)
    except (HTTPError, ValueError) as error:
        if isinstance(error, BadImageInput):
            raise
        raise BadImageInput(f"the {what} at {_shorten(url)} cannot be fetched: {error}") from error
    except requests.exceptions.RequestException as error:
        raise BadImageInput(f"the {what} at {_shorten(url)} cannot be fetched: {error}") from error


def _open_regular(path: str, flags: int) -> int:
    # Opening or reading a pipe or a terminal would wait, and hold its thread, until somebody writes.
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    return descriptor


def _read_file(path: str, max_bytes: int, what: str) -> bytes:
    try:
        with open(path, "rb", opener=_open_regular) as file:
            return file.read(max_bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: a path that none can be, as with a null byte
        reason = getattr(error, "strerror", None) or error
        raise BadImageInput(f"the {what} {_shorten(path)} cannot be read: {reason}") from error


def _is_path(text: str, what: str) -> bool:
    if what == "image":
        return text.lower().endswith(IMAGE_EXTENSIONS)
    try:  # as SGLang does: a video's name may end in anything
        return os.path.isfile(unquote(urlparse(text).path))
    except ValueError:
        return False


def fetch_bytes(image: Any, max_bytes: int, what: str = "image") -> bytes:
    """The bytes of an image or video given in any of the forms that SGLang takes.

    Args:
        image: bytes, a PIL image, an object with a `url`, or a string: http(s) URL, file URL or path, data URL, base64.
        max_bytes: most bytes accepted.
        what: "image" or "video".

    Raises:
        BadImageInput: unreachable, unreadable, empty, too large, or in no known form.
    """
    image = getattr(image, "url", image)
    if isinstance(image, bytes):
        data = image
    elif isinstance(image, Image.Image) and what == "image":
        buffer = io.BytesIO()
        image.save(buffer, format="PNG", compress_level=1)
        data = buffer.getvalue()
    elif not isinstance(image, str):
        raise BadImageInput(f"the {what} cannot be given as {type(image).__name__}")
    elif image.startswith(("http://", "https://")):
        data = _download(image, max_bytes, what)
    elif image.startswith("file://"):
        data = _read_file(unquote(urlparse(image).path), max_bytes, what)
    elif not image.startswith("data:") and _is_path(image, what):
        data = _read_file(image, max_bytes, what)
    else:
        encoded = image.partition(",")[2] if image.startswith("data:") else image
        if len(encoded) > max_bytes // 3 * 4 + 4:
            raise BadImageInput(f"the {what} is larger than {max_bytes / 1e6:g} MB")
        if encoded.startswith("/") and not encoded.startswith("/9j/"):  # so begin JPEG files in base64
            raise BadImageInput(f"the {what} {_shorten(encoded)} cannot be read: no such file, or not by this name")
        try:
            data = pybase64.b64decode(encoded, validate=True)
        except ValueError as error:
            raise BadImageInput(f"the {what} is neither a URL nor valid base64: {error}") from error
    if not data:
        raise BadImageInput(f"the {what} is empty (0 bytes)")
    if len(data) > max_bytes:
        raise BadImageInput(f"the {what} is larger than {max_bytes / 1e6:g} MB")
    return data


def read_header(data: bytes, max_pixels: int) -> FetchedImage:
    """Check that `data` is an image and read its size, without decoding it.

    Raises:
        BadImageInput: no image format that can be decoded, or more than `max_pixels` pixels.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data)) as image:
                width, height = image.size
    except (UnidentifiedImageError, Image.DecompressionBombError) as error:
        reason = "it has too many pixels" if isinstance(error, Image.DecompressionBombError) else "unknown format"
        raise BadImageInput(f"the upload is not an image that can be read: {reason}") from error
    except Exception as error:  # PIL's parsers raise what they like on hostile files
        raise BadImageInput(f"the upload is not an image that can be read: {error}") from error
    if width < 1 or height < 1:
        raise BadImageInput(f"the image has no pixels ({width}x{height})")
    if width * height > max_pixels:
        raise BadImageInput(f"the image has {width}x{height} pixels, more than the {max_pixels} accepted")
    return FetchedImage(data, height, width)
