// Searches for the scales of blocks, one block per lane. The arithmetic is that of detent.gguf.searches, bit for bit: sums
// add the elements of a block in order. The codes of a search are not stored: its result has what they are computed from.
// Internal linkage, as in half.hpp.
#pragma once

#include "detent/block_levels.hpp"
#include "detent/lanes.hpp"

namespace {

constexpr float kNegligible = 1e-15f;  // blocks of smaller numbers are stored as zeros
constexpr int kRounds = 5;             // of improving one code at a time

#if defined(__GNUC__)
#define DETENT_APART __attribute__((noinline))
#else
#define DETENT_APART
#endif

// The element of largest magnitude with its sign; of equals, the first.
inline Floats first_largest(const Floats* x, int count) {
  Floats most = spread(0.0f), largest = spread(0.0f);
  for (int i = 0; i < count; ++i) {
    const Floats size = magnitude(x[i]);
    largest = select(size > most, x[i], largest);
    most = select(size > most, size, most);
  }
  return largest;
}

// x ~ scale * code - least, with codes from 0 to top.
struct Affine {
  Floats scale, least;
  Floats inverse, base;  // codes are those of inverse * (x - base), or 0 if constant
  Ints constant;

  Ints code(Floats x, int top) const {
    return select(constant, spread(int32_t{0}), clamped(nearest(inverse * (x - base)), 0, top));
  }
};

template <int N, bool absolute>
inline Floats affine_error(const Floats* x, const Floats* weights, const Floats* codes, Floats scale, Floats minimum) {
  Floats sum = spread(0.0f);
  for (int i = 0; i < N; ++i) {
    const Floats distance = scale * codes[i] + minimum - x[i];
    sum += weights[i] * (absolute ? magnitude(distance) : distance * distance);
  }
  return sum;
}

template <int N, bool absolute, bool narrow>
DETENT_APART Affine affine(const Floats* x, const Floats* weights, int top, float first, float step, int count) {
  Floats low = x[0], high = x[0], weight_sum = spread(0.0f), x_sum = spread(0.0f);
  for (int i = 0; i < N; ++i) {
    low = select(x[i] < low, x[i], low);
    high = select(x[i] > high, x[i], high);
    weight_sum += weights[i];
    x_sum += weights[i] * x[i];
  }
  low = select(low > 0.0f, spread(0.0f), low);
  Floats codes[N];
  Affine best;
  best.constant = narrow ? high <= low : high == low;
  best.inverse = static_cast<float>(top) / (high - low);
  best.base = low;
  best.scale = 1.0f / best.inverse;
  for (int i = 0; i < N; ++i) codes[i] = clamped_nearest(best.inverse * (x[i] - low), 0, top);
  Floats minimum = low;
  Floats best_error = affine_error<N, absolute>(x, weights, codes, best.scale, minimum);
  for (int candidate = 0; candidate <= count; ++candidate) {
    const Floats inverse = (first + step * static_cast<float>(candidate) + static_cast<float>(top)) / (high - minimum);
    Floats code_sum = spread(0.0f), square_sum = spread(0.0f), product_sum = spread(0.0f);
    for (int i = 0; i < N; ++i) {
      codes[i] = clamped_nearest(inverse * (x[i] - minimum), 0, top);
      const Floats weighted = weights[i] * codes[i];
      code_sum += weighted;
      square_sum += weighted * codes[i];
      product_sum += weighted * x[i];
    }
    const Floats determinant = weight_sum * square_sum - code_sum * code_sum;
    Floats scale = (weight_sum * product_sum - x_sum * code_sum) / determinant;
    Floats offset = (square_sum * x_sum - code_sum * product_sum) / determinant;
    const Ints above = offset > 0.0f;
    scale = select(above, product_sum / square_sum, scale);
    offset = select(above, spread(0.0f), offset);
    const Floats error = affine_error<N, absolute>(x, weights, codes, scale, offset);
    const Ints better = (determinant > 0.0f) & (error < best_error);
    best_error = select(better, error, best_error);
    best.scale = select(better, scale, best.scale);
    best.inverse = select(better, inverse, best.inverse);
    best.base = select(better, minimum, best.base);
    minimum = select(better, offset, minimum);
  }
  best.scale = select(best.constant, spread(0.0f), best.scale);
  best.least = -select(best.constant, low, minimum);
  return best;
}

// x ~ scale * (code - top), with codes from 0 to 2 * top - 1.
struct Signed {
  Floats scale, inverse;
  Ints tiny;

