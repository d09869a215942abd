// Compares every kernel, for every instruction set that this CPU supports, with the model, on arrays that end (or
// begin) at a guard page: lengths from 0 to 300 in many layouts, and long arrays in parts for several threads.
// Prints differences and exits with 1. `native/tests/Makefile` builds it as a release build and with the sanitizers.
#include "arrays.hpp"

namespace {

using namespace testing;
using model::Compute;
using model::same;
using model::value_of;

// One test per kernel, with the kernel's name. T is the compute type of data of type In.
class Tests : public Arrays {
 public:
  struct Row {
    const char* name;
    Kernel Kernels::*kernel;
    void (*run)(Tests&, Case&, int64_t sets);
  };
  static const Row kRows[];

  void check(const Level& level, const Row& row, const Shape& shape, int threads) {
    Case c;
    int64_t sets = 0;
    c.layout = layout_of(shape, sets);
    dice_.set_rules(c);
    side_ = dice_() % 4 ? Side::last : Side::first;
    level_ = &level;
    kernel_ = row.kernel;
    name_ = row.name;
    shape_ = &shape;
    threads_ = threads;
    ++runs;
    elements += c.layout.size;
    row.run(*this, c, sets);
  }

 private:
  template <class In>
  void quantize(Case& c, int64_t) {
    const std::vector<In> x = data<In>(c, kX, c.x);
    c.out = array<uint8_t>(kOut, code_bytes(c));
    launch(c);
    bool has_nan = false;
    for (int64_t i = 0; i < c.layout.size; ++i) {
      const Compute<In> value = value_of(x[i]), expected = model::code(c, value, scale<In>(c, i), zero<In>(c, i));
      has_nan |= std::isnan(value);
      if (!std::isnan(expected)) expect(read_code(c, c.out, i) == expected, c, i, "another code");
    }
    if (c.codes == Codes::packed) {
      expect(!bits_at(c.out, c.layout.size * c.bits, 8 * code_bytes(c)), c, c.layout.size, "padding that is not zero");
    }
    expect(saw_nan_.load() == has_nan, c, 0, "NaN overlooked or imagined");
  }

  template <class In>
  void dequantize(Case& c, int64_t) {
    uint8_t* codes = array<uint8_t>(kX, random_bytes(code_bytes(c)));
    if (c.format && c.codes == Codes::bytes) {
      for (int64_t i = 0; i < c.layout.size; ++i) codes[i] %= 1 << c.bits;
    }
    c.codes_in = codes;
    c.out = array<In>(kOut, c.layout.size);
    launch(c);
    for (int64_t i = 0; i < c.layout.size; ++i) {
      const auto code = static_cast<Compute<In>>(read_code(c, codes, i));
      expect(same(read<In>(c.out, i), model::dequantized<In>(c, code, scale<In>(c, i), zero<In>(c, i))), c, i,
             "another value");
    }
  }

  template <class In>
  void fake_quantize(Case& c, int64_t) {
    const std::vector<In> x = data<In>(c, kX, c.x);
    const int64_t size = c.layout.size, bytes = ceil_div(size, 8);
    c.out = array<In>(kOut, size);
    if (c.mask != Mask::hard_tanh) c.mask_bits = array<uint8_t>(kMask, bytes);
    launch(c);
    bool has_nan = false;
    for (int64_t i = 0; i < size; ++i) {
      const Compute<In> s = scale<In>(c, i), z = zero<In>(c, i);
      has_nan |= std::isnan(value_of(x[i]));
      expect(same(read<In>(c.out, i), model::fake_quantized(c, x[i], s, z)), c, i, "another value");
      if (c.mask_bits) expect(bit_at(c.mask_bits, i) == model::passes(c, value_of(x[i]), s, z), c, i, "another mask");
    }
    if (c.mask_bits) expect(!bits_at(c.mask_bits, size, 8 * bytes), c, size, "padding of the mask that is not zero");
    if (c.find_nan) expect(saw_nan_.load() == has_nan, c, 0, "NaN overlooked or imagined");
  }

  template <class In>
  void backward(Case& c, int64_t) {
    const std::vector<In> g = data<In>(c, kG, c.g), x = data<In>(c, kX, c.x);
    c.out = array<In>(kOut, c.layout.size);
    launch(c);
    for (int64_t i = 0; i < c.layout.size; ++i) {
      const In expected = model::gradient(c, g[i], x[i], scale<In>(c, i), zero<In>(c, i));
      expect(same(read<In>(c.out, i), expected), c, i, "another gradient");
    }
  }

  template <class In>
  void dequantize_backward(Case& c, int64_t) {
    const std::vector<In> g = data<In>(c, kG, c.g);
    c.out = array<In>(kOut, c.layout.size);
    launch(c);
    for (int64_t i = 0; i < c.layout.size; ++i) {
      const In expected = model::nearest<In>(value_of(g[i]) * scale<In>(c, i));
      expect(same(read<In>(c.out, i), expected), c, i, "another gradient");
    }
  }

