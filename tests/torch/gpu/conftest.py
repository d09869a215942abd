"""Tests of GPU kernels use the helpers of the tests of the PyTorch frontend."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
