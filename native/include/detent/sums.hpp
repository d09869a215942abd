// Sums in the fixed accumulation order, in double. The elements of a set, in C order, are divided into blocks of 1024,
// padded with +0.0. Each block is added up by halves. The block sums are padded to a power of two and added up by
// halves, too.
//
// A box contains the elements that one piece of work sums: those of a parameter set, or those of a few adjacent sets
// that have one column each. Internal linkage, as in half.hpp.
#pragma once

#include "detent/call.hpp"
#include "detent/chunks.hpp"

namespace {

using detent::kLeaf;

// Adds up `rows` rows of `width` numbers by halves into row 0, as if rows of zeros were appended up to a power of two;
// if `padded`, up to a larger power. Adding +0.0 only changes a negative zero, so adding it once is enough.
inline void fold(double* terms, int64_t rows, int64_t width, bool padded) {
  int64_t full = 1;
  while (full < rows) full *= 2;
  padded |= full != rows;
  for (int64_t half = full / 2; half; half /= 2) {
    const int64_t pairs = (rows - half) * width, step = half * width;
    for (int64_t i = 0; i < pairs; ++i) terms[i] += terms[i + step];
    rows = least(rows, half);
  }
  if (padded) {
    for (int64_t i = 0; i < width; ++i) terms[i] += 0.0;
  }
}

// The boxes of a layout, ordered by their sets. `width` is the part of the last axis in a box: the block of a set, or
// several columns if each is its own set.
class Boxes {
 public:
  Boxes(const Layout& layout, int64_t width, int64_t index) : layout_(layout), width_(width) {
    const int64_t across = (layout.cols + width - 1) / width;
    place_[layout.lead] = index % across;
    index /= across;
    for (int i = layout.lead - 1; i >= 0; --i) {
      const int64_t grid = (layout.axis[i].size + layout.axis[i].block - 1) / layout.axis[i].block;
      place_[i] = index % grid;
      index /= grid;
    }
    settle();
  }

  // The first set of the box, its number of elements, and the number of adjacent sets.
  int64_t set() const { return set_; }
  int64_t count() const { return count_; }
  int64_t width() const { return extent_[layout_.lead]; }

  void next() {
    for (int i = layout_.lead; i >= 0; --i) {
      const int64_t size = i == layout_.lead ? layout_.cols : layout_.axis[i].size;
      if (++place_[i] * step(i) < size) break;
      place_[i] = 0;
    }
    settle();
  }

  // Calls body(position in the array, count, number of elements before) for each contiguous part of the elements
  // [first, last) of the box.
  template <class Body>
  void runs(int64_t first, int64_t last, Body body) const {
    int64_t index[kMaxLead], rest = first / width(), col = first % width();
    int64_t row = 0, pitch = layout_.cols;
    int64_t pitches[kMaxLead];
    for (int i = layout_.lead - 1; i >= 0; --i) {
      index[i] = rest % extent_[i];
      rest /= extent_[i];
      row += (place_[i] * layout_.axis[i].block + index[i]) * pitch;
      pitches[i] = pitch;
      pitch *= layout_.axis[i].size;
    }
    const int64_t start = place_[layout_.lead] * width_;
    for (int64_t at = first; at < last;) {
      const int64_t count = least(width() - col, last - at);
      body(row + start + col, count, at - first);
      at += count;
      col = 0;
      for (int i = layout_.lead - 1; i >= 0; --i) {
        row += pitches[i];
        if (++index[i] < extent_[i]) break;
        row -= extent_[i] * pitches[i];
        index[i] = 0;
      }
    }
  }

 private:
  int64_t step(int i) const { return i == layout_.lead ? width_ : layout_.axis[i].block; }

  void settle() {
    const int last = layout_.lead;
    const int64_t start = place_[last] * width_;
    extent_[last] = least(width_, layout_.cols - start);
    count_ = extent_[last];
    set_ = start / layout_.block;
    for (int i = 0; i < last; ++i) {
      extent_[i] = least(layout_.axis[i].block, layout_.axis[i].size - place_[i] * layout_.axis[i].block);
      count_ *= extent_[i];
      set_ += place_[i] * layout_.axis[i].stride;
    }
  }

  const Layout& layout_;
  int64_t width_, set_ = 0, count_ = 0;
  int64_t place_[kMaxLead + 1], extent_[kMaxLead + 1];
};

}  // namespace
