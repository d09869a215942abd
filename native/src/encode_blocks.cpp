// Encodes rows to the bytes of a block format: detent.gguf, bit for bit. Works on blocks [begin, end); rows consist of
// whole blocks, so blocks follow each other in memory.
//
// Formats that search scales put one block in each lane of a vector; the order of operations inside a block is that of the
// reference kernel. The other formats, without importance, have no sums: they vectorize inside a block.
#include <algorithm>
#include <cstring>

#include "detent/block_levels.hpp"
#include "detent/block_search.hpp"
#include "detent/blocks.hpp"
#include "detent/call.hpp"
#include "detent/half.hpp"

namespace {

using detent::BlockType;
using detent::Call;

constexpr int kSuper = 256, kPart = 32;
constexpr int kMaxBytes = 210;
constexpr int32_t kExponent = 0x7F800000;

inline uint16_t half_bits(float x) {
  f16 half;
  narrow(x, half);
  return half.bits;
}

inline Floats stored(Floats x) {
  for (int lane = 0; lane < kLanes; ++lane) x[lane] = widen(f16{half_bits(x[lane])});
  return x;
}

// The bytes of kLanes blocks, written position by position.
class BlockBytes {
 public:
  void put(int position, Ints value) { store_bytes(value, bytes_[position]); }
  void put_half(int position, Floats value) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const uint16_t bits = half_bits(value[lane]);
      bytes_[position][lane] = static_cast<uint8_t>(bits & 0xFF);
      bytes_[position + 1][lane] = static_cast<uint8_t>(bits >> 8);
    }
  }
  // Clears the blocks of some lanes.
  void clear(Ints mask, int width) {
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int position = 0; mask[lane] && position < width; ++position) bytes_[position][lane] = 0;
    }
  }
  void write(uint8_t* out, int width, int count) const {
    for (int lane = 0; lane < count; ++lane) {
      for (int position = 0; position < width; ++position) out[lane * width + position] = bytes_[position][lane];
    }
  }

 private:
  alignas(64) uint8_t bytes_[kMaxBytes][kLanes];
};

// Puts element i of the block at rows[lane] into out[i][lane].
template <int N>
void gather(const float* const* rows, Floats* out) {
  float* flat = reinterpret_cast<float*>(out);
  for (int lane = 0; lane < kLanes; ++lane) {
    const float* row = rows[lane];
    for (int i = 0; i < N; ++i) flat[i * kLanes + lane] = row[i];
  }
}

template <int N>
Floats square_sum(const Floats* x) {
  Floats sum = spread(0.0f);
  for (int i = 0; i < N; ++i) sum += x[i] * x[i];
  return sum;
}

// weights = importance * sqrt(mean + x * x)
template <int N>
void weigh(const Floats* x, const Floats* importance, Floats mean, Floats* weights) {
  for (int i = 0; i < N; ++i) weights[i] = importance[i] * root(mean + x[i] * x[i]);
}

struct Tile {
  Floats x[kSuper];
  Floats importance[kSuper];  // undefined unless weighted
  bool weighted;
  Floats row_mean;  // the mean square of each block's row, for weighted blocks of 32
};

// Packs codes at `bits` bits: a byte has those of elements i, i + apart, i + 2 * apart, ...
inline Ints packed(const Ints* codes, int i, int apart, int bits, int parts) {
  Ints value = codes[i];
  for (int part = 1; part < parts; ++part) value |= codes[i + part * apart] << (part * bits);
  return value;
}

// Codes of a sub-block with the stored scale d and minimum; those of the search where d is 0.
template <int N>
void affine_codes(const Floats* x, Floats d, Floats least, const Affine& search, int top, Ints* codes) {
  for (int i = 0; i < N; ++i) codes[i] = clamped(nearest((x[i] + least) / d), 0, top);
  const Ints zero = d == 0.0f;
  if (any(zero)) {
    for (int i = 0; i < N; ++i) codes[i] = select(zero, search.code(x[i], top), codes[i]);
  }
}

inline Floats inverse_of(float top, Floats high) { return select(high > 0.0f, top / high, spread(0.0f)); }

template <int N>
Floats largest_of(const Floats* x) {
  Floats high = spread(0.0f);
  for (int i = 0; i < N; ++i) high = select(x[i] > high, x[i], high);
  return high;
}

