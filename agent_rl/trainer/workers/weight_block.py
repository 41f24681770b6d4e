"""Weights as one block in the safetensors format, written tensor by tensor without a second copy.

safetensors' own writer returns the whole file as bytes or renames a file into place; neither fits
an anonymous memory file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

import orjson
import torch

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def weight_parts(weights: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    """The parts of a safetensors file of CPU tensors, in order."""
    header: dict[str, dict[str, object]] = {}
    at = 0
    for name, tensor in weights.items():
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for tensor in weights.values():
        yield tensor.contiguous().flatten().view(torch.uint8).numpy().data
