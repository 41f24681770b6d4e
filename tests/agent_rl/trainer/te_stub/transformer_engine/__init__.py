"""A stand-in for Transformer Engine: its layers' parameter names and arithmetic, on any device.

Only what Megatron's Transformer Engine layers ask for, on one tensor-parallel rank. Names, shapes
and argument lists follow Transformer Engine 1.12; the kernels are plain torch.
"""

from transformer_engine import common, pytorch

__version__ = "1.12.0"
__all__ = ["common", "pytorch"]