void encode_q2_k(const Tile& tile, BlockBytes& out) {
  constexpr int kParts = 16, kCount = 16, kTop = 3, kScaleTop = 15;
  Affine search[kParts];
  Floats weights[kCount], scale[kParts], least[kParts], sums[kParts], d, dmin;
  Ints scale_codes[kParts], least_codes[kParts], codes[kSuper];
  const Floats mean = tile.weighted ? square_sum<kSuper>(tile.x) / 256.0f : spread(0.0f);
  for (int j = 0; j < kParts; ++j) {
    const Floats* x = tile.x + j * kCount;
    if (tile.weighted) {
      weigh<kCount>(x, tile.importance + j * kCount, mean, weights);
      sums[j] = sum_of(weights, kCount);
      search[j] = affine<kCount, false, true>(x, weights, kTop, -0.9f, 0.05f, 36);
    } else {
      for (int i = 0; i < kCount; ++i) weights[i] = magnitude(x[i]);
      search[j] = affine<kCount, true, false>(x, weights, kTop, -0.5f, 0.1f, 15);
    }
    scale[j] = search[j].scale;
    least[j] = search[j].least;
  }
  if (tile.weighted) {
    d = positive<kParts>(scale, sums, kScaleTop, scale_codes);
    dmin = positive<kParts>(least, sums, kScaleTop, least_codes);
  } else {
    const Floats high = largest_of<kParts>(scale), deep = largest_of<kParts>(least);
    const Floats scale_inverse = inverse_of(15.0f, high), least_inverse = inverse_of(15.0f, deep);
    for (int j = 0; j < kParts; ++j) {
      scale_codes[j] = nearest(scale_inverse * scale[j]);
      least_codes[j] = nearest(least_inverse * least[j]);
    }
    d = high / 15.0f;
    dmin = deep / 15.0f;
  }
  const Floats stored_d = stored(d), stored_dmin = stored(dmin);
  for (int j = 0; j < kParts; ++j) {
    const Ints byte = (scale_codes[j] | least_codes[j] << 4) & 255;
    out.put(j, byte);
    affine_codes<kCount>(tile.x + j * kCount, stored_d * converted(byte & 15), stored_dmin * converted(byte >> 4), search[j], kTop,
                         codes + j * kCount);
  }
  for (int half = 0; half < 2; ++half) {
    for (int i = 0; i < 32; ++i) out.put(16 + half * 32 + i, packed(codes, half * 128 + i, 32, 2, 4));
  }
  out.put_half(80, d);
  out.put_half(82, dmin);
}

// Codes of a sub-block with the stored scale d, plus top; those in `codes` stay where d is 0.
template <int N>
void signed_codes(const Floats* x, Floats d, int top, Ints* codes) {
  const Ints zero = d == 0.0f;
  if (any(zero)) {
    for (int i = 0; i < N; ++i) codes[i] = select(zero, codes[i], clamped(nearest(x[i] / d), -top, top - 1) + top);
  } else {
    for (int i = 0; i < N; ++i) codes[i] = clamped(nearest(x[i] / d), -top, top - 1) + top;
  }
}

