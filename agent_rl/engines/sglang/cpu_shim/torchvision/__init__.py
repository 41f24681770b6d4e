"""Makes the published torchvision importable beside a CPU build of torch.

SGLang imports torchvision for its vision models, text model or not. torchvision's compiled
operators do not load beside a CPU-only torch, and its Python part then fails while it attaches
fake kernels to operators that nobody declared. This package comes first on the path, declares
those operators (without an implementation), and hands over to the real package.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path

import torch

_SHIM = Path(__file__).resolve().parent.parent
# Kept in a global: the declarations vanish when the library object is collected.
_operators = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

_others = [entry for entry in sys.path if Path(entry or ".").resolve() != _SHIM]
_spec = PathFinder.find_spec("torchvision", _others)
if _spec is None or _spec.loader is None:
    raise ImportError("torchvision is not installed in the SGLang environment")
_module = sys.modules[__name__]
_module.__path__ = _spec.submodule_search_locations or []
_module.__file__ = _spec.origin
_module.__spec__ = _spec
_spec.loader.exec_module(_module)
