// A checksum for each block of bytes. It has 32-bit lanes, which are combined into 64 bits; changing any word of a lane
// changes the lane. Checksums are compared only within one process, and may change between releases.
//
// Multiplication moves a change only to higher bits, so the upper half is then XORed into the lower half. Otherwise,
// flipping the signs of two floats of one lane would give an equal checksum. No two flipped bits of a block cancel
// systematically.
#include <cstring>

#include "detent/chunks.hpp"

namespace {

using detent::kChecked;

constexpr int kLanes = 64;
constexpr uint32_t kFactor = 0x9E3779B1u;         // odd, so that the multiplication is invertible
constexpr uint64_t kFold = 0x9E3779B97F4A7C15ull;

uint64_t check_block(const uint8_t* bytes, int64_t count) {
  uint32_t lanes[kLanes];
  for (int j = 0; j < kLanes; ++j) lanes[j] = static_cast<uint32_t>(j);
  constexpr int64_t kRow = kLanes * sizeof(uint32_t);
  const auto take = [&](const uint8_t* row) {
    for (int j = 0; j < kLanes; ++j) {
      uint32_t word;
      std::memcpy(&word, row + j * sizeof word, sizeof word);
      lanes[j] = (lanes[j] ^ word) * kFactor + 1;
      lanes[j] ^= lanes[j] >> 16;
    }
  };
  int64_t at = 0;
  for (; at + kRow <= count; at += kRow) take(bytes + at);
  if (at < count) {
    uint8_t rest[kRow] = {};
    std::memcpy(rest, bytes + at, static_cast<size_t>(count - at));
    take(rest);
  }
  uint64_t sum = static_cast<uint64_t>(count);
  for (int j = 0; j < kLanes; ++j) {
    sum = (sum ^ lanes[j]) * kFold;
    sum ^= sum >> 32;
  }
  return sum;
}

}  // namespace

namespace detent::DETENT_LEVEL {

void checksum(const Call& call, int64_t begin, int64_t end) {
  const uint8_t* bytes = static_cast<const uint8_t*>(call.x);
  uint64_t* out = static_cast<uint64_t*>(call.out);
  for (int64_t block = begin; block < end; ++block) {
    const int64_t at = block * kChecked;
    out[block] = check_block(bytes + at, least(call.layout.size - at, kChecked));
  }
}

}  // namespace detent::DETENT_LEVEL