void encode_q3_k(const Tile& tile, BlockBytes& out) {
  constexpr int kParts = 16, kCount = 16, kTop = 4, kScaleTop = 32;
  Floats scale[kParts], d;
  Ints scale_codes[kParts], codes[kSuper];
  if (tile.weighted) {
    Floats weights[kCount], sums[kParts];
    const Floats mean = 2.0f * square_sum<kSuper>(tile.x) / 256.0f;
    for (int j = 0; j < kParts; ++j) {
      const Floats* x = tile.x + j * kCount;
      weigh<kCount>(x, tile.importance + j * kCount, mean, weights);
      sums[j] = sum_of(weights, kCount);
      const Signed search = signed_scale<kCount>(x, weights, kTop);
      scale[j] = search.scale;
      for (int i = 0; i < kCount; ++i) codes[j * kCount + i] = search.code(x[i], kTop);
    }
    const Signed search = signed_scale<kParts>(scale, sums, kScaleTop);
    d = search.scale;
    for (int j = 0; j < kParts; ++j) scale_codes[j] = search.code(scale[j], kScaleTop);
  } else {
    for (int j = 0; j < kParts; ++j) {
      Floats values[kCount];
      Ints tiny;
      scale[j] = refined<kCount>(tile.x + j * kCount, kTop, values, &tiny);
      for (int i = 0; i < kCount; ++i) codes[j * kCount + i] = select(tiny, spread(int32_t{0}), truncated(values[i]) + kTop);
    }
    const Floats largest = first_largest(scale, kParts), inverse = -32.0f / largest;
    const Ints none = largest == 0.0f;
    for (int j = 0; j < kParts; ++j) {
      scale_codes[j] = select(none, spread(int32_t{0}), clamped(nearest(inverse * scale[j]), -kScaleTop, kScaleTop - 1) + kScaleTop);
    }
    d = select(none, spread(0.0f), 1.0f / inverse);
  }
  const Floats stored_d = stored(d);
  for (int j = 0; j < kParts; ++j) {
    signed_codes<kCount>(tile.x + j * kCount, stored_d * converted(scale_codes[j] - kScaleTop), kTop, codes + j * kCount);
  }
  for (int i = 0; i < 32; ++i) {
    Ints high = spread(int32_t{0});
    for (int part = 0; part < 8; ++part) high |= (codes[part * 32 + i] >> 2) << part;
    out.put(i, high);
  }
  for (int i = 0; i < kSuper; ++i) codes[i] &= spread(int32_t{3});
  for (int half = 0; half < 2; ++half) {
    for (int i = 0; i < 32; ++i) out.put(32 + half * 32 + i, packed(codes, half * 128 + i, 32, 2, 4));
  }
  for (int j = 0; j < 8; ++j) out.put(96 + j, (scale_codes[j] & 15) | (scale_codes[j + 8] & 15) << 4);
  for (int j = 0; j < 4; ++j) {
    Ints high = spread(int32_t{0});
    for (int part = 0; part < 4; ++part) high |= (scale_codes[part * 4 + j] >> 4) << (2 * part);
    out.put(104 + j, high);
  }
  out.put_half(108, d);
}

template <int bits>
void encode_q4_q5(const Tile& tile, BlockBytes& out) {
  constexpr int kParts = 8, kTop = (1 << bits) - 1;
  Affine search[kParts];
  Floats weights[kPart], scale[kParts], least[kParts], sums[kParts], d, dmin;
  Ints scale_codes[kParts], least_codes[kParts], codes[kSuper];
  const Floats mean = tile.weighted ? 2.0f * square_sum<kSuper>(tile.x) / 256.0f : spread(0.0f);
  for (int j = 0; j < kParts; ++j) {
    const Floats* x = tile.x + j * kPart;
    if (tile.weighted) {
      weigh<kPart>(x, tile.importance + j * kPart, mean, weights);
      sums[j] = sum_of(weights, kPart);
      search[j] = affine<kPart, false, true>(x, weights, kTop, -0.9f, 0.05f, 36);
    } else {
      const Floats average = root(square_sum<kPart>(x) / 32.0f);
      for (int i = 0; i < kPart; ++i) weights[i] = average + magnitude(x[i]);
      search[j] = affine<kPart, false, false>(x, weights, kTop, bits == 4 ? -1.0f : -0.5f, 0.1f, bits == 4 ? 20 : 15);
    }
    scale[j] = search[j].scale;
    least[j] = search[j].least;
  }
  if (tile.weighted) {
    d = positive<kParts>(scale, sums, 63, scale_codes);
    dmin = positive<kParts>(least, sums, 63, least_codes);
  } else {
    const Floats high = largest_of<kParts>(scale), deep = largest_of<kParts>(least);
    const Floats scale_inverse = inverse_of(63.0f, high), least_inverse = inverse_of(63.0f, deep);
    for (int j = 0; j < kParts; ++j) {
      const Ints s = nearest(scale_inverse * scale[j]) & 255, m = nearest(least_inverse * least[j]) & 255;
      scale_codes[j] = select(s > 63, spread(int32_t{63}), s);
      least_codes[j] = select(m > 63, spread(int32_t{63}), m);
    }
    d = high / 63.0f;
    dmin = deep / 63.0f;
  }
  out.put_half(0, d);
  out.put_half(2, dmin);
  for (int j = 0; j < 4; ++j) {
    const Ints first = (scale_codes[j] | (scale_codes[j + 4] >> 4) << 6) & 255;
    const Ints second = (least_codes[j] | (least_codes[j + 4] >> 4) << 6) & 255;
    const Ints third = (scale_codes[j + 4] & 15) | (least_codes[j + 4] & 15) << 4;
    out.put(4 + j, first);
    out.put(8 + j, second);
    out.put(12 + j, third);
    scale_codes[j] = first & 63;
    least_codes[j] = second & 63;
    scale_codes[j + 4] = (third & 15) | (first >> 6) << 4;
    least_codes[j + 4] = (third >> 4) | (second >> 6) << 4;
  }
  const Floats stored_d = stored(d), stored_dmin = stored(dmin);
  for (int j = 0; j < kParts; ++j) {
    affine_codes<kPart>(tile.x + j * kPart, stored_d * converted(scale_codes[j]), stored_dmin * converted(least_codes[j]), search[j],
                        kTop, codes + j * kPart);
  }
  if (bits == 5) {
    for (int i = 0; i < 32; ++i) {
      Ints high = spread(int32_t{0});
      for (int part = 0; part < 8; ++part) high |= (codes[part * 32 + i] >> 4) << part;
      out.put(16 + i, high);
    }
    for (int i = 0; i < kSuper; ++i) codes[i] &= spread(int32_t{15});
  }
  constexpr int kStart = bits == 5 ? 48 : 16;
  for (int pair = 0; pair < 4; ++pair) {
    for (int i = 0; i < 32; ++i) out.put(kStart + pair * 32 + i, packed(codes, pair * 64 + i, 32, 4, 2));
  }
}