  template <class In>
  void masked_backward(Case& c, int64_t) {
    const std::vector<In> g = data<In>(c, kG, c.g);
    c.mask_in = array<uint8_t>(kMask, random_bytes(ceil_div(c.layout.size, 8)));
    c.out = array<In>(kOut, c.layout.size);
    launch(c);
    for (int64_t i = 0; i < c.layout.size; ++i) {
      const In expected = bit_at(c.mask_in, i) ? g[i] : model::nearest<In>(Compute<In>(0));
      expect(same(read<In>(c.out, i), expected), c, i, "another gradient");
    }
  }

  // Zeros of either sign are equal here: the caller makes them positive.
  template <class In>
  void minmax(Case& c, int64_t sets) {
    const std::vector<In> x = data<In>(c, kX, c.x);
    const Extremes expected = place_bounds<In>(c, sets, x);
    launch(c);
    expect_bounds<In>(c, expected);
  }

  template <class In>
  void derive(Case& c, int64_t sets) {
    using T = Compute<In>;
    c.wide_bounds = dice_.heads();
    std::vector<double> low, high;
    for (int64_t i = 0; i < sets; ++i) {
      low.push_back(any_bound<T>(c.wide_bounds));
      high.push_back(dice_() % 4 ? any_bound<T>(c.wide_bounds) : low.back());
      if (low.back() > high.back() && dice_() % 32) std::swap(low.back(), high.back());
    }
    const auto placed = [&](Place place, const std::vector<double>& ends) -> void* {
      if (c.wide_bounds) return array<double>(place, ends);
      return array<T>(place, std::vector<T>(ends.begin(), ends.end()));
    };
    c.low = placed(kLow, low);
    c.high = placed(kHigh, high);
    place_parameters<T>(c, sets);
    launch(c, sets, any_step(sets));
    expect_parameters<T>(c, low, high);
  }

  template <class In>
  void observe(Case& c, int64_t sets) {
    if (c.layout.cols == 0 || c.layout.size / c.layout.cols * ceil_div(c.layout.cols, c.layout.block) != sets) return;
    using T = Compute<In>;
    c.no_zero = c.rule.symmetric != Symmetric::affine && c.rule.zero_point == 0;
    const std::vector<In> x = data<In>(c, kX, c.x);
    const Extremes expected = place_bounds<In>(c, sets, x);
    place_parameters<T>(c, sets);
    c.scale = c.scale_out;
    c.zero = c.zero_out;
    c.out = array<In>(kOut, c.layout.size);
    launch(c, sets, any_step(sets));
    expect_bounds<In>(c, expected);
    const std::vector<bool> good = expect_parameters<T>(c, expected.low, expected.high);
    for (int64_t i = 0; i < c.layout.size; ++i) {
      if (!good[static_cast<size_t>(model::set_of(c.layout, i))]) continue;
      expect(same(read<In>(c.out, i), model::fake_quantized(c, x[i], scale<In>(c, i), zero<In>(c, i))), c, i,
             "another value");
    }
  }

  // Divides each set into channels-last images, if the layout permits it.
  template <class In>
  void any_images(Case& c) {
    const Layout& layout = c.layout;
    const bool whole = layout.block == layout.cols && (!layout.lead || (layout.lead == 1 && layout.axis[0].block == 1));
    if (!std::is_same_v<In, float> || !whole || dice_.heads()) return;
    const auto divisor = [&](int64_t number) {
      int64_t found = 1 + static_cast<int64_t>(dice_() % static_cast<uint64_t>(number));
      while (number % found) --found;
      return found;
    };
    c.points = divisor(layout.cols);
    c.channels = divisor(layout.cols / c.points);
  }

