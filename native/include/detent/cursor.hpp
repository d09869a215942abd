// Cursor: the position of a kernel in an array, and the set of the element there.
// Internal linkage, as in half.hpp.
#pragma once

#include "detent/layout.hpp"

namespace {

using detent::Axis;
using detent::kMaxLead;
using detent::Layout;

// The position of a kernel in an array: row by row, with the offset of the row's first set.
class Cursor {
 public:
  Cursor(const Layout& layout, int64_t position) : layout_(layout), row_(position / layout.cols) {
    col = position - row_ * layout.cols;
    int64_t rest = row_;
    offset = 0;
    for (int i = layout.lead - 1; i >= 0; --i) {
      const Axis& axis = layout.axis[i];
      index_[i] = rest % axis.size;
      rest /= axis.size;
      offset += index_[i] / axis.block * axis.stride;
    }
  }

  // The set of the current element, and how many elements from here on share it (at least 1).
  int64_t set() const { return offset + col / layout_.block; }
  int64_t run() const {
    const int64_t end = (col / layout_.block + 1) * layout_.block;
    return (end < layout_.cols ? end : layout_.cols) - col;
  }
  int64_t rest_of_row() const { return layout_.cols - col; }

  void advance(int64_t count) {  // never beyond the end of the row
    col += count;
    if (col == layout_.cols) next_row();
  }

  int64_t col = 0;     // column of the current element
  int64_t offset = 0;  // first set of the current row

 private:
  void next_row() {
    col = 0;
    ++row_;
    for (int i = layout_.lead - 1; i >= 0; --i) {
      const Axis& axis = layout_.axis[i];
      const int64_t before = index_[i] / axis.block;
      if (++index_[i] < axis.size) {
        offset += (index_[i] / axis.block - before) * axis.stride;
        return;
      }
      offset -= before * axis.stride;
      index_[i] = 0;
    }
  }

  const Layout& layout_;
  int64_t row_ = 0;
  int64_t index_[kMaxLead] = {};
};

}  // namespace
