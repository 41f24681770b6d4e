"""Arrays from a JSON reply: base64 text, nested lists and ``.npy`` files.

Whatever a reply claims, nothing larger than the reply itself is allocated for it.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from itertools import chain
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from routing_cache.errors import PayloadError

DEFAULT_MAX_BYTES = 2 << 30
Dtype = Literal["int8", "int16", "int32", "int64", "uint8", "uint16"]
_DTYPES: tuple[Dtype, ...] = ("int8", "int16", "int32", "int64", "uint8", "uint16")


def decode_base64(text: object, max_bytes: int = DEFAULT_MAX_BYTES) -> bytes:
    """Decode a base64 text; its size is checked before anything is decoded."""
    if not isinstance(text, str | bytes):
        raise PayloadError("routed_experts is no base64 text", got=type(text).__name__)
    if len(text) // 4 * 3 > max_bytes:
        raise PayloadError(
            "the payload is too large",
            got=f"{len(text)} characters",
            expected=f"at most {max_bytes} bytes",
            fix="ask for the suffix only (routed_experts_start_len)",
        )
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise PayloadError(f"routed_experts is no base64: {error}") from error


def vllm_array(value: object, max_bytes: int = DEFAULT_MAX_BYTES) -> NDArray[np.integer]:
    """Read one of vLLM's values as an integer array ``[R, layers, K]``.

    Raises:
        PayloadError: not an array, a nested list or the base64 of an ``.npy`` file.
    """
    array: NDArray[Any]
    if isinstance(value, str | bytes):
        array = read_npy(decode_base64(value, max_bytes), max_bytes)
    elif isinstance(value, np.ndarray):
        array = cast("NDArray[Any]", value)
    elif isinstance(value, list):
        array = _nested_list(cast("list[object]", value))
    else:
        raise PayloadError("routed_experts is no array", got=type(value).__name__)
    if array.ndim != 3 or array.dtype.name not in _DTYPES:
        raise PayloadError(
            "routed_experts is no integer array [rows, layers, experts]",
            got=f"{array.dtype} {array.shape}",
            expected=" or ".join(_DTYPES),
        )
    return array


def _nested_list(value: list[object]) -> NDArray[np.integer]:
    """Read ``[R, layers, K]`` from three levels of lists, checked before numpy sees them.

    numpy would make one array of whatever it finds: one long string among many short ones takes
    the product of both in memory.
    """
    levels: list[list[Any]] = [value]
    lengths = [len(value)]
    for _ in range(2):
        inner = levels[-1]
        if not inner or set(map(type, inner)) != {list} or len(set(map(len, inner))) != 1:
            raise PayloadError("routed_experts is a ragged list or none of three levels")
        lengths.append(len(inner[0]))
        levels.append(list(chain.from_iterable(inner)))
    ids = levels[-1]
    if not ids or set(map(type, ids)) != {int}:
        raise PayloadError("routed_experts holds something else than integers")
    try:
        return np.fromiter(ids, np.int64, len(ids)).reshape(lengths)
    except OverflowError as error:
        raise PayloadError(f"routed_experts holds an impossible id: {error}") from error


_NPY_DESCR = re.compile(rb"'descr': *'([<>|=]?[iu][1248])'")
_MAX_ARRAY_BYTES = (1 << 63) - 1
_NPY_ORDER = re.compile(rb"'fortran_order': *False")
_NPY_SHAPE = re.compile(rb"'shape': *\(([0-9]{1,12}(?:, *[0-9]{1,12}){0,7},?) *\)")


def read_npy(data: bytes, max_bytes: int = DEFAULT_MAX_BYTES) -> NDArray[Any]:
    """Read an ``.npy`` file of integers in memory; allocates nothing the header merely claims.

    The header is read with patterns for the one form that array writers produce; numpy's own
    reader evaluates it as Python source.

    Raises:
        PayloadError: anything else.
    """
    if data[:6] != b"\x93NUMPY" or len(data) < 12 or data[6] not in (1, 2):
        raise PayloadError("routed_experts is no .npy file", got=data[:8])
    width = 2 if data[6] == 1 else 4
    end = 8 + width + int.from_bytes(data[8 : 8 + width], "little")
    header = data[8 + width : min(end, 4096)]
    descr, order = _NPY_DESCR.search(header), _NPY_ORDER.search(header)
    shape = _NPY_SHAPE.search(header)
    if descr is None or order is None or shape is None:
        raise PayloadError(
            "the .npy file is not a plain integer array in C order",
            got=header[:120],
            expected="integers, fortran_order False",
        )
    dtype = np.dtype(descr[1].decode())
    lengths = [int(length) for length in shape[1].split(b",") if length.strip()]
    payload = memoryview(data)[end:]
    claimed = math.prod(lengths) * dtype.itemsize
    # The lengths beside a zero are bounded too: numpy refuses a shape it could never hold.
    too_long = math.prod(max(n, 1) for n in lengths) * dtype.itemsize > _MAX_ARRAY_BYTES
    if len(payload) > max_bytes or claimed != len(payload) or too_long:
        raise PayloadError(
            "the .npy file does not hold what its header says",
            got=f"{len(payload)} bytes",
            expected=f"{dtype} {lengths}, at most {max_bytes} bytes",
        )
    return np.frombuffer(payload, dtype).astype(dtype.newbyteorder("=")).reshape(lengths)