  // Gradients are finite in three of four runs, because infinities would hide a wrong accumulation order.
  template <class In>
  void learned(Case& c, int64_t sets) {
    if (!c.layout.size) return;
    any_images<In>(c);
    c.sets = sets;
    c.exclusive = false;
    const std::vector<In> x = data<In>(c, kX, c.x), g = data<In>(c, kG, c.g, dice_() % 4 == 0);
    const bool columns = c.layout.block == 1 && c.layout.cols > 1 && !c.points;
    c.tile = columns ? kTile : 1;
    int64_t boxes = ceil_div(c.layout.cols, columns ? kTile : c.layout.block);
    for (int i = 0; i < c.layout.lead; ++i) boxes *= ceil_div(c.layout.axis[i].size, c.layout.axis[i].block);
    std::vector<std::vector<double>> scales(static_cast<size_t>(sets)), zeros(static_cast<size_t>(sets));
    for (int64_t place = 0; place < c.layout.size; ++place) {
      int64_t i = place;  // in memory
      if (c.points) {
        const int64_t image = c.points * c.channels, rest = place % image;
        i = place - rest + rest % c.points * c.channels + rest / c.points;
      }
      const size_t set = static_cast<size_t>(model::set_of(c.layout, i));
      const model::Terms terms =
          model::learned_terms(c, value_of(g[i]), value_of(x[i]), scale<In>(c, i), zero<In>(c, i));
      scales[set].push_back(terms.scale);
      zeros[set].push_back(terms.zero);
    }
    c.blocks = blocks_of(scales);
    c.sums = array<double>(kSums, sets * c.blocks);
    c.high_sums = c.format ? nullptr : array<double>(kHighSums, sets * c.blocks);
    const int64_t pieces = boxes * c.blocks;
    c.step = c.points ? ceil_div(pieces, 1 + static_cast<int64_t>(dice_() % 3)) : any_step(pieces);
    c.scratch = array<double>(kScratch, ceil_div(pieces, c.step) * 2 * kLeaf * c.tile);
    if (c.points) {
      c.planes = array<float>(kCopies, ceil_div(pieces, c.step) * 2 * planes_of(c.points, c.channels) * pitch_of(c.points));
    }
    launch(c, pieces, c.step);
    expect_block_sums(c, c.sums, scales);
    if (c.high_sums) expect_block_sums(c, c.high_sums, zeros);
  }

  // Sets of the layout with block sums; blocks without elements stay unchanged.
  template <class In>
  void fold_sums(Case& c, int64_t sets) {
    if (!c.layout.size) return;
    std::vector<std::vector<double>> terms(static_cast<size_t>(sets));
    for (int64_t i = 0; i < c.layout.size; ++i) terms[static_cast<size_t>(model::set_of(c.layout, i))].push_back(0);
    c.blocks = blocks_of(terms);
    c.sums = array<double>(kSums, random_doubles(sets * c.blocks));
    c.high_sums = dice_.heads() ? array<double>(kHighSums, random_doubles(sets * c.blocks)) : nullptr;
    std::vector<double> expected;
    for (const double* sums : {c.sums, c.high_sums}) {
      for (int64_t set = 0; sums && set < sets; ++set) {
        const int64_t count = static_cast<int64_t>(terms[static_cast<size_t>(set)].size());
        expected.push_back(model::sum_of_blocks({sums + set * c.blocks, sums + set * c.blocks + ceil_div(count, kLeaf)}));
      }
    }
    launch(c, sets, any_step(sets));
    for (size_t i = 0; i < expected.size(); ++i) {
      const int64_t set = static_cast<int64_t>(i) % sets;
      const double* sums = static_cast<int64_t>(i) < sets ? c.sums : c.high_sums;
      expect(same(sums[set * c.blocks], expected[i]), c, set, "another sum");
    }
  }

  template <class In>
  void error_sums(Case& c, int64_t) {
    c.term = dice_.one_of<Term>(5);
    std::vector<double> terms;
    for (const auto& [x, y] : pairs<In>(c)) {
      const double *f = c.factor, *h = c.second_factor;
      const double error = x - y, scaled = (c.term == Term::square ? x : error) * f[0] * f[1];
      terms.push_back(c.term == Term::value            ? x
                      : c.term == Term::absolute_error ? std::fabs(error)
                      : c.term == Term::product        ? (x * f[0] * f[1]) * (y * h[0] * h[1])
                                                       : scaled * scaled);
    }
    c.sums = array<double>(kSums, c.blocks);
    launch(c, c.blocks, any_step(c.blocks));
    expect_block_sums(c, c.sums, {terms});
  }

  template <class In>
  void largest_error(Case& c, int64_t) {
    c.term = dice_.heads() ? Term::value : Term::absolute_error;
    std::vector<double> largest;
    int64_t i = 0;
    for (const auto& [x, y] : pairs<In>(c)) {
      const double size = std::fabs(c.term == Term::value ? x : x - y);
      if (i++ % kLeaf == 0) largest.push_back(0.0);
      if (std::isnan(size) || size > largest.back()) largest.back() = size;
      if (std::isnan(largest.back())) largest.back() = model::kNaN;
    }
    c.sums = array<double>(kSums, c.blocks);
    launch(c, c.blocks, any_step(c.blocks));
    for (i = 0; i < c.blocks; ++i) expect(same(c.sums[i], largest[static_cast<size_t>(i)]), c, i, "another error");
  }

  template <class In>
  void pack(Case& c, int64_t) {
    c.bits = 1 + dice_.one_of<int>(8);
    c.codes_in = array<uint8_t>(kX, random_bytes(c.layout.size));
    c.codes = Codes::packed;
    c.out = array<uint8_t>(kOut, code_bytes(c));
    launch(c);
    for (int64_t i = 0; i < c.layout.size; ++i) {
      const int expected = read<uint8_t>(c.codes_in, i) & ((1 << c.bits) - 1);
      expect(bits_at(c.out, i * c.bits, (i + 1) * c.bits) == expected, c, i, "another code");
    }
    expect(!bits_at(c.out, c.layout.size * c.bits, 8 * code_bytes(c)), c, c.layout.size, "padding that is not zero");
  }

