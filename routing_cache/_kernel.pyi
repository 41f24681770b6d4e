import numpy as np
from numpy.typing import NDArray

def all_rows_good(
    rows: NDArray[np.unsignedinteger], width: int, k: int, num_experts: int, /
) -> bool: ...
