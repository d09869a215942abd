// Conversion of float16 and bfloat16 to and from float32: one rounding, ties to even, bit for bit as in NumPy and
// ml_dtypes. Included only by kernels. Everything has internal linkage, so the linker cannot mix code of different
// instruction sets.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float widen(float x) { return x; }
inline double widen(double x) { return x; }
inline float widen(bf16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }
inline float widen(f16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  const uint32_t rest = x.bits & 0x7FFF;
  if (rest >= 0x7C00) {  // infinity, or NaN, which becomes quiet
    return float_of(sign | 0x7F800000 | (rest & 0x3FF) << 13 | (rest > 0x7C00 ? 0x400000 : 0));
  }
  // Subnormal and normal numbers: shift into place, and correct the exponent by an exact multiplication.
  return float_of(sign | bits_of(float_of(rest << 13) * float_of(0x77800000)));  // 2^112
}

inline void narrow(float x, float& out) { out = x; }
inline void narrow(double x, double& out) { out = x; }
inline void narrow(double x, float& out) { out = static_cast<float>(x); }
inline void narrow(float x, bf16& out) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  const bool is_nan = (bits & 0x7FFFFFFF) > 0x7F800000;
  out.bits = static_cast<uint16_t>(is_nan ? (bits >> 16 & 0x8000) | 0x7FC0 : rounded);
}
inline void narrow(float x, f16& out) {
  const uint32_t bits = bits_of(x);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t rest = bits & 0x7FFFFFFF;
  if (rest > 0x7F800000) {
    out.bits = static_cast<uint16_t>(sign | 0x7E00 | (rest >> 13 & 0x3FF));
  } else if (rest >= 0x47800000) {  // 2^16 and above, including infinity
    out.bits = static_cast<uint16_t>(sign | 0x7C00);
  } else if (rest < 0x38800000) {  // subnormal: adding 0.5 aligns the last bit of the result
    out.bits = static_cast<uint16_t>(sign | (bits_of(float_of(rest) + 0.5f) - 0x3F000000));
  } else {  // rounding may carry into the exponent, and turn the largest number into infinity
    out.bits = static_cast<uint16_t>(sign | ((rest - 0x38000000 + 0xFFF + (rest >> 13 & 1)) >> 13));
  }
}

template <class In, class Out>
inline void widen_all(const In* in, Out* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = widen(in[i]);
}

template <class In, class Out>
inline void narrow_all(const In* in, Out* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) narrow(in[i], out[i]);
}

#if defined(__F16C__)
inline void widen_all(const f16* in, float* out, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
  }
  for (; i < count; ++i) out[i] = widen(in[i]);
}

inline void narrow_all(const float* in, f16* out, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  for (; i < count; ++i) narrow(in[i], out[i]);
}
#endif

}  // namespace