  template <class In>
  void unpack(Case& c, int64_t) {
    c.bits = 1 + dice_.one_of<int>(8);
    c.is_signed = dice_.heads();
    c.codes = Codes::packed;
    c.codes_in = array<uint8_t>(kX, random_bytes(code_bytes(c)));
    c.out = array<uint8_t>(kOut, c.layout.size);
    launch(c);
    for (int64_t i = 0; i < c.layout.size; ++i) {
      const double found = c.is_signed ? double(read<int8_t>(c.out, i)) : double(read<uint8_t>(c.out, i));
      expect(found == read_code(c, c.codes_in, i), c, i, "another code");
    }
  }

  // Any change of a byte changes the checksum of its block, and no other checksum.
  template <class In>
  void checksum(Case& c, int64_t) {
    c.layout.size *= 4;
    std::vector<uint8_t> bytes = random_bytes(c.layout.size);
    const int64_t blocks = ceil_div(c.layout.size, detent::kChecked);
    std::vector<uint64_t> first;
    for (int round = 0; round < 3 && blocks; ++round) {
      const int64_t at = dice_.one_of<int64_t>(c.layout.size);
      if (round == 2) bytes[static_cast<size_t>(at)] ^= static_cast<uint8_t>(1 << dice_.one_of<int>(8));
      c.x = array<uint8_t>(kX, bytes);
      c.out = array<uint64_t>(kOut, blocks);
      launch(c, blocks, any_step(blocks));
      for (int64_t i = 0; i < blocks; ++i) {
        const uint64_t found = read<uint64_t>(c.out, i);
        if (round == 0) first.push_back(found);
        const bool changed = round == 2 && at / detent::kChecked == i;
        expect((found == first[static_cast<size_t>(i)]) != changed, c, i, "another checksum, or the same");
      }
    }
  }

  template <class In>
  void scale_sums(Case& c, int64_t) {
    const int64_t size = c.layout.size, cols = size % 7 == 0 && size ? 7 : 1;
    c.layout.cols = cols;
    c.float_sums = dice_() % 2 == 0;
    c.biased = dice_() % 2 == 0;
    const auto words = [&](int64_t count, int shift) {
      std::vector<int32_t> drawn;
      for (int64_t i = 0; i < count; ++i) drawn.push_back(static_cast<int32_t>(static_cast<uint32_t>(dice_())) >> shift);
      return drawn;
    };
    const std::vector<int32_t> sums = words(size, c.float_sums ? 9 : 0), offset = words(cols, 2);
    std::vector<float> floats(sums.begin(), sums.end()), scale, bias;
    const bool exact = !c.float_sums || !size || dice_() % 2 == 0;
    if (!exact) floats[0] = -16777216.0f;
    for (int64_t i = 0; i < cols; ++i) {
      scale.push_back(static_cast<float>(dice_() % 1000) * 0.0123f - 5.0f);
      bias.push_back(static_cast<float>(dice_() % 1000) * 0.3f - 100.0f);
    }
    c.x = c.float_sums ? static_cast<const void*>(array<float>(kX, floats)) : array<int32_t>(kX, sums);
    c.offset = array<int32_t>(kLow, offset);
    c.scale = array<float>(kScale, scale);
    c.bias = array<float>(kHigh, bias);
    c.out = array<float>(kOut, size);
    std::atomic<bool> inexact{false};
    c.refused = &inexact;
    launch(c);
    expect(inexact.load() != exact, c, 0, "exact and inexact sums mixed up");
    for (int64_t i = 0; i < size; ++i) {
      const auto at = static_cast<size_t>(i), column = static_cast<size_t>(i % cols);
      const int32_t sum = c.float_sums ? static_cast<int32_t>(floats[at]) : sums[at];
      const auto total = static_cast<int32_t>(static_cast<uint32_t>(sum) + static_cast<uint32_t>(offset[column]));
      const float scaled = static_cast<float>(total) * scale[column];
      expect(same(read<float>(c.out, i), c.biased ? scaled + bias[column] : scaled), c, i, "another value");
    }
  }

