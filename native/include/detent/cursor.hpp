// Cursor: the position of a kernel in an array, and the set of the element at that position.
// Internal linkage, as in half.hpp.
#pragma once

#include "detent/layout.hpp"

namespace {

using detent::Axis;
using detent::kMaxLead;
using detent::Layout;

// Moves through an array row by row, and keeps the set of the current element. Only the constructor divides.
class Cursor {
 public:
  Cursor(const Layout& layout, int64_t position) : layout_(layout) {
    int64_t row = layout.cols ? position / layout.cols : 0;
    col = position - row * layout.cols;
    for (int i = layout.lead - 1; i >= 0; --i) {
      const Axis& axis = layout.axis[i];
      index_[i] = row % axis.size;
      row /= axis.size;
      offset += index_[i] / axis.block * axis.stride;
    }
    set_ = offset + col / layout.block;
    left_ = layout.block - col % layout.block;
  }

  // The set of the current element, and the number of elements from here on that share it (at least 1).
  int64_t set() const { return set_; }
  int64_t run() const { return left_ < rest_of_row() ? left_ : rest_of_row(); }
  int64_t rest_of_row() const { return layout_.cols - col; }

  // Moves forward by at most run() elements, or rest_of_row() if each element has its own set.
  void advance(int64_t count) {
    col += count;
    if (col == layout_.cols) {
      next_row();
    } else if (layout_.block == 1) {
      set_ += count;
    } else if ((left_ -= count) == 0) {
      ++set_;
      left_ = layout_.block;
    }
  }

  // Number of whole blocks that begin here and end within `rest` elements of this row; 0 inside a block.
  int64_t whole_blocks(int64_t rest) const {
    if (left_ != layout_.block) return 0;
    return (rest < rest_of_row() ? rest : rest_of_row()) / layout_.block;
  }

  // Number of consecutive rows, including this one, that have the same sets.
  int64_t equal_rows() const {
    if (layout_.lead == 0) return 1;
    const Axis& axis = layout_.axis[layout_.lead - 1];
    const int64_t index = index_[layout_.lead - 1], in_block = axis.block - index % axis.block;
    return in_block < axis.size - index ? in_block : axis.size - index;
  }

  // Moves forward by whole blocks; the position must be the start of a block.
  void advance_blocks(int64_t blocks) {
    col += blocks * layout_.block;
    set_ += blocks;
    if (col == layout_.cols) next_row();
  }

  int64_t col = 0;     // column of the current element
  int64_t offset = 0;  // first set of the current row

 private:
  void next_row() {
    col = 0;
    for (int i = layout_.lead - 1; i >= 0; --i) {
      const Axis& axis = layout_.axis[i];
      const int64_t before = axis.block == 1 ? index_[i] : index_[i] / axis.block;
      if (++index_[i] < axis.size) {
        const int64_t after = axis.block == 1 ? index_[i] : index_[i] / axis.block;
        offset += (after - before) * axis.stride;
        break;
      }
      offset -= before * axis.stride;
      index_[i] = 0;
    }
    set_ = offset;
    left_ = layout_.block;
  }

  const Layout& layout_;
  int64_t set_ = 0;
  int64_t left_ = 1;
  int64_t index_[kMaxLead] = {};
};

}  // namespace
