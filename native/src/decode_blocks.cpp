// Decodes the bytes of a block format to float32: detent.gguf, bit for bit. Works on blocks [begin, end).
#include "detent/block_levels.hpp"
#include "detent/blocks.hpp"
#include "detent/call.hpp"
#include "detent/half.hpp"
#include "detent/lanes.hpp"

namespace {

using detent::BlockType;
using detent::Call;

inline float half_at(const uint8_t* in) { return widen(f16{static_cast<uint16_t>(in[0] | in[1] << 8)}); }

inline void decode_q4_0(const uint8_t* in, float* out) {
  const float d = half_at(in);
  for (int i = 0; i < 16; i += kLanes) {
    const Ints codes = load_bytes(in + 2 + i);
    store_floats(converted((codes & 15) - 8) * d, out + i);
    store_floats(converted((codes >> 4) - 8) * d, out + 16 + i);
  }
}

inline void decode_q4_1(const uint8_t* in, float* out) {
  const float d = half_at(in), low = half_at(in + 2);
  for (int i = 0; i < 16; i += kLanes) {
    const Ints codes = load_bytes(in + 4 + i);
    store_floats(converted(codes & 15) * d + low, out + i);
    store_floats(converted(codes >> 4) * d + low, out + 16 + i);
  }
}

// The highest bit of each of 32 codes, as 16 or 0.
inline void high_bits(const uint8_t* in, int32_t* out) {
  const uint32_t bits = in[0] | in[1] << 8 | in[2] << 16 | static_cast<uint32_t>(in[3]) << 24;
  for (int i = 0; i < 32; ++i) out[i] = static_cast<int32_t>((bits >> i & 1) << 4);
}

inline Ints load_ints(const int32_t* in) {
  Ints x;
  std::memcpy(&x, in, sizeof x);
  return x;
}

inline void decode_q5_0(const uint8_t* in, float* out) {
  const float d = half_at(in);
  alignas(64) int32_t high[32];
  high_bits(in + 2, high);
  for (int i = 0; i < 16; i += kLanes) {
    const Ints codes = load_bytes(in + 6 + i);
    store_floats(converted(((codes & 15) | load_ints(high + i)) - 16) * d, out + i);
    store_floats(converted(((codes >> 4) | load_ints(high + 16 + i)) - 16) * d, out + 16 + i);
  }
}

inline void decode_q5_1(const uint8_t* in, float* out) {
  const float d = half_at(in), low = half_at(in + 2);
  alignas(64) int32_t high[32];
  high_bits(in + 4, high);
  for (int i = 0; i < 16; i += kLanes) {
    const Ints codes = load_bytes(in + 8 + i);
    store_floats(converted((codes & 15) | load_ints(high + i)) * d + low, out + i);
    store_floats(converted((codes >> 4) | load_ints(high + 16 + i)) * d + low, out + 16 + i);
  }
}

inline void decode_q8_0(const uint8_t* __restrict in, float* __restrict out) {
  const float d = half_at(in);
  for (int i = 0; i < 32; ++i) out[i] = static_cast<float>(static_cast<int8_t>(in[2 + i])) * d;
}

inline void decode_q2_k(const uint8_t* __restrict in, float* __restrict out) {
  const float d = half_at(in + 80), dmin = half_at(in + 82);
  for (int part = 0; part < 16; ++part) {
    const float scale = d * static_cast<float>(in[part] & 15), least = dmin * static_cast<float>(in[part] >> 4);
    const uint8_t* codes = in + 16 + part / 8 * 32 + part % 2 * 16;
    const int shift = part % 8 / 2 * 2;
    for (int i = 0; i < 16; ++i) out[part * 16 + i] = scale * static_cast<float>(codes[i] >> shift & 3) - least;
  }
}

inline void decode_q3_k(const uint8_t* __restrict in, float* __restrict out) {
  const float d = half_at(in + 108);
  for (int part = 0; part < 16; ++part) {
    const int low = part < 8 ? in[96 + part] & 15 : in[96 + part - 8] >> 4, high = in[104 + part % 4] >> (part / 4 * 2) & 3;
    const float scale = d * static_cast<float>((low | high << 4) - 32);
    const uint8_t *codes = in + 32 + part / 8 * 32 + part % 2 * 16, *tops = in + part % 2 * 16;
    const int shift = part % 8 / 2 * 2, bit = part / 2;
    for (int i = 0; i < 16; ++i) {
      const int code = (codes[i] >> shift & 3) | (tops[i] >> bit & 1) << 2;
      out[part * 16 + i] = scale * static_cast<float>(code - 4);
    }
  }
}

// Scale j and minimum j of the 12 bytes of q4_k and q5_k.
inline void pair_at(const uint8_t* in, int j, int& scale, int& least) {
  if (j < 4) {
    scale = in[j] & 63;
    least = in[j + 4] & 63;
  } else {
    scale = (in[j + 4] & 15) | (in[j - 4] >> 6) << 4;
    least = (in[j + 4] >> 4) | (in[j] >> 6) << 4;
  }
}

inline void decode_q4_k(const uint8_t* __restrict in, float* __restrict out) {
  const float d = half_at(in), dmin = half_at(in + 2);
  for (int pair = 0; pair < 4; ++pair) {
    int scale[2], least[2];
    for (int side = 0; side < 2; ++side) pair_at(in + 4, 2 * pair + side, scale[side], least[side]);
    const float d0 = d * static_cast<float>(scale[0]), d1 = d * static_cast<float>(scale[1]);
    const float m0 = dmin * static_cast<float>(least[0]), m1 = dmin * static_cast<float>(least[1]);
    const uint8_t* codes = in + 16 + pair * 32;
    for (int i = 0; i < 32; ++i) out[pair * 64 + i] = d0 * static_cast<float>(codes[i] & 15) - m0;
    for (int i = 0; i < 32; ++i) out[pair * 64 + 32 + i] = d1 * static_cast<float>(codes[i] >> 4) - m1;
  }
}

inline void decode_q5_k(const uint8_t* __restrict in, float* __restrict out) {
  const float d = half_at(in), dmin = half_at(in + 2);
  const uint8_t* high = in + 16;
  for (int pair = 0; pair < 4; ++pair) {
    int scale[2], least[2];
    for (int side = 0; side < 2; ++side) pair_at(in + 4, 2 * pair + side, scale[side], least[side]);
    const float d0 = d * static_cast<float>(scale[0]), d1 = d * static_cast<float>(scale[1]);
    const float m0 = dmin * static_cast<float>(least[0]), m1 = dmin * static_cast<float>(least[1]);
    const uint8_t* codes = in + 48 + pair * 32;
    for (int i = 0; i < 32; ++i) {
      out[pair * 64 + i] = d0 * static_cast<float>((codes[i] & 15) | (high[i] >> (2 * pair) & 1) << 4) - m0;
    }
    for (int i = 0; i < 32; ++i) {
      out[pair * 64 + 32 + i] = d1 * static_cast<float>((codes[i] >> 4) | (high[i] >> (2 * pair + 1) & 1) << 4) - m1;
    }
  }
}

inline void decode_q6_k(const uint8_t* __restrict in, float* __restrict out) {
  const float d = half_at(in + 208);
  for (int part = 0; part < 16; ++part) {
    const int half = part / 8, quarter = part % 8 / 2, start = part % 2 * 16;
    const float scale = d * static_cast<float>(static_cast<int8_t>(in[192 + part]));
    const uint8_t *low = in + half * 64 + quarter % 2 * 32 + start, *high = in + 128 + half * 32 + start;
    const int low_shift = quarter / 2 * 4, high_shift = quarter * 2;
    for (int i = 0; i < 16; ++i) {
      const int code = (low[i] >> low_shift & 15) | (high[i] >> high_shift & 3) << 4;
      out[part * 16 + i] = scale * static_cast<float>(code - 32);
    }
  }
}

inline void decode_iq4_nl(const uint8_t* __restrict in, float* __restrict out) {
  const float d = half_at(in);
  for (int i = 0; i < 16; ++i) {
    out[i] = d * kLevel[in[2 + i] & 15];
    out[i + 16] = d * kLevel[in[2 + i] >> 4];
  }
}

inline void decode_mxfp4(const uint8_t* __restrict in, float* __restrict out) {
  const float d = half_scale(in[0]);
  for (int i = 0; i < 16; ++i) {
    out[i] = d * kTwiceFp4[in[1 + i] & 15];
    out[i + 16] = d * kTwiceFp4[in[1 + i] >> 4];
  }
}

inline void decode_iq4_xs(const uint8_t* __restrict in, float* __restrict out) {
  const float d = half_at(in);
  for (int part = 0; part < 8; ++part) {
    const int low = in[4 + part / 2] >> (part % 2 * 4) & 15, high = in[2 + part / 4] >> (part % 4 * 2) & 3;
    const float scale = d * static_cast<float>((low | high << 4) - 32);
    const uint8_t* codes = in + 8 + part * 16;
    for (int i = 0; i < 16; ++i) {
      out[part * 32 + i] = scale * kLevel[codes[i] & 15];
      out[part * 32 + i + 16] = scale * kLevel[codes[i] >> 4];
    }
  }
}

template <class Decode>
void decode_each(const Call& call, int64_t begin, int64_t end, const Decode& decode) {
  const auto shape = detent::block_shape(static_cast<BlockType>(call.block_type));
  const uint8_t* in = static_cast<const uint8_t*>(call.codes_in);
  float* out = static_cast<float*>(call.out);
  for (int64_t block = begin; block < end; ++block) decode(in + block * shape.bytes, out + block * shape.size);
}

}  // namespace

namespace detent::DETENT_LEVEL {

void decode_blocks(const Call& call, int64_t begin, int64_t end) {
  switch (static_cast<BlockType>(call.block_type)) {
#define DETENT_DECODE(NAME) case BlockType::NAME: return decode_each(call, begin, end, [](auto in, auto out) { decode_##NAME(in, out); });
    DETENT_DECODE(q4_0) DETENT_DECODE(q4_1) DETENT_DECODE(q5_0) DETENT_DECODE(q5_1) DETENT_DECODE(q8_0)
    DETENT_DECODE(q2_k) DETENT_DECODE(q3_k) DETENT_DECODE(q4_k) DETENT_DECODE(q5_k) DETENT_DECODE(q6_k)
    DETENT_DECODE(iq4_nl) DETENT_DECODE(iq4_xs) DETENT_DECODE(mxfp4)
#undef DETENT_DECODE
  }
}

}  // namespace detent::DETENT_LEVEL