  // One element in four is no product of a sum and a unit, and keeps its code or value.
  template <class In>
  void requantize(Case& c, int64_t) {
    const int64_t size = c.layout.size;
    c.layout.cols = 1 + dice_.one_of<int64_t>(9);
    c.channels = 1 + dice_.one_of<int64_t>(5);
    c.to_codes = dice_.heads();
    c.is_signed = dice_.heads();
    c.qmin = c.is_signed ? -128 : 0;
    c.qmax = c.qmin + 255;
    c.factor[0] = 0.013f;
    c.factor[1] = c.qmin + static_cast<double>(dice_() % 256);
    std::vector<float> unit, inverse, multiplier, x;
    for (int64_t i = 0; i < c.channels; ++i) {
      unit.push_back(static_cast<float>(1 + dice_() % 1000) * (i % 2 ? -1e-5f : 1e-5f));
      inverse.push_back(1.0f / unit.back());
      multiplier.push_back(unit.back() / static_cast<float>(c.factor[0]));
    }
    const auto channel = [&](int64_t i) { return static_cast<size_t>(i / c.layout.cols % c.channels); };
    for (int64_t i = 0; i < size; ++i) {
      const float sum = static_cast<float>(dice_() % 100000) - 50000.0f;
      x.push_back((dice_() % 4 ? sum : sum + 0.3f) * unit[channel(i)]);
    }
    c.x = array<float>(kX, x);
    c.scale = array<float>(kScale, unit);
    c.bias = array<float>(kHigh, multiplier);
    c.g = array<float>(kG, inverse);
    c.out = c.to_codes ? static_cast<void*>(array<uint8_t>(kOut, size)) : array<float>(kOut, size);
    std::memset(c.out, 0, static_cast<size_t>(c.to_codes ? size : 4 * size));
    launch(c);
    const auto scale = static_cast<float>(c.factor[0]), zero = static_cast<float>(c.factor[1]);
    for (int64_t i = 0; i < size; ++i) {
      const float u = unit[channel(i)], each = x[static_cast<size_t>(i)], sum = std::nearbyint(each * inverse[channel(i)]);
      float code = std::nearbyint(sum * multiplier[channel(i)]) + zero;
      code = std::min(std::max(code, static_cast<float>(c.qmin)), static_cast<float>(c.qmax));
      const bool is_product = sum * u == each;
      if (!c.to_codes) {
        expect(same(read<float>(c.out, i), is_product ? (code - zero) * scale : 0.0f), c, i, "another value");
      } else {
        const int got = c.is_signed ? read<int8_t>(c.out, i) : read<uint8_t>(c.out, i);
        expect(got == (is_product ? static_cast<int>(code) : 0), c, i, "another code");
      }
    }
  }

  // The result may replace x.
  template <class In>
  void factor_rows(Case& c, int64_t) {
    const int64_t rows = some_row_count(c);
    c.divides = dice_.heads();
    std::vector<float> x, factor;
    for (int64_t i = 0; i < c.layout.size; ++i) x.push_back(static_cast<float>(dice_() % 2000) * 0.37f - 370.0f);
    for (int64_t i = 0; i < rows; ++i) factor.push_back(static_cast<float>(dice_() % 1000) * 0.0123f - 5.0f);
    float* values = array<float>(kX, x);
    c.x = values;
    c.scale = array<float>(kScale, factor);
    c.out = dice_.heads() ? values : array<float>(kOut, c.layout.size);
    launch(c, rows, any_step(rows));
    for (int64_t i = 0; i < c.layout.size; ++i) {
      const float value = x[static_cast<size_t>(i)], by = factor[static_cast<size_t>(i / c.layout.cols)];
      expect(same(read<float>(c.out, i), c.divides ? value / by : value * by), c, i, "another value");
    }
  }

  template <class In>
  void sum_rows(Case& c, int64_t) {
    const int64_t rows = some_row_count(c);
    std::vector<int8_t> codes;
    for (int64_t i = 0; i < c.layout.size; ++i) codes.push_back(static_cast<int8_t>(dice_()));
    c.codes_in = array<int8_t>(kX, codes);
    c.out = array<int32_t>(kOut, rows);
    launch(c, rows, any_step(rows));
    for (int64_t row = 0; row < rows; ++row) {
      int32_t sum = 0;
      for (int64_t i = 0; i < c.layout.cols; ++i) sum += codes[static_cast<size_t>(row * c.layout.cols + i)];
      expect(read<int32_t>(c.out, row) == sum, c, row, "another sum");
    }
  }

