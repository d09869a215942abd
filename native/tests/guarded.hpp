// Guarded: memory between two inaccessible pages, so that an access one byte outside of an array crashes.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace testing {

enum class Side { first, last };  // the guard page next to the array

class Guarded {
 public:
  explicit Guarded(size_t capacity = 3 << 20) {
    page_ = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    size_ = (capacity + 2 * kMargin + page_ - 1) / page_ * page_;
    void* all = mmap(nullptr, size_ + 2 * page_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) fail("mmap");
    begin_ = static_cast<uint8_t*>(all) + page_;
    if (mprotect(begin_, size_, PROT_READ | PROT_WRITE) != 0) fail("mprotect");
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  ~Guarded() { munmap(begin_ - page_, size_ + 2 * page_); }

  // An array of this many bytes next to a guard page; the bytes on the other side of the array have a pattern.
  uint8_t* place(size_t bytes, Side side) {
    if (bytes + kMargin > size_) fail("a buffer that small for the case");
    array_ = side == Side::last ? begin_ + size_ - bytes : begin_;
    margin_ = side == Side::last ? array_ - kMargin : array_ + bytes;
    std::memset(margin_, kPattern, kMargin);
    std::memset(array_, kPattern, bytes);
    return array_;
  }

  // Whether the pattern on the side without a guard page is unchanged; true before an array is placed.
  bool intact() const {
    for (size_t i = 0; margin_ && i < kMargin; ++i) {
      if (margin_[i] != kPattern) return false;
    }
    return true;
  }

 private:
  static constexpr size_t kMargin = 128;
  static constexpr uint8_t kPattern = 0xA5;

  [[noreturn]] static void fail(const char* what) {
    std::fprintf(stderr, "cannot prepare guarded memory: %s\n", what);
    std::exit(2);
  }

  size_t page_ = 0, size_ = 0;
  uint8_t *begin_ = nullptr, *array_ = nullptr, *margin_ = nullptr;
};

}  // namespace testing