void encode_q6_k(const Tile& tile, BlockBytes& out) {
  constexpr int kParts = 16, kCount = 16, kTop = 32;
  Floats weights[kCount], scale[kParts];
  Ints codes[kSuper];
  for (int j = 0; j < kParts; ++j) {
    const Floats* x = tile.x + j * kCount;
    for (int i = 0; i < kCount; ++i) weights[i] = tile.weighted ? tile.importance[j * kCount + i] : x[i] * x[i];
    const Signed search = signed_scale<kCount>(x, weights, kTop);
    scale[j] = search.scale;
    for (int i = 0; i < kCount; ++i) codes[j * kCount + i] = search.code(x[i], kTop);
  }
  const Floats largest = first_largest(scale, kParts), inverse = -128.0f / largest, d = 1.0f / inverse, stored_d = stored(d);
  for (int j = 0; j < kParts; ++j) {
    Ints code = nearest(inverse * scale[j]);
    code = select(code > 127, spread(int32_t{127}), code);
    code = ((code + 128) & 255) - 128;  // as a signed byte
    out.put(192 + j, code);
    signed_codes<kCount>(tile.x + j * kCount, stored_d * converted(code), kTop, codes + j * kCount);
  }
  for (int half = 0; half < 2; ++half) {
    const Ints* q = codes + half * 128;
    for (int i = 0; i < 64; ++i) out.put(half * 64 + i, (q[i] & 15) | (q[i + 64] & 15) << 4);
    for (int i = 0; i < 32; ++i) {
      out.put(128 + half * 32 + i, q[i] >> 4 | (q[i + 32] >> 4) << 2 | (q[i + 64] >> 4) << 4 | (q[i + 96] >> 4) << 6);
    }
  }
  out.put_half(208, d);
  const Ints tiny = magnitude(largest) < kNegligible;
  if (any(tiny)) out.clear(tiny, 210);
}

// The low four bits of codes, for blocks of 32.
inline void put_nibbles(const Ints* codes, int start, BlockBytes& out) {
  for (int i = 0; i < 16; ++i) out.put(start + i, (codes[i] & 15) | (codes[i + 16] & 15) << 4);
}

// The highest bits of 5-bit codes.
inline void put_high_bits(const Ints* codes, int start, BlockBytes& out) {
  for (int byte = 0; byte < 4; ++byte) {
    Ints high = spread(int32_t{0});
    for (int bit = 0; bit < 8; ++bit) high |= (codes[byte * 8 + bit] >> 4) << bit;
    out.put(start + byte, high);
  }
}