  Ints code(Floats x, int top) const {
    return select(tiny, spread(int32_t{0}), clamped(nearest(inverse * x), -top, top - 1) + top);
  }
};

template <int N>
DETENT_APART Signed signed_scale(const Floats* x, const Floats* weights, int top) {
  const Floats largest = first_largest(x, N);
  Floats weighted[N];
  for (int i = 0; i < N; ++i) weighted[i] = weights[i] * x[i];
  Floats product_sum, square_sum;
  const auto measure = [&](Floats inverse) {
    Floats of_products = spread(0.0f), of_squares = spread(0.0f);  // not the captured ones, which are in memory
    for (int i = 0; i < N; ++i) {
      const Floats code = clamped_nearest(inverse * x[i], -top, top - 1);
      of_products += weighted[i] * code;
      of_squares += weights[i] * code * code;
    }
    product_sum = of_products;
    square_sum = of_squares;
  };
  Signed best;
  best.inverse = static_cast<float>(-top) / largest;
  measure(best.inverse);
  best.scale = select(square_sum != 0.0f, product_sum / square_sum, spread(0.0f));
  Floats most = best.scale * product_sum;
  for (int i = -9; i <= 9; ++i) {
    if (i == 0) continue;
    const Floats inverse = -(static_cast<float>(top) + 0.1f * static_cast<float>(i)) / largest;
    measure(inverse);
    const Ints better = (square_sum > 0.0f) & (product_sum * product_sum > most * square_sum);
    best.scale = select(better, product_sum / square_sum, best.scale);
    best.inverse = select(better, inverse, best.inverse);
    most = select(better, best.scale * product_sum, most);
  }
  best.tiny = magnitude(largest) < kNegligible;
  best.scale = select(best.tiny, spread(0.0f), best.scale);
  return best;
}

// The scale of N elements, weighted by x * x; codes are written as -top to top - 1.
template <int N>
DETENT_APART Floats refined(const Floats* x, int top, Floats* values, Ints* tiny) {
  const Floats largest = first_largest(x, N), inverse = static_cast<float>(-top) / largest;
  *tiny = magnitude(largest) < kNegligible;
  Floats weights[N], weighted[N], product_sum = spread(0.0f), square_sum = spread(0.0f);
  for (int i = 0; i < N; ++i) {
    values[i] = clamped_nearest(inverse * x[i], -top, top - 1);
    weights[i] = x[i] * x[i];
    weighted[i] = weights[i] * x[i];
    product_sum += weighted[i] * values[i];
    square_sum += weights[i] * values[i] * values[i];
  }
  const float last = static_cast<float>(top - 1);
  Ints going = ~*tiny;
  for (int round = 0; round < kRounds; ++round) {
    Ints changed = spread(int32_t{0});
    for (int i = 0; i < N; ++i) {
      const Floats value = values[i];
      Floats products = product_sum - weighted[i] * value, squares = square_sum - weights[i] * value * value;
      // A code can change only if the quotient is at least about 0.5 away from it. Most are not: no need to divide.
      const Floats numerator = x[i] * squares, excess = numerator - value * products;
      Ints moved = going & (products > 0.0f) & ~(magnitude(excess) < 0.499f * products) & ~((value == last) & (excess > 0.0f));
      if (!any(moved)) continue;
      const Floats code = clamped_nearest(numerator / products, -top, top - 1);
      products += weighted[i] * code;
      squares += weights[i] * code * code;
      moved &= (code != value) & (squares > 0.0f) & (products * products * square_sum > product_sum * product_sum * squares);
      values[i] = select(moved, code, value);
      product_sum = select(moved, products, product_sum);
      square_sum = select(moved, squares, square_sum);
      changed |= moved;
    }
    going &= changed;
    if (!any(going)) break;
  }
  const Floats scale = select(square_sum > 0.0f, product_sum / square_sum, spread(0.0f));
  return select(*tiny, spread(0.0f), scale);
}

// Codes from 0 to top, as bytes, for N numbers that are mostly positive; returns their scale.
template <int N>
DETENT_APART Floats positive(const Floats* x, const Floats* weights, int top, Ints* codes) {
  Floats high = spread(0.0f);
  for (int i = 0; i < N; ++i) high = select(x[i] > high, x[i], high);
  const auto error_of = [&](Floats inverse, bool wraps) {
    const Floats scale = 1.0f / inverse;
    Floats sum = spread(0.0f);
    for (int i = 0; i < N; ++i) {
      Ints code = nearest(inverse * x[i]);
      code = wraps ? code & 255 : select(code > top, spread(int32_t{top}), code);
      const Floats distance = x[i] - scale * converted(code);
      sum += weights[i] * distance * distance;
    }
    return sum;
  };
  Floats best_inverse = static_cast<float>(top) / high, least = error_of(best_inverse, true);
  for (int i = -4; i <= 4; ++i) {
    if (i == 0) continue;
    const Floats inverse = (0.1f * static_cast<float>(i) + static_cast<float>(top)) / high;
    const Floats error = error_of(inverse, false);
    best_inverse = select(error < least, inverse, best_inverse);
    least = select(error < least, error, least);
  }
  Floats product_sum = spread(0.0f), square_sum = spread(0.0f);
  for (int i = 0; i < N; ++i) {
    Ints code = nearest(best_inverse * x[i]);
    code = select(code > top, spread(int32_t{top}), code);
    product_sum += weights[i] * x[i] * converted(code);
    square_sum += weights[i] * converted(code) * converted(code);
    codes[i] = code & 255;
  }
  Ints going = spread(int32_t{-1});
  for (int round = 0; round < kRounds; ++round) {
    Ints changed = spread(int32_t{0});
    for (int i = 0; i < N; ++i) {
      const Floats value = converted(codes[i]);
      Floats products = product_sum - weights[i] * x[i] * value, squares = square_sum - weights[i] * value * value;
      Ints moved = going & (products > 0.0f) & (squares > 0.0f);
      Ints whole = nearest(x[i] * squares / products);
      whole = select(whole > top, spread(int32_t{top}), whole);
      const Floats code = converted(whole);
      moved &= code != value;
      products += weights[i] * x[i] * code;
      squares += weights[i] * code * code;
      moved &= products * products * square_sum > product_sum * product_sum * squares;
      codes[i] = select(moved, whole & 255, codes[i]);
      product_sum = select(moved, products, product_sum);
      square_sum = select(moved, squares, square_sum);
      changed |= moved;
    }
    going &= changed;
    if (!any(going)) break;
  }
  const Ints tiny = high < kNegligible;
  for (int i = 0; i < N; ++i) codes[i] = select(tiny, spread(int32_t{0}), codes[i]);
  return select((square_sum > 0.0f) & ~tiny, product_sum / square_sum, spread(0.0f));
}

// The index of the nearest level; of two at the same distance, the higher. NaN gives the last.
inline Ints level_index(Floats t) {
  Ints index = spread(int32_t{0});
  for (int k = 1; k < kLevels; ++k) index = index + select(t < (kLevel[k - 1] + kLevel[k]) / 2, spread(int32_t{0}), spread(int32_t{1}));
  return index;
}

inline Floats nearest_level(Floats t) {
  Floats value = spread(kLevel[0]);
  for (int k = 1; k < kLevels; ++k) {
    value = value + select(t < (kLevel[k - 1] + kLevel[k]) / 2, spread(0.0f), spread(kLevel[k] - kLevel[k - 1]));
  }
  return value;
}

template <int N>
DETENT_APART Floats level_scale(const Floats* x, const Floats* weights) {
  const Floats largest = first_largest(x, N);
  Floats products, squares;
  const auto measure = [&](Floats inverse) {
    Floats of_products = spread(0.0f), of_squares = spread(0.0f);  // not the captured ones, which are in memory
    for (int i = 0; i < N; ++i) {
      const Floats value = nearest_level(inverse * x[i]), weighted = weights[i] * value;
      of_products += weighted * x[i];
      of_squares += weighted * value;
    }
    products = of_products;
    squares = of_squares;
  };
  measure(1.0f / (-largest / kLevel[0]));
  Floats scale = select(squares > 0.0f, products / squares, spread(0.0f)), most = scale * products;
  for (int i = -7; i <= 7; ++i) {
    measure((static_cast<float>(i) + kLevel[0]) / largest);
    const Ints better = (squares > 0.0f) & (products * products > most * squares);
    scale = select(better, products / squares, scale);
    most = select(better, scale * products, most);
  }
  return select(magnitude(largest) < kNegligible, spread(0.0f), scale);
}

}  // namespace
