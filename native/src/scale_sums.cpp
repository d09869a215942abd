// Sums of products of codes, scaled to floats: y = float(sum + offset) * scale [+ bias], with one offset, scale and bias
// per column of a row-major matrix. Sums are int32, or floats that hold integers. Floats of 2^24 and above may have been
// rounded; the kernel reports them. y may overwrite the sums.
#include "detent/arithmetic.hpp"
#include "detent/chunks.hpp"

namespace {

constexpr float kExact = 16777216.0f;      // a float32 holds every integer below 2^24
constexpr float kLargest = 2147483520.0f;  // the largest float below 2^31

// Adds modulo 2^32, as integer kernels do.
inline int32_t add(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
}

template <bool biased>
DETENT_LOOP void scale_run(const int32_t* sums, const int32_t* offset, const float* scale, const float* bias, float* y,
                           int64_t count) {
  DETENT_INDEPENDENT
  for (int64_t i = 0; i < count; ++i) {
    const float scaled = static_cast<float>(add(sums[i], offset[i])) * scale[i];
    y[i] = biased ? scaled + bias[i] : scaled;
  }
}

template <bool biased>
DETENT_LOOP bool scale_run(const float* sums, const int32_t* offset, const float* scale, const float* bias, float* y,
                           int64_t count) {
  int inexact = 0;
  DETENT_INDEPENDENT
  for (int64_t i = 0; i < count; ++i) {
    const float sum = sums[i];
    inexact |= (sum >= kExact) | (sum <= -kExact);
    const float inside = sum < kLargest ? (sum > -kLargest ? sum : -kLargest) : kLargest;
    const float scaled = static_cast<float>(add(static_cast<int32_t>(inside), offset[i])) * scale[i];
    y[i] = biased ? scaled + bias[i] : scaled;
  }
  return inexact == 0;
}

template <class Sum, bool biased>
void scale_rows(const Call& call, int64_t begin, int64_t end) {
  const Sum* sums = static_cast<const Sum*>(call.x);
  const float *scale = static_cast<const float*>(call.scale), *bias = call.bias;
  float* out = static_cast<float*>(call.out);
  const int64_t cols = call.layout.cols;
  int64_t column = begin % cols;
  for (int64_t at = begin; at < end;) {
    const int64_t count = least(cols - column, end - at);
    const float* shift = biased ? bias + column : nullptr;
    if constexpr (std::is_same_v<Sum, float>) {
      if (!scale_run<biased>(sums + at, call.offset + column, scale + column, shift, out + at, count)) {
        call.refused->store(true, std::memory_order_relaxed);
      }
    } else {
      scale_run<biased>(sums + at, call.offset + column, scale + column, shift, out + at, count);
    }
    at += count;
    column = 0;
  }
}

}  // namespace

namespace detent::DETENT_LEVEL {

void scale_sums(const Call& call, int64_t begin, int64_t end) {
  if (call.float_sums) {
    return call.biased ? scale_rows<float, true>(call, begin, end) : scale_rows<float, false>(call, begin, end);
  }
  return call.biased ? scale_rows<int32_t, true>(call, begin, end) : scale_rows<int32_t, false>(call, begin, end);
}

}  // namespace detent::DETENT_LEVEL
