// Lanes: vectors of float32 and int32, as wide as the registers of the instruction set. Kernels that search scales put one
// block in each lane, so the order of operations inside a block is that of the reference kernel, whatever the width.
// Comparisons give -1 or 0 in each lane. Internal linkage, as in half.hpp.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

#if (defined(__GNUC__) || defined(__clang__)) && !defined(DETENT_PLAIN_LANES)

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));

inline Floats spread(float value) { return value - Floats{}; }
inline Ints spread(int32_t value) { return value + Ints{}; }
inline Ints bits_of(Floats x) { return reinterpret_cast<Ints>(x); }
inline Floats floats_of(Ints bits) { return reinterpret_cast<Floats>(bits); }
inline Floats converted(Ints x) { return __builtin_convertvector(x, Floats); }
inline Ints truncated(Floats x) { return __builtin_convertvector(x, Ints); }
inline Floats select(Ints mask, Floats a, Floats b) { return mask ? a : b; }
inline Ints select(Ints mask, Ints a, Ints b) { return mask ? a : b; }

// Conversions to and from bytes, in the lowest bits of each lane. Compilers convert lane by lane.
#if defined(__AVX512F__)
inline void store_bytes(Ints x, uint8_t* out) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_maskz_cvtepi32_epi8(0xFFFF, reinterpret_cast<__m512i>(x)));
}
inline Ints load_bytes(const uint8_t* in) {
  return reinterpret_cast<Ints>(_mm512_maskz_cvtepu8_epi32(0xFFFF, _mm_loadu_si128(reinterpret_cast<const __m128i*>(in))));
}
#elif defined(__AVX2__)
inline void store_bytes(Ints x, uint8_t* out) {
  const __m256i low = reinterpret_cast<__m256i>(x & 255);
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packus_epi16(words, words));
}
inline Ints load_bytes(const uint8_t* in) {
  return reinterpret_cast<Ints>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(in))));
}
#else
typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
inline void store_bytes(Ints x, uint8_t* out) {
  const Bytes bytes = __builtin_convertvector(x, Bytes);
  std::memcpy(out, &bytes, sizeof bytes);
}
inline Ints load_bytes(const uint8_t* in) {
  Bytes bytes;
  std::memcpy(&bytes, in, sizeof bytes);
  return __builtin_convertvector(bytes, Ints);
}
#endif

#else

template <class T>
struct Lanes {
  T lane[kLanes];
  T& operator[](int i) { return lane[i]; }
  T operator[](int i) const { return lane[i]; }
};
using Floats = Lanes<float>;
using Ints = Lanes<int32_t>;

#define DETENT_LANES(RESULT, TYPE, SCALAR, OP, EXPRESSION)          \
  inline RESULT operator OP(const TYPE& a, const TYPE& b) {         \
    RESULT r;                                                       \
    for (int i = 0; i < kLanes; ++i) r.lane[i] = (EXPRESSION);      \
    return r;                                                       \
  }                                                                 \
  inline RESULT operator OP(const TYPE& a, SCALAR scalar) {         \
    TYPE b;                                                         \
    for (int i = 0; i < kLanes; ++i) b.lane[i] = scalar;            \
    return a OP b;                                                  \
  }                                                                 \
  inline RESULT operator OP(SCALAR scalar, const TYPE& b) {         \
    TYPE a;                                                         \
    for (int i = 0; i < kLanes; ++i) a.lane[i] = scalar;            \
    return a OP b;                                                  \
  }
#define DETENT_ARITHMETIC(OP) DETENT_LANES(Floats, Floats, float, OP, a.lane[i] OP b.lane[i])
#define DETENT_COMPARISON(OP)                                              \
  DETENT_LANES(Ints, Floats, float, OP, a.lane[i] OP b.lane[i] ? -1 : 0)   \
  DETENT_LANES(Ints, Ints, int32_t, OP, a.lane[i] OP b.lane[i] ? -1 : 0)