template <int bits>
void encode_weighted_symmetric(const Tile& tile, BlockBytes& out) {
  constexpr int kTop = 1 << (bits - 1);
  Floats weights[kPart];
  Ints codes[kPart];
  weigh<kPart>(tile.x, tile.importance, tile.row_mean, weights);
  const Signed search = signed_scale<kPart>(tile.x, weights, kTop);
  for (int i = 0; i < kPart; ++i) codes[i] = search.code(tile.x[i], kTop);
  out.put_half(0, search.scale);
  if (bits == 5) put_high_bits(codes, 2, out);
  put_nibbles(codes, bits == 5 ? 6 : 2, out);
}

template <int bits>
void encode_weighted_affine(const Tile& tile, BlockBytes& out) {
  constexpr int kTop = (1 << bits) - 1;
  Floats weights[kPart];
  Ints codes[kPart];
  weigh<kPart>(tile.x, tile.importance, tile.row_mean, weights);
  const Affine search = affine<kPart, false, true>(tile.x, weights, kTop, -0.9f, 0.05f, 36);
  for (int i = 0; i < kPart; ++i) codes[i] = search.code(tile.x[i], kTop);
  out.put_half(0, search.scale);
  out.put_half(2, -search.least);
  if (bits == 5) put_high_bits(codes, 4, out);
  put_nibbles(codes, bits == 5 ? 8 : 4, out);
}

inline Floats reciprocal(Floats x) { return select(x != 0.0f, 1.0f / x, spread(0.0f)); }

template <int N>
void level_weights(const Tile& tile, Floats* weights) {
  if (tile.weighted) {
    weigh<N>(tile.x, tile.importance, square_sum<N>(tile.x) * (2.0f / N), weights);
  } else {
    for (int i = 0; i < N; ++i) weights[i] = tile.x[i] * tile.x[i];
  }
}

void encode_iq4_nl(const Tile& tile, BlockBytes& out) {
  Floats weights[kPart];
  Ints codes[kPart];
  level_weights<kPart>(tile, weights);
  const Floats scale = level_scale<kPart>(tile.x, weights), inverse = reciprocal(scale);
  for (int i = 0; i < kPart; ++i) codes[i] = level_index(inverse * tile.x[i]);
  out.put_half(0, scale);
  put_nibbles(codes, 2, out);
}

void encode_iq4_xs(const Tile& tile, BlockBytes& out) {
  constexpr int kParts = 8;
  Floats weights[kSuper], scale[kParts];
  Ints codes[kSuper], scale_codes[kParts];
  level_weights<kSuper>(tile, weights);
  for (int j = 0; j < kParts; ++j) scale[j] = level_scale<kPart>(tile.x + j * kPart, weights + j * kPart);
  const Floats d = -first_largest(scale, kParts) / 32.0f, inverse = reciprocal(d);
  for (int j = 0; j < kParts; ++j) {
    const Ints code = clamped(nearest(inverse * scale[j]), -32, 31);
    const Floats part_inverse = reciprocal(d * converted(code));
    for (int i = 0; i < kPart; ++i) codes[j * kPart + i] = level_index(part_inverse * tile.x[j * kPart + i]);
    scale_codes[j] = code + 32;
  }
  out.put_half(0, d);
  for (int byte = 0; byte < 2; ++byte) {
    Ints high = spread(int32_t{0});
    for (int part = 0; part < 4; ++part) high |= (scale_codes[byte * 4 + part] >> 4) << (2 * part);
    out.put(2 + byte, high);
  }
  for (int byte = 0; byte < 4; ++byte) out.put(4 + byte, (scale_codes[2 * byte] & 15) | (scale_codes[2 * byte + 1] & 15) << 4);
  for (int j = 0; j < kParts; ++j) put_nibbles(codes + j * kPart, 8 + j * 16, out);
}

