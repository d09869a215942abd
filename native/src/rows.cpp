// Rows of a row-major matrix with `cols` columns, for layers that are trained: rows [begin, end).
//   factor_rows  y = x * f, or x / f if call.divides; x may be y
//   sum_rows     the sum of each row's int8 codes, in int32
#include "detent/chunks.hpp"

namespace {

template <bool divides>
DETENT_LOOP void factor_run(const float* x, float factor, float* y, int64_t count) {
  DETENT_INDEPENDENT
  for (int64_t i = 0; i < count; ++i) y[i] = divides ? x[i] / factor : x[i] * factor;
}

DETENT_LOOP int32_t sum_run(const int8_t* codes, int64_t count) {
  int32_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += codes[i];
  return sum;
}

}  // namespace

namespace detent::DETENT_LEVEL {

void factor_rows(const Call& call, int64_t begin, int64_t end) {
  const int64_t cols = call.layout.cols;
  const float *x = static_cast<const float*>(call.x), *factor = static_cast<const float*>(call.scale);
  float* y = static_cast<float*>(call.out);
  for (int64_t row = begin; row < end; ++row) {
    if (call.divides) {
      factor_run<true>(x + row * cols, factor[row], y + row * cols, cols);
    } else {
      factor_run<false>(x + row * cols, factor[row], y + row * cols, cols);
    }
  }
}

void sum_rows(const Call& call, int64_t begin, int64_t end) {
  const int64_t cols = call.layout.cols;
  const int8_t* codes = static_cast<const int8_t*>(call.codes_in);
  int32_t* sums = static_cast<int32_t*>(call.out);
  for (int64_t row = begin; row < end; ++row) sums[row] = sum_run(codes + row * cols, cols);
}

}  // namespace detent::DETENT_LEVEL
