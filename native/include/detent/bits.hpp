// Bits: packed codes of 1 to 8 bits, with element 0 in the lowest bits; eight elements fill `bits` bytes. Internal
// linkage, as in half.hpp.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__BMI2__) && defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

static_assert(std::endian::native == std::endian::little, "packed words are assembled in little-endian order");

// The low `bits` of each byte.
inline uint64_t lanes(int bits) { return 0x0101010101010101u * ((1u << bits) - 1); }

inline uint64_t pack_eight(uint64_t bytes, int bits) {
#if defined(__BMI2__) && defined(__x86_64__)
  return _pext_u64(bytes, lanes(bits));
#else
  uint64_t word = 0;
  const uint64_t mask = (1u << bits) - 1;
  for (int i = 0; i < 8; ++i) word |= (bytes >> 8 * i & mask) << bits * i;
  return word;
#endif
}

inline uint64_t unpack_eight(uint64_t word, int bits) {
#if defined(__BMI2__) && defined(__x86_64__)
  return _pdep_u64(word, lanes(bits));
#else
  uint64_t bytes = 0;
  const uint64_t mask = (1u << bits) - 1;
  for (int i = 0; i < 8; ++i) bytes |= (word >> bits * i & mask) << 8 * i;
  return bytes;
#endif
}

// Calls body(std::integral_constant<int, bits>{}), so that copies of `bits` bytes are single instructions.
template <class Body>
inline void with_bits(int bits, Body body) {
  switch (bits) {
    case 1: return body(std::integral_constant<int, 1>{});
    case 2: return body(std::integral_constant<int, 2>{});
    case 3: return body(std::integral_constant<int, 3>{});
    case 4: return body(std::integral_constant<int, 4>{});
    case 5: return body(std::integral_constant<int, 5>{});
    case 6: return body(std::integral_constant<int, 6>{});
    case 7: return body(std::integral_constant<int, 7>{});
    default: return body(std::integral_constant<int, 8>{});
  }
}

// Packs an even number of 4-bit codes; the loop is simple enough for the compiler to vectorize.
inline void pack_nibbles(const uint8_t* __restrict in, uint8_t* __restrict out, int64_t count) {
  for (int64_t i = 0; i < count / 2; ++i) {
    uint16_t pair;
    std::memcpy(&pair, in + 2 * i, 2);
    out[i] = static_cast<uint8_t>((pair & 0xF) | (pair >> 4 & 0xF0));
  }
}

// count bytes -> ceil(count * bits / 8) bytes; the tail is padded with zeros.
inline void pack_bits(const uint8_t* in, uint8_t* out, int64_t count, int width) {
  if (width == 4) {
    pack_nibbles(in, out, count);
    if (count % 2) out[count / 2] = in[count - 1] & 0xF;
    return;
  }
  with_bits(width, [&](auto constant) {
    constexpr int bits = decltype(constant)::value;
    int64_t i = 0;
    for (; i + 8 <= count; i += 8, out += bits) {
      uint64_t bytes;
      std::memcpy(&bytes, in + i, 8);
      const uint64_t word = pack_eight(bytes, bits);
      std::memcpy(out, &word, bits);
    }
    if (i < count) {
      uint64_t bytes = 0;
      std::memcpy(&bytes, in + i, static_cast<size_t>(count - i));
      const uint64_t word = pack_eight(bytes, bits);
      std::memcpy(out, &word, static_cast<size_t>(((count - i) * bits + 7) / 8));
    }
  });
}

// ceil(count * bits / 8) bytes -> count bytes; signed codes are extended by their highest bit.
inline void unpack_bits(const uint8_t* in, uint8_t* out, int64_t count, int width, bool is_signed) {
  with_bits(width, [&](auto constant) {
    constexpr int bits = decltype(constant)::value;
    int64_t i = 0;
    for (; i + 8 <= count; i += 8, in += bits) {
      uint64_t word = 0;
      std::memcpy(&word, in, bits);
      const uint64_t bytes = unpack_eight(word, bits);
      std::memcpy(out + i, &bytes, 8);
    }
    if (i < count) {
      uint64_t word = 0;
      std::memcpy(&word, in, static_cast<size_t>(((count - i) * bits + 7) / 8));
      const uint64_t bytes = unpack_eight(word, bits);
      std::memcpy(out + i, &bytes, static_cast<size_t>(count - i));
    }
  });
  if (is_signed) {
    const uint8_t sign = static_cast<uint8_t>(1u << (width - 1));
    for (int64_t k = 0; k < count; ++k) out[k] = static_cast<uint8_t>((out[k] ^ sign) - sign);
  }
}

}  // namespace
