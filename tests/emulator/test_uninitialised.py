"""What memory holds before anything is written."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kernels.emulator.memory import uninitialised

TYPES = (
    ml_dtypes.bfloat16,
    np.float16,
    np.float32,
    np.float64,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
)


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_uninitialised_is_nan(dtype: Any) -> None:
    """The pattern is NaN as every type and at every place, so no use of it goes unnoticed."""
    assert np.isnan(uninitialised(64).view(dtype).astype(np.float64)).all()
