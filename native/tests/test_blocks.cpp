// Block formats: every instruction set gives the bytes and the values of the baseline, for any division into parts, and
// touches no memory outside of its arrays. tests/gguf compares the bytes with ggml.
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "detent/blocks.hpp"
#include "detent/levels.hpp"
#include "guarded.hpp"

namespace {

using detent::BlockType;
using detent::Call;
using testing::Guarded;
using testing::Side;

constexpr BlockType kTypes[] = {BlockType::q4_0, BlockType::q4_1, BlockType::q5_0,   BlockType::q5_1,
                                BlockType::q8_0, BlockType::q2_k, BlockType::q3_k,   BlockType::q4_k,
                                BlockType::q5_k, BlockType::q6_k, BlockType::iq4_nl, BlockType::iq4_xs,
                                BlockType::mxfp4};

struct Memory {
  Guarded x{1 << 20}, importance{1 << 20}, means{1 << 16}, bytes{1 << 20}, values{1 << 20};
  bool intact() const { return x.intact() && importance.intact() && means.intact() && bytes.intact() && values.intact(); }
};

std::vector<float> random_floats(std::mt19937_64& dice, int64_t count, bool positive) {
  std::normal_distribution<float> normal;
  std::vector<float> drawn;
  for (int64_t i = 0; i < count; ++i) {
    const float value = normal(dice) * (dice() % 50 ? 1.0f : 40.0f) * (dice() % 9 ? 1.0f : 0.0f);
    drawn.push_back(positive ? std::fabs(value) : value);
  }
  return drawn;
}

float* placed(Guarded& guarded, const std::vector<float>& values, Side side) {
  uint8_t* at = guarded.place(values.size() * sizeof(float), side);
  std::memcpy(at, values.data(), values.size() * sizeof(float));
  return reinterpret_cast<float*>(at);
}

struct Result {
  std::vector<uint8_t> bytes;
  std::vector<float> values;
  bool finite, extreme;
};

Result run(Memory& memory, const detent::Level& level, BlockType type, int64_t rows, int64_t per_row,
           const std::vector<float>& x, const std::vector<float>& importance, Side side, int64_t step) {
  const auto shape = detent::block_shape(type);
  const int64_t count = rows * per_row;
  std::atomic<bool> refused{false}, extreme{false};
  Call call;
  call.block_type = static_cast<int>(type);
  call.blocks = per_row;
  call.layout.cols = per_row * shape.size;
  call.x = placed(memory.x, x, side);
  call.refused = &refused;
  call.extreme = &extreme;
  const auto parts = [&](detent::Kernel kernel, int64_t total) {
    for (int64_t begin = 0; begin < total; begin += step) kernel(call, begin, begin + step < total ? begin + step : total);
  };
  if (!importance.empty()) {
    call.out = memory.means.place(static_cast<size_t>(rows) * sizeof(float), side);
    parts(level.kernels.row_means, rows);
    call.row_means = static_cast<const float*>(call.out);
    call.importance = placed(memory.importance, importance, side);
  }
  const size_t size = static_cast<size_t>(count * shape.bytes);
  uint8_t* bytes = memory.bytes.place(size, side);
  call.out = bytes;
  parts(level.kernels.encode_blocks, count);
  call.codes_in = bytes;
  float* values = reinterpret_cast<float*>(memory.values.place(x.size() * sizeof(float), side));
  call.out = values;
  parts(level.kernels.decode_blocks, count);
  return {{bytes, bytes + size}, {values, values + x.size()}, !refused.load(), extreme.load()};
}

bool same(const Result& a, const Result& b) {
  return a.bytes == b.bytes && a.finite == b.finite && a.extreme == b.extreme &&
         std::memcmp(a.values.data(), b.values.data(), a.values.size() * sizeof(float)) == 0;
}

}  // namespace

int main() {
  std::mt19937_64 dice(7);
  static Memory memory;
  int64_t runs = 0, failures = 0;
  for (const BlockType type : kTypes) {
    const auto shape = detent::block_shape(type);
    for (const int64_t rows : {1, 2, 17}) {
      for (const int64_t per_row : {1, 3}) {
        for (const bool weighted : {false, true}) {
          std::vector<float> x = random_floats(dice, rows * per_row * shape.size, false);
          const std::vector<float> importance = weighted ? random_floats(dice, per_row * shape.size, true) : std::vector<float>();
          const bool finite = dice() % 4 != 0;
          if (!finite) x[dice() % x.size()] = dice() % 2 ? INFINITY : NAN;
          const Result expected = run(memory, detent::kLevels[0], type, rows, per_row, x, importance, Side::first, rows * per_row);
          failures += expected.finite != finite;
          for (int i = 0; finite && i < detent::kLevelCount; ++i) {
            if (!detent::kLevels[i].supported()) continue;
            for (const Side side : {Side::first, Side::last}) {
              const Result found = run(memory, detent::kLevels[i], type, rows, per_row, x, importance, side, 5);
              ++runs;
              if (same(expected, found) && memory.intact()) continue;
              ++failures;
              std::printf("%s, type %d, %" PRId64 " rows: differs\n", detent::kLevels[i].name, static_cast<int>(type), rows);
            }
          }
        }
      }
    }
  }
  std::printf("blocks: %" PRId64 " runs, %" PRId64 " differences\n", runs, failures);
  return failures ? 1 : 0;
}