#define DETENT_INTEGER(OP) DETENT_LANES(Ints, Ints, int32_t, OP, a.lane[i] OP b.lane[i])
DETENT_ARITHMETIC(+) DETENT_ARITHMETIC(-) DETENT_ARITHMETIC(*) DETENT_ARITHMETIC(/)
DETENT_COMPARISON(<) DETENT_COMPARISON(>) DETENT_COMPARISON(<=) DETENT_COMPARISON(>=) DETENT_COMPARISON(==) DETENT_COMPARISON(!=)
DETENT_INTEGER(+) DETENT_INTEGER(-) DETENT_INTEGER(&) DETENT_INTEGER(|) DETENT_INTEGER(<<) DETENT_INTEGER(>>)
#undef DETENT_LANES
#undef DETENT_ARITHMETIC
#undef DETENT_COMPARISON
#undef DETENT_INTEGER
inline Floats& operator+=(Floats& a, const Floats& b) { return a = a + b; }
inline Ints& operator|=(Ints& a, const Ints& b) { return a = a | b; }
inline Ints& operator&=(Ints& a, const Ints& b) { return a = a & b; }
inline Ints operator~(const Ints& a) { return -1 - a; }
inline Floats operator-(const Floats& a) { return a * -1.0f; }

inline Floats spread(float value) {
  Floats x;
  for (int i = 0; i < kLanes; ++i) x.lane[i] = value;
  return x;
}
inline Ints spread(int32_t value) {
  Ints x;
  for (int i = 0; i < kLanes; ++i) x.lane[i] = value;
  return x;
}
inline Ints bits_of(const Floats& x) {
  Ints bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline Floats floats_of(const Ints& bits) {
  Floats x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline Floats converted(const Ints& x) {
  Floats r;
  for (int i = 0; i < kLanes; ++i) r.lane[i] = static_cast<float>(x.lane[i]);
  return r;
}
inline Ints truncated(const Floats& x) {
  Ints r;
  for (int i = 0; i < kLanes; ++i) r.lane[i] = static_cast<int32_t>(x.lane[i]);
  return r;
}
template <class T>
inline T select(const Ints& mask, const T& a, const T& b) {
  T r;
  for (int i = 0; i < kLanes; ++i) r.lane[i] = mask.lane[i] ? a.lane[i] : b.lane[i];
  return r;
}
inline void store_bytes(const Ints& x, uint8_t* out) {
  for (int i = 0; i < kLanes; ++i) out[i] = static_cast<uint8_t>(x.lane[i]);
}
inline Ints load_bytes(const uint8_t* in) {
  Ints x;
  for (int i = 0; i < kLanes; ++i) x.lane[i] = in[i];
  return x;
}

#endif

inline Floats load_floats(const float* in) {
  Floats x;
  std::memcpy(&x, in, sizeof x);
  return x;
}

inline void store_floats(Floats x, float* out) { std::memcpy(out, &x, sizeof x); }

inline Floats root(Floats x) {
  for (int i = 0; i < kLanes; ++i) x[i] = std::sqrt(x[i]);
  return x;
}

inline Floats magnitude(Floats x) { return floats_of(bits_of(x) & 0x7FFFFFFF); }

// Whether a comparison holds in any lane.
inline bool any(Ints mask) {
#if defined(__AVX512F__) && !defined(DETENT_PLAIN_LANES)
  return _mm512_cmplt_epi32_mask(reinterpret_cast<__m512i>(mask), _mm512_setzero_si512()) != 0;
#elif defined(__AVX2__) && !defined(DETENT_PLAIN_LANES)
  return _mm256_movemask_ps(reinterpret_cast<__m256>(mask)) != 0;
#else
  int32_t found = 0;
  for (int i = 0; i < kLanes; ++i) found |= mask[i];
  return found != 0;
#endif
}

// The nearest integer, ties to even: adding 1.5 * 2^23 rounds, and leaves the integer in the mantissa. Larger numbers than
// 2^22 wrap around, as in the reference kernel.
inline Ints nearest(Floats x) { return (bits_of(x + 12582912.0f) & 0x007FFFFF) - 0x00400000; }

inline Ints clamped(Ints x, int32_t low, int32_t high) {
  x = select(x < low, spread(low), x);
  return select(x > high, spread(high), x);
}

// The nearest integer between low and high, as a float.
inline Floats clamped_nearest(Floats x, int32_t low, int32_t high) {
  const Floats whole = converted(nearest(x)), first = spread(static_cast<float>(low)), last = spread(static_cast<float>(high));
  const Floats above = select(whole > first, whole, first);
  return select(above < last, above, last);
}

inline Floats sum_of(const Floats* x, int count) {
  Floats sum = spread(0.0f);
  for (int i = 0; i < count; ++i) sum += x[i];
  return sum;
}

}  // namespace
