"""The CUDA driver API through cuda-bindings, and the one place where its return codes are checked.

cuda-bindings is a dependency of SGLang and of torch for CUDA 13. Importing it needs no driver; calling it does.
"""

from __future__ import annotations

from typing import Any

from .base import PartitionUnavailable


class CudaDriverError(RuntimeError):
    """A CUDA driver or NVRTC call failed.

    Attributes:
        code: the numeric ``CUresult`` or ``nvrtcResult``.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def load_driver() -> Any:
    """The module ``cuda.bindings.driver`` with the driver initialised.

    Raises:
        PartitionUnavailable: cuda-bindings is not installed, or the machine has no CUDA driver or GPU.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise PartitionUnavailable(f"the package cuda-bindings cannot be imported ({error})") from error
    try:
        check(driver.cuInit(0), "cuInit")
    except Exception as error:  # cuda-bindings raises several types where libcuda.so.1 is absent or too old
        raise PartitionUnavailable(f"the CUDA driver cannot be initialised ({error})") from error
    return driver


def check(result: tuple[Any, ...], call: str) -> Any:
    """Unpack what a cuda-bindings call returned.

    Args:
        result: ``(error, value, ...)``.
        call: name of the function, for the message.

    Returns:
        None, the only value, or the tuple of values.

    Raises:
        CudaDriverError: the error is not 0.
    """
    error, *values = result
    if int(error) != 0:
        name = getattr(error, "name", str(error))
        raise CudaDriverError(f"{call} failed with {name} ({int(error)})", int(error))
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)
