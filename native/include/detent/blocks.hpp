// Blocks: sizes of the block formats, by the number of their type in GGUF files.
#pragma once

#include <cstdint>

namespace detent {

enum class BlockType : int {
  q4_0 = 2, q4_1 = 3, q5_0 = 6, q5_1 = 7, q8_0 = 8, q2_k = 10, q3_k = 11, q4_k = 12, q5_k = 13, q6_k = 14, iq4_nl = 20, iq4_xs = 23,
  mxfp4 = 39,
};

struct BlockShape {
  int64_t size = 0, bytes = 0;  // elements and bytes of a block; 0 for an unknown type
  int scale = 0, other = 0;     // positions of the float16 scale and of the second scale or minimum; equal if there is one
};

constexpr BlockShape block_shape(BlockType type) {
  switch (type) {
    case BlockType::q4_0: return {32, 18, 0, 0};
    case BlockType::q4_1: return {32, 20, 0, 2};
    case BlockType::q5_0: return {32, 22, 0, 0};
    case BlockType::q5_1: return {32, 24, 0, 2};
    case BlockType::q8_0: return {32, 34, 0, 0};
    case BlockType::q2_k: return {256, 84, 80, 82};
    case BlockType::q3_k: return {256, 110, 108, 108};
    case BlockType::q4_k: return {256, 144, 0, 2};
    case BlockType::q5_k: return {256, 176, 0, 2};
    case BlockType::q6_k: return {256, 210, 208, 208};
    case BlockType::iq4_nl: return {32, 18, 0, 0};
    case BlockType::iq4_xs: return {256, 136, 0, 0};
    case BlockType::mxfp4: return {32, 17};
  }
  return {};
}

}  // namespace detent