// Encodes blocks [begin, end) in groups of kLanes; the lanes beyond the end repeat the last block. Returns whether all
// elements are finite.
template <int N, class Encode>
bool encode_in_lanes(const Call& call, int64_t begin, int64_t end, int width, const Encode& encode) {
  const float* x = static_cast<const float*>(call.x);
  uint8_t* out = static_cast<uint8_t*>(call.out);
  Tile tile;
  BlockBytes bytes;
  tile.weighted = call.importance != nullptr;
  tile.row_mean = spread(0.0f);
  Ints odd = spread(int32_t{0});
  for (int64_t block = begin; block < end; block += kLanes) {
    const float *rows[kLanes], *columns[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      const int64_t index = std::min(block + lane, end - 1);
      rows[lane] = x + index * N;
      if (tile.weighted) {
        columns[lane] = call.importance + index % call.blocks * N;
        if (call.row_means) tile.row_mean[lane] = call.row_means[index / call.blocks];
      }
    }
    gather<N>(rows, tile.x);
    if (tile.weighted) gather<N>(columns, tile.importance);
    for (int i = 0; i < N; ++i) odd |= (bits_of(tile.x[i]) & kExponent) == kExponent;
    encode(tile, bytes);
    bytes.write(out + block * width, width, static_cast<int>(std::min<int64_t>(kLanes, end - block)));
  }
  return !any(odd);
}

// Below: formats without a search. A block is converted in one loop over its elements.

// The smallest and the largest element, compared as integers, which vectorizes: -0.0 is smaller than +0.0 here. The keys of
// finite numbers are between those of the infinities.
struct Extremes {
  float low, high;
  bool finite;

  explicit Extremes(const float* x) {
    int32_t keys[kPart], least = INT32_MAX, most = INT32_MIN;
    std::memcpy(keys, x, sizeof keys);
    for (int i = 0; i < kPart; ++i) {
      const int32_t key = keys[i] ^ ((keys[i] >> 31) & 0x7FFFFFFF);
      least = std::min(least, key);
      most = std::max(most, key);
    }
    low = number(least);
    high = number(most);
    finite = most < kExponent && least > ~kExponent;
  }

  static float number(int32_t key) { return float_of(static_cast<uint32_t>(key ^ ((key >> 31) & 0x7FFFFFFF))); }
};

// The element of largest magnitude with its sign; of equals, the first. If all are zero, it is +0.0.
inline float signed_largest(const float* x, const Extremes& ends) {
  const float below = std::fabs(ends.low), above = std::fabs(ends.high);
  if (below != above) return below > above ? ends.low : ends.high;
  for (int i = 0; i < kPart && above != 0; ++i) {
    if (std::fabs(x[i]) == above) return x[i];
  }
  return 0.0f;
}

// Truncates to a byte as C does, but without undefined behavior: what is no small number becomes 0.
inline Ints whole(Floats x) {
  return truncated(select((x > -512.0f) & (x < 512.0f), x, spread(0.0f))) & 255;
}

inline void put_bits(uint8_t* out, float x) {
  const uint16_t bits = half_bits(x);
  out[0] = static_cast<uint8_t>(bits & 0xFF);
  out[1] = static_cast<uint8_t>(bits >> 8);
}

// Writes the codes of a block of 32, lane by lane: `code` maps kLanes elements to codes.
template <int bits, class Code>
inline void put_codes(const float* x, const Code& code, uint8_t* out) {
  uint8_t* low = out + (bits == 5 ? 4 : 0);
  Ints places = spread(int32_t{0}), high = spread(int32_t{0});
  for (int lane = 0; lane < kLanes; ++lane) places[lane] = lane;
  for (int i = 0; i < 16; i += kLanes) {
    const Ints first = code(load_floats(x + i)), second = code(load_floats(x + 16 + i));
    store_bytes((first & 15) | (second & 15) << 4, low + i);
    high |= ((first >> 4) & 1) << (places + i) | ((second >> 4) & 1) << (places + (i + 16));
  }
  if (bits == 5) {
    uint32_t joined = 0;
    for (int lane = 0; lane < kLanes; ++lane) joined |= static_cast<uint32_t>(high[lane]);
    for (int byte = 0; byte < 4; ++byte) out[byte] = static_cast<uint8_t>(joined >> (8 * byte));
  }
}

template <int bits>
bool encode_symmetric(const float* x, uint8_t* out) {
  constexpr int kMiddle = 1 << (bits - 1), kTop = 2 * kMiddle - 1;
  const Extremes ends(x);
  const float d = signed_largest(x, ends) / -kMiddle, inverse = d != 0 ? 1.0f / d : 0.0f;
  put_bits(out, d);
  put_codes<bits>(x, [&](Floats part) { return clamped(whole(part * inverse + (kMiddle + 0.5f)), 0, kTop); }, out + 2);
  return ends.finite;
}

