"""benchmarks/train.py: what it says of a device, which no machine of the tests has."""

from __future__ import annotations

import pytest

from benchmarks.train import mfu


@pytest.mark.parametrize(("dtype", "part"), [("bfloat16", "0.8 %: 8.07 of 989"), ("float32", "12.0 %: 8.07 of 67")])
def test_the_share_of_what_a_known_device_could_do(dtype: str, part: str) -> None:
    """134.5 million parameters, ten thousand tokens a second: 6 operations for each pair."""
    said = mfu(134_500_000, 20_000, 2.0, "NVIDIA H100 80GB HBM3", dtype)
    assert said.strip() == f"MFU {part} TFLOP/s in {dtype} on a NVIDIA H100 80GB HBM3"


def test_an_unknown_device_has_no_peak_to_compare_with() -> None:
    assert mfu(10**9, 1000, 1.0, "Unheard-of 3", "float32").startswith("  MFU unknown: 6.00 TFLOP/s on a Unheard-of 3")
