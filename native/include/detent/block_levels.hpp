// The 16 levels that codes of iq4_nl and iq4_xs select, and twice the values of the codes of mxfp4. Internal linkage, as in half.hpp.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

constexpr int kLevels = 16;
constexpr float kLevel[kLevels] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr float kTwiceFp4[kLevels] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// 2^(exponent - 128): half the scale of a block of mxfp4.
inline float half_scale(uint32_t exponent) {
  const uint32_t bits = exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return scale;
}

}  // namespace
