"""The budget: the bars that detent's speed is held to, as ratios within one run.

Bars to the copy hold for float32 at 2^20 and 2^24 elements, with memory for the result made beforehand; the one to
torch's eager operator at 2^20; calls are timed on 1,000 elements. Quantization-aware training is held to the float
model, in time, in bytes and in points of accuracy.
"""

BARRED_SIZES = (2**20, 2**24)

# At most so many times the time of a copy of the array; operations without an entry have no bar.
TIMES_COPY = {
    "fake_quantize": 1.15,
    "quantize int8": 1.0,
    "quantize int4": 1.0,
    "min-max": 0.7,
    "observe + fake_quantize": 1.7,
    "fake_quantize_backward": 1.7,
}

# At least so many times faster than torch's eager operator.
TORCH_SIZE, TORCH_FACTOR = 2**20, 15.0
TORCH_OPERATIONS = ("fake_quantize",)

# At most so many microseconds for a call on 1,000 elements, the elements' own time included.
CALL_MICROSECONDS = {"plan.run": 5.0, "dt.fake_quantize": 20.0}

# Quantization-aware training at 8 bits: at most so many times the float step, and the bytes it saves for backward.
QAT_STEP, QAT_SAVED = 1.15, 1.05

# At most so many points of accuracy below the float model that was trained on for the same epochs, by method and bits.
QAT_POINTS = {("QAT, EMA", 4): 0.5, ("QAT, learned", 4): 0.5, ("QAT, learned", 2): 1.5}


def copy_bar(operation: str, size: int, dtype: str) -> float | None:
    """The bar to the copy, or None."""
    return TIMES_COPY.get(operation) if dtype == "float32" and size in BARRED_SIZES else None


def torch_bar(operation: str, size: int, dtype: str) -> float | None:
    """The bar to torch's eager operator, or None."""
    barred = operation in TORCH_OPERATIONS and dtype == "float32" and size == TORCH_SIZE
    return TORCH_FACTOR if barred else None