// The smallest or the largest element; of equals, such as -0.0 and +0.0, the first.
inline float extreme(const float* x, float value) {
  if (value != 0) return value;
  for (int i = 0;; ++i) {
    if (x[i] == 0) return x[i];
  }
}

template <int bits>
bool encode_affine(const float* x, uint8_t* out) {
  constexpr int kTop = (1 << bits) - 1;
  const Extremes ends(x);
  if (!ends.finite) return false;
  const float low = extreme(x, ends.low), high = extreme(x, ends.high);
  const float d = (high - low) / kTop, inverse = d != 0 ? 1.0f / d : 0.0f;
  put_bits(out, d);
  put_bits(out + 2, low);
  put_codes<bits>(
      x,
      [&](Floats part) {
        const Ints code = whole((part - low) * inverse + 0.5f);
        return bits == 4 ? clamped(code, 0, kTop) : code;
      },
      out + 4);
  return true;
}

bool encode_q8_0(const float* x, uint8_t* out) {
  const Extremes ends(x);
  const float d = std::max(std::fabs(ends.low), std::fabs(ends.high)) / 127.0f, inverse = d != 0 ? 1.0f / d : 0.0f;
  put_bits(out, d);
  for (int i = 0; i < kPart; ++i) {
    const float t = x[i] * inverse, size = std::fabs(t), down = std::trunc(size);
    const float up = down + (size - down >= 0.5f ? 1.0f : 0.0f);  // half away from zero
    const int32_t code = static_cast<int32_t>(up < 512.0f ? up : 0.0f);
    out[2 + i] = static_cast<uint8_t>(t < 0 ? -code : code);
  }
  return ends.finite;
}

bool encode_mxfp4(const float* x, uint8_t* out) {
  const Extremes ends(x);
  const float largest = std::max(std::fabs(ends.low), std::fabs(ends.high));
  if (!ends.finite) return false;
  const float log = std::floor(static_cast<float>(std::log2(static_cast<double>(largest))));  // ggml rounds log2 to float
  const uint32_t exponent = largest > 0 ? static_cast<uint32_t>(static_cast<int>(log) + 125) & 255 : 0;
  const float scale = half_scale(exponent);
  out[0] = static_cast<uint8_t>(exponent);
  float levels[kLevels];
  for (int i = 0; i < kLevels; ++i) levels[i] = kTwiceFp4[i] * scale;
  put_codes<4>(
      x,
      [&](Floats part) {
        Ints code = spread(int32_t{0});
        Floats best = magnitude(part);
        for (int i = 1; i < kLevels; ++i) {  // of equally near levels, the first
          const Floats error = magnitude(levels[i] - part);
          const Ints is_better = error < best;
          code = select(is_better, spread(int32_t{i}), code);
          best = select(is_better, error, best);
        }
        return code;
      },
      out + 1);
  return true;
}

template <class Encode>
bool encode_each(const Call& call, int64_t begin, int64_t end, int width, const Encode& encode) {
  const float* x = static_cast<const float*>(call.x);
  uint8_t* out = static_cast<uint8_t*>(call.out);
  bool finite = true;
  for (int64_t block = begin; block < end; ++block) finite &= encode(x + block * kPart, out + block * width);
  return finite;
}

