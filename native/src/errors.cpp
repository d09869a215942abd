// Sums over two arrays, for metrics: x and g may have different types, and terms are computed in double.
//
// error_sums computes the sum of each block of 1024 elements, in the fixed accumulation order; fold_sums adds them up.
// largest_error computes the largest magnitude, or NaN if any element is NaN. Both process blocks [begin, end).
#include <cmath>

#include "detent/arithmetic.hpp"
#include "detent/sums.hpp"

namespace {

using detent::Dtype;
using detent::Term;

// Converts the elements of a block to double, and multiplies them by a power of two in two steps, because the power
// itself may overflow.
const double* doubles(const void* array, Dtype dtype, int64_t at, int64_t count, double* buffer) {
  switch (dtype) {
    case Dtype::f16: widen_all(static_cast<const f16*>(array) + at, buffer, count); break;
    case Dtype::bf16: widen_all(static_cast<const bf16*>(array) + at, buffer, count); break;
    case Dtype::f32: widen_all(static_cast<const float*>(array) + at, buffer, count); break;
    case Dtype::f64: return static_cast<const double*>(array) + at;
  }
  return buffer;
}

// For each pair of elements, the error, or the element of one array, depending on the term.
void differences(const Call& call, int64_t at, int64_t count, double* out) {
  alignas(64) double first[kLeaf], second[kLeaf];
  const double* x = doubles(call.x, call.dtype, at, count, first);
  if (call.term == Term::value || call.term == Term::square) {
    for (int64_t i = 0; i < count; ++i) out[i] = x[i];
    return;
  }
  const double* y = doubles(call.g, call.second_dtype, at, count, second);
  for (int64_t i = 0; i < count; ++i) out[i] = call.term == Term::product ? y[i] : x[i] - y[i];
}

}  // namespace

namespace detent::DETENT_LEVEL {

void error_sums(const Call& call, int64_t begin, int64_t end) {
  alignas(64) double terms[kLeaf], wide[kLeaf];
  for (int64_t block = begin; block < end; ++block) {
    const int64_t at = block * kLeaf, count = least(kLeaf, call.layout.size - at);
    const double *f = call.factor, *h = call.second_factor;
    differences(call, at, count, terms);
    switch (call.term) {
      case Term::value: break;
      case Term::square:
      case Term::squared_error:
        for (int64_t i = 0; i < count; ++i) {
          const double value = terms[i] * f[0] * f[1];
          terms[i] = value * value;
        }
        break;
      case Term::absolute_error:
        for (int64_t i = 0; i < count; ++i) terms[i] = std::fabs(terms[i]);
        break;
      case Term::product: {
        const double* x = doubles(call.x, call.dtype, at, count, wide);
        for (int64_t i = 0; i < count; ++i) terms[i] = (x[i] * f[0] * f[1]) * (terms[i] * h[0] * h[1]);
        break;
      }
    }
    fold(terms, count, 1, count < kLeaf);
    call.sums[block] = terms[0];
  }
}

void largest_error(const Call& call, int64_t begin, int64_t end) {
  alignas(64) double terms[kLeaf];
  for (int64_t block = begin; block < end; ++block) {
    const int64_t at = block * kLeaf, count = least(kLeaf, call.layout.size - at);
    differences(call, at, count, terms);
    double largest = 0.0;
    int missing = 0;
    for (int64_t i = 0; i < count; ++i) {
      const double size = std::fabs(terms[i]);
      missing |= size != size;
      largest = size > largest ? size : largest;
    }
    call.sums[block] = missing ? std::nan("") : largest;
  }
}

}  // namespace detent::DETENT_LEVEL