  // Some rows that occur have an index, and some rows that do not occur; one weight in four is zero. Numbers outside
  // the range of a float are reported.
  template <class In>
  void histogram(Case& c, int64_t sets) {
    const std::vector<In> x = data_near_floats<In>(c);
    c.bits = 1 + dice_.one_of<int>(10);
    while (c.bits > 1 && (sets << c.bits) > kMostBins) --c.bits;
    const int64_t width = int64_t{1} << c.bits, size = c.layout.size;
    const std::vector<int16_t> rows = some_rows(c, x, kMostCounts / std::max<int64_t>(sets * width, 1));
    const int64_t row_count = *std::max_element(rows.begin(), rows.end()) + 1;
    c.rows = array<int16_t>(kG, rows);
    const bool weighted = size && dice_.heads();
    std::vector<int64_t> weights, counts(static_cast<size_t>(row_count * sets * width), 7);
    for (int64_t i = 0; i < size; ++i) weights.push_back(!weighted ? 1 : dice_() % 4 ? dice_.below(1 << 30) : 0);
    c.weights = weighted ? array<int64_t>(kHighSums, weights) : nullptr;
    c.counts = array<int64_t>(kOut, counts);
    std::vector<uint8_t> missed(kExponents);
    c.missed = array<uint8_t>(kMask, missed);
    const Extremes expected = place_bounds<In>(c, sets, x);
    c.refused = &refused_;
    refused_.store(false);
    bool beyond = false;
    for (int64_t i = 0; i < size; ++i) {
      const double value = static_cast<double>(value_of(x[static_cast<size_t>(i)]));
      const model::Bin bin = model::bin_of(value, c.bits);
      const int64_t row = rows[static_cast<size_t>(bin.row)], set = model::set_of(c.layout, i);
      beyond |= std::isfinite(value) && bin.row % 256 == 255;
      if (row >= 0) {
        counts[static_cast<size_t>((row * sets + set) * width + bin.place)] += weights[static_cast<size_t>(i)];
      } else if (bin.row % 256 != 255) {
        missed[static_cast<size_t>(bin.row)] = 1;
      }
    }
    count_elements(c, sets);
    if (sets == 1) expect_bounds<In>(c, expected);
    for (size_t i = 0; i < counts.size(); ++i) {
      expect(c.counts[i] == counts[i], c, static_cast<int64_t>(i), "another count");
    }
    for (int i = 0; i < kExponents; ++i) {
      expect(c.missed[i] == missed[static_cast<size_t>(i)], c, i, "a row overlooked or imagined");
    }
    expect(refused_.load() == beyond, c, 0, "a number beyond a float overlooked or imagined");
  }

  // As many bins as elements, but few sets and candidates, because the model loops over all levels.
  template <class In>
  void grid_errors(Case& c, int64_t) {
    c.sets = 1 + dice_.below(3);
    c.bins = std::min<int64_t>(c.layout.size, 300);
    c.candidates = dice_.below(4);
    c.norm = dice_.heads() ? 1 : 2;
    c.kind = dice_.heads() ? Kind::integers : Kind::codebook;
    c.qmin = -static_cast<double>(dice_.below(9));
    c.qmax = c.qmin + 1 + static_cast<double>(dice_.below(15));
    std::vector<double> lower, upper, mass, low, high, scales, zeros, levels, middles, whole;
    double edge = -8;
    for (int64_t i = 0; i < c.bins; ++i) {
      lower.push_back(edge);
      upper.push_back(edge += 16.0 / 301 * static_cast<double>(1 + dice_.below(4)) / 4);
    }
    for (int64_t i = 0; i < c.bins * c.sets; ++i) mass.push_back(static_cast<double>(dice_.below(4) * dice_.below(100)));
    for (int64_t i = 0; i < c.sets; ++i) {
      low.push_back(-8 + static_cast<double>(dice_.below(1000)) / 999);
      high.push_back(dice_() % 4 ? std::max(low.back(), edge - static_cast<double>(dice_.below(1000)) / 999) : low.back());
    }
    for (int64_t i = 0; i < c.sets * c.candidates; ++i) {
      scales.push_back(std::ldexp(1 + static_cast<double>(dice_.below(4096)) / 4096, -static_cast<int>(dice_.below(5))));
      zeros.push_back(c.qmin + static_cast<double>(dice_.below(static_cast<int64_t>(c.qmax - c.qmin) + 1)));
    }
    if (c.kind == Kind::codebook) {
      levels.push_back(-4);
      whole.push_back(0);
      for (int64_t more = dice_.below(16); more > 0; --more) {
        const double last = levels.back(), next = last + static_cast<double>(1 + dice_.below(64)) / 64;
        levels.push_back(next);
        middles.push_back((last + next) / 2);
        whole.push_back(whole.back() + model::grid_error({last, next}, static_cast<int>(c.norm), last, next, next - last));
      }
    }
    c.level_count = static_cast<int64_t>(levels.size());
    c.lower = array<double>(kX, lower);
    c.upper = array<double>(kG, upper);
    c.mass = array<double>(kSums, mass);
    c.low = array<double>(kLow, low);
    c.high = array<double>(kHigh, high);
    c.scales = array<double>(kScale, scales);
    c.zeros = array<double>(kZero, zeros);
    c.levels = array<double>(kLevels, levels);
    c.middles = array<double>(kBounds, middles);
    c.whole = array<double>(kHighSums, whole);
    c.errors = array<double>(kOut, c.sets * c.candidates);
    c.step = any_step(c.sets);
    c.scratch = array<double>(kScratch, ceil_div(c.sets, c.step) * kGridArrays * (c.bins + kGridPadding));
    launch(c, c.sets, c.step);
    for (int64_t i = 0; i < c.sets * c.candidates; ++i) {
      const size_t set = static_cast<size_t>(i / c.candidates), at = static_cast<size_t>(i);
      std::vector<double> grid;
      for (const double level : levels) grid.push_back(level * scales[at]);
      for (double code = c.qmin; levels.empty() && code <= c.qmax; ++code) grid.push_back((code - zeros[at]) * scales[at]);
      double expected = 0, all = 1;
      for (size_t bin = 0; bin < lower.size(); ++bin) {
        const double own = mass[set * lower.size() + bin];
        const double a = std::max(lower[bin], low[set]), b = std::min(upper[bin], high[set]);
        if (own != 0) expected += model::grid_error(grid, static_cast<int>(c.norm), a, b, own);
        // The kernel subtracts integrals up to the ends of a bin, and divides by its width: a narrow bin rounds more.
        all += own * std::max(1.0, a < b ? 0.01 / (b - a) : 1.0);
      }
      expect(std::fabs(c.errors[i] - expected) <= 1e-10 * all, c, i, "another error");
    }
  }

