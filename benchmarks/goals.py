"""Goals for the speed of detent's kernels and for QAT, mostly as ratios of two values from the same run.

Most kernel goals are relative to the time of a copy of the array; they hold for float32 at 2^20 and 2^24 elements with
a preallocated output. The goal relative to torch's eager operator holds at 2^20 elements. The time of a call is
measured on 1,000 elements. QAT is compared with the float model in step time, bytes kept for backward, and accuracy.
"""

GOAL_SIZES = (2**20, 2**24)

# Largest time as a multiple of the time to copy the array; operations without an entry have no goal.
TIMES_COPY = {
    "fake_quantize": 1.15,
    "quantize int8": 1.0,
    "quantize int4": 1.0,
    "min-max": 0.7,
    "observe + fake_quantize": 1.7,
    "fake_quantize_backward": 1.7,
}

# Smallest speedup over torch's eager operator.
TORCH_SIZE, TORCH_FACTOR = 2**20, 15.0
TORCH_OPERATIONS = ("fake_quantize",)

# Largest time of a call on 1,000 elements, in microseconds.
CALL_MICROSECONDS = {"plan.run": 5.0, "dt.fake_quantize": 20.0}

# QAT at 8 bits with EMA scales: largest step time as a multiple of the float step, by model. Models without an entry
# have no goal. Learned scales may take 0.1 more. QAT_INTEGER is for integer products on a CPU with VNNI, by layout.
QAT_STEP = {"cnn": 1.10, "transformer": 1.10, "encoder-256": 1.10, "encoder-512": 1.10, "mlp": 1.15, "mlp-1024": 1.15}
QAT_INTEGER = {
    "NCHW": {
        "cnn": 0.96,
        "resnet18": 0.98,
        "mobilenet": 1.05,
        "mlp": 1.08,
        "mlp-1024": 0.93,
        "encoder-256": 1.00,
        "encoder-512": 0.93,
        "small": 1.3,
    },
    "channels last": {"cnn": 0.92, "resnet18": 0.90, "mobilenet": 1.05, "small": 1.3},
}
QAT_LEARNED = 0.1

# QAT at 8 bits: largest number of bytes kept for backward, as a multiple of the float model.
QAT_SAVED = 1.05

# QAT: largest loss of accuracy in percentage points, by method and bits. The float model trains for as many epochs.
QAT_POINTS = {("QAT, EMA", 4): 0.5, ("QAT, learned", 4): 0.5, ("QAT, learned", 2): 1.5}

# QAT with the default settings: largest loss of accuracy in percentage points, by bits.
QAT_DEFAULT_POINTS = {2: 1.2}


def copy_goal(operation: str, size: int, dtype: str) -> float | None:
    """Return the goal relative to the copy, or None if there is no goal."""
    return TIMES_COPY.get(operation) if dtype == "float32" and size in GOAL_SIZES else None


def torch_goal(operation: str, size: int, dtype: str) -> float | None:
    """Return the goal relative to torch's eager operator, or None if there is no goal."""
    has_goal = operation in TORCH_OPERATIONS and dtype == "float32" and size == TORCH_SIZE
    return TORCH_FACTOR if has_goal else None