bool encode_blocks_of(const Call& call, int64_t begin, int64_t end) {
  const bool weighted = call.importance != nullptr;
  const auto type = static_cast<BlockType>(call.block_type);
  const int width = static_cast<int>(detent::block_shape(type).bytes);
  switch (type) {
    case BlockType::q4_0:
      return weighted ? encode_in_lanes<kPart>(call, begin, end, width, encode_weighted_symmetric<4>)
                      : encode_each(call, begin, end, width, encode_symmetric<4>);
    case BlockType::q5_0:
      return weighted ? encode_in_lanes<kPart>(call, begin, end, width, encode_weighted_symmetric<5>)
                      : encode_each(call, begin, end, width, encode_symmetric<5>);
    case BlockType::q4_1:
      return weighted ? encode_in_lanes<kPart>(call, begin, end, width, encode_weighted_affine<4>)
                      : encode_each(call, begin, end, width, encode_affine<4>);
    case BlockType::q5_1:
      return weighted ? encode_in_lanes<kPart>(call, begin, end, width, encode_weighted_affine<5>)
                      : encode_each(call, begin, end, width, encode_affine<5>);
    case BlockType::q8_0: return encode_each(call, begin, end, width, encode_q8_0);
    case BlockType::q2_k: return encode_in_lanes<kSuper>(call, begin, end, width, encode_q2_k);
    case BlockType::q3_k: return encode_in_lanes<kSuper>(call, begin, end, width, encode_q3_k);
    case BlockType::q4_k: return encode_in_lanes<kSuper>(call, begin, end, width, encode_q4_q5<4>);
    case BlockType::q5_k: return encode_in_lanes<kSuper>(call, begin, end, width, encode_q4_q5<5>);
    case BlockType::q6_k: return encode_in_lanes<kSuper>(call, begin, end, width, encode_q6_k);
    case BlockType::iq4_nl: return encode_in_lanes<kPart>(call, begin, end, width, encode_iq4_nl);
    case BlockType::iq4_xs: return encode_in_lanes<kSuper>(call, begin, end, width, encode_iq4_xs);
    case BlockType::mxfp4: return encode_each(call, begin, end, width, encode_mxfp4);
  }
  return false;
}

// Whether one of the blocks has an infinite float16 scale, or only zeros as scales. An mxfp4 block has an exponent, which
// may have wrapped around if it is large.
bool has_extreme_scale(const uint8_t* blocks, int64_t count, const detent::BlockShape& shape, bool is_exponent) {
  constexpr uint16_t kMagnitude = 0x7FFF, kInfinite = 0x7C00;
  constexpr uint8_t kWrapped = 232;
  bool extreme = false;
  for (int64_t block = 0; block < count; ++block, blocks += shape.bytes) {
    if (is_exponent) {
      extreme |= blocks[0] >= kWrapped;
      continue;
    }
    uint16_t scale, other;
    std::memcpy(&scale, blocks + shape.scale, sizeof scale);
    std::memcpy(&other, blocks + shape.other, sizeof other);
    const uint16_t high = std::max<uint16_t>(scale & kMagnitude, other & kMagnitude);
    extreme |= high == 0 || high >= kInfinite;
  }
  return extreme;
}

}  // namespace

namespace detent::DETENT_LEVEL {

void encode_blocks(const Call& call, int64_t begin, int64_t end) {
  constexpr int64_t kTogether = 512;  // blocks whose scales are checked while they are in the cache
  const auto type = static_cast<BlockType>(call.block_type);
  const BlockShape shape = block_shape(type);
  const uint8_t* out = static_cast<const uint8_t*>(call.out);
  bool finite = true, extreme = false;
  for (int64_t at = begin; at < end; at += kTogether) {
    const int64_t stop = std::min(at + kTogether, end);
    finite &= encode_blocks_of(call, at, stop);
    extreme |= has_extreme_scale(out + at * shape.bytes, stop - at, shape, type == BlockType::mxfp4);
  }
  if (!finite) call.refused->store(true, std::memory_order_relaxed);
  if (extreme) call.extreme->store(true, std::memory_order_relaxed);
}

// The mean square of each of the rows [begin, end), added up in order: one row per lane.
void row_means(const Call& call, int64_t begin, int64_t end) {
  const float* x = static_cast<const float*>(call.x);
  const int64_t cols = call.layout.cols;
  for (int64_t row = begin; row < end; row += kLanes) {
    Floats sum = spread(0.0f), part[kPart];
    for (int64_t column = 0; column < cols; column += kPart) {
      const float* rows[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) rows[lane] = x + std::min(row + lane, end - 1) * cols + column;
      gather<kPart>(rows, part);
      for (int i = 0; i < kPart; ++i) sum += part[i] * part[i];
    }
    const Floats mean = sum / static_cast<float>(cols);
    for (int lane = 0; lane < kLanes && row + lane < end; ++lane) static_cast<float*>(call.out)[row + lane] = mean[lane];
  }
}

}  // namespace detent::DETENT_LEVEL