  // The reported error is that of the reported scale and zero point, and not above that of the first candidate.
  template <class In>
  void best_scales(Case& c, int64_t sets) {
    using T = Compute<In>;
    if (!c.layout.size) return;
    if (c.format) c.rule.symmetric = Symmetric::qmax;
    std::vector<In> x = data<In>(c, kX, c.x, false);
    for (In& each : x) each = std::isfinite(value_of(each)) ? each : model::nearest<In>(T(1));
    c.x = array<In>(kX, x);
    std::vector<std::vector<T>> elements(static_cast<size_t>(sets));
    for (int64_t i = 0; i < c.layout.size; ++i) {
      elements[static_cast<size_t>(model::set_of(c.layout, i))].push_back(value_of(x[static_cast<size_t>(i)]));
    }
    std::vector<T> low, high;
    size_t most = 0;
    for (const auto& set : elements) {
      low.push_back(*std::min_element(set.begin(), set.end()));
      high.push_back(*std::max_element(set.begin(), set.end()));
      most = std::max(most, set.size());
    }
    std::vector<double> factors;
    for (int i = 0; i < 40; ++i) factors.push_back(std::exp2(-i / 256.0));
    c.factors = array<double>(kG, factors);
    c.positions = static_cast<int64_t>(factors.size());
    c.coarse = dice_.heads() ? 16 : 1 + dice_.below(50);
    c.refine = dice_.heads();
    c.least = static_cast<double>(std::numeric_limits<T>::min());
    c.low = array<T>(kLow, low);
    c.high = array<T>(kHigh, high);
    c.scale_out = array<T>(kOut, sets);
    c.zero_out = array<T>(kMask, sets);
    c.errors = array<double>(kSums, sets);
    const bool columns = c.layout.block == 1 && c.layout.cols > 1;
    const bool contiguous = !columns && c.layout.size / c.layout.cols * ceil_div(c.layout.cols, c.layout.block) == sets;
    c.tile = columns ? kTile : 1;
    int64_t boxes = ceil_div(c.layout.cols, columns ? kTile : c.layout.block);
    for (int i = 0; i < c.layout.lead; ++i) boxes *= ceil_div(c.layout.axis[i].size, c.layout.axis[i].block);
    const bool in_place = contiguous && std::is_same_v<In, T> && dice_.heads();
    const int64_t numbers = in_place ? 0 : static_cast<int64_t>(most) * c.tile;
    c.room = ceil_div(numbers * static_cast<int64_t>(sizeof(T)), 8);
    c.step = any_step(boxes);
    c.scratch = array<double>(kScratch, ceil_div(boxes, c.step) * c.room);
    launch(c, boxes, c.step);
    for (int64_t set = 0; set < sets; ++set) {
      const auto& own = elements[static_cast<size_t>(set)];
      const T scale = read<T>(c.scale_out, set), first = read<T>(c.scale, set);
      const double error = squared_error(c, own, scale, read<T>(c.zero_out, set));
      expect(same(c.errors[set], error), c, set, "another error");
      expect(scale <= first, c, set, "a larger scale");
      expect(error <= squared_error(c, own, first, read<T>(c.zero, set)), c, set, "a larger error");
    }
  }

  // In the order of the kernel: 8 partial sums, added up by halves.
  template <class T>
  static double squared_error(const Case& c, const std::vector<T>& x, T scale, T zero) {
    std::vector<double> sums(8);
    for (size_t i = 0; i < x.size(); ++i) {
      const T y = model::meaning(c, model::code(c, x[i], scale, zero), zero) * scale;
      const double distance = static_cast<double>(x[i]) - static_cast<double>(y);
      sums[i % 8] += distance * distance;
    }
    return model::folded(sums, 8);
  }

  static constexpr int64_t kMostBins = 20000, kMostCounts = 300000;

