// Layout: the division of a C-contiguous array into parameter sets, reduced to rows and columns.
//
// Adjacent axes are merged if a set spans both entirely, or if each index of both has its own set. The result is a last
// axis of `cols` elements, where `block` consecutive elements share a set, and at most kMaxLead leading axes, each with
// its own block. Element (r, c) belongs to set `row_offset(r) + c / block`.
#pragma once

#include <cstdint>

namespace detent {

constexpr int kMaxLead = 8;

struct Axis {
  int64_t size;    // indices along the axis
  int64_t block;   // consecutive indices that share a set
  int64_t stride;  // sets from one block to the next
};

struct Layout {
  int64_t size = 0;   // elements: rows * cols
  int64_t cols = 1;   // elements of the last axis
  int64_t block = 1;  // consecutive elements of the last axis that share a set; cols if all do
  int lead = 0;
  Axis axis[kMaxLead] = {};
};

}  // namespace detent