  // Data with numbers just outside the range of a float.
  template <class In>
  std::vector<In> data_near_floats(Case& c) {
    std::vector<In> x = data<In>(c, kX, c.x);
    if constexpr (std::is_same_v<In, double>) {
      for (double& value : x) {
        if (std::isfinite(value) && std::fabs(value) >= 0x1p128) value = std::copysign(0x1.8p128, value);
      }
      c.x = array<double>(kX, x);
    }
    return x;
  }

  // The index of each row, or -1: at most 12 rows, and most of them occur.
  template <class In>
  std::vector<int16_t> some_rows(const Case& c, const std::vector<In>& x, int64_t most) {
    std::vector<int16_t> rows(kExponents, -1);
    const int64_t wanted = std::min<int64_t>(dice_.below(13), most);
    for (int64_t tries = 0, found = 0; tries < 4 * wanted && found < wanted; ++tries) {
      const size_t i = static_cast<size_t>(dice_.below(std::max<int64_t>(c.layout.size, 1)));
      const double value = i < x.size() && dice_() % 4 ? static_cast<double>(value_of(x[i])) : 0.0;
      const int row = value == 0 ? dice_.one_of<int>(kExponents) : model::bin_of(value, c.bits).row;
      int16_t& place = rows[static_cast<size_t>(row)];
      if (row % 256 != 255 && place < 0) place = static_cast<int16_t>(found++);
    }
    return rows;
  }

  // Divides the array into rows, and returns their number.
  int64_t some_row_count(Case& c) {
    const int64_t size = c.layout.size, rows = !size ? 0 : size % 7 == 0 ? size / 7 : size % 3 == 0 ? 3 : 1;
    c.layout.cols = rows ? size / rows : 1;
    return rows;
  }

  // Runs the kernel as the package does: a single set by elements, others by boxes.
  void count_elements(Case& c, int64_t sets) {
    c.sets = sets;
    if (sets == 1) return launch(c);
    const bool columns = c.layout.block == 1 && c.layout.cols > 1;
    c.tile = columns ? kTile : 1;
    int64_t boxes = ceil_div(c.layout.cols, columns ? kTile : c.layout.block);
    for (int i = 0; i < c.layout.lead; ++i) boxes *= ceil_div(c.layout.axis[i].size, c.layout.axis[i].block);
    launch(c, boxes, any_step(boxes));
  }
};

#define ROW(NAME)                                                                                        \
  {#NAME, &Kernels::NAME, [](Tests& tests, Case& c, int64_t sets) {                                      \
     tests.place_rules(c, sets);                                                                         \
     with_type(c.dtype, [&](auto in) { tests.NAME<decltype(in)>(c, sets); });                            \
   }},
const Tests::Row Tests::kRows[] = {DETENT_FOR_EACH_ARRAY_KERNEL(ROW)};
#undef ROW

// These do not depend on the shape of an array.
bool knows_no_shape(const Tests::Row& row) {
  for (const auto kernel :
       {&Kernels::error_sums, &Kernels::largest_error, &Kernels::pack, &Kernels::unpack, &Kernels::grid_errors,
        &Kernels::checksum, &Kernels::scale_sums, &Kernels::requantize, &Kernels::factor_rows, &Kernels::sum_rows}) {
    if (row.kernel == kernel) return true;
  }
  return false;
}

// All shapes of a length, or every third one, so that three lengths cover all shapes.
void check_length(Tests& tests, const Level& level, const Tests::Row& row, int64_t n, int threads, bool some = false) {
  const std::vector<Shape> all = shapes(n);
  for (size_t i = 0; i < all.size(); ++i) {
    const Shape& shape = all[knows_no_shape(row) ? 0 : i];
    if (!some || (static_cast<size_t>(n) + i) % 3 == 0) tests.check(level, row, shape, threads);
  }
}

}  // namespace

int main() {
  static Tests tests;
  for (int i = 0; i < kLevelCount; ++i) {
    const Level& level = kLevels[i];
    if (!level.supported()) {
      std::printf("%s: not run, this machine cannot\n", level.name);
      continue;
    }
    const int64_t before = tests.runs;
    for (const Tests::Row& row : Tests::kRows) {
      for (int64_t n = 0; n <= 300; ++n) check_length(tests, level, row, n, 0, n > 70);
      for (const int64_t n : {1023, 1025, 2049, 4097, 8200}) check_length(tests, level, row, n, 0);
      for (int threads = 0; threads <= 3; ++threads) {
        check_length(tests, level, row, 5003, threads, true);
        tests.check(level, row, {"tensor", {kLargest}, {kLargest}}, threads);
        tests.check(level, row, {"group 32", {kLargest}, {32}}, threads);
      }
    }
    std::printf("%s: %" PRId64 " runs\n", level.name, tests.runs - before);
  }
  std::printf("%" PRId64 " elements compared, %" PRId64 " differences\n", tests.elements, tests.failures);
  return tests.failures ? 1 : 0;
}
