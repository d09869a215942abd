// Packing and unpacking of codes of 1 to 8 bits; bits.hpp defines the order.
#include "detent/bits.hpp"
#include "detent/call.hpp"

namespace detent::DETENT_LEVEL {

void pack(const Call& call, int64_t begin, int64_t end) {
  pack_bits(static_cast<const uint8_t*>(call.codes_in) + begin, static_cast<uint8_t*>(call.out) + begin / 8 * call.bits,
            end - begin, call.bits);
}

void unpack(const Call& call, int64_t begin, int64_t end) {
  unpack_bits(static_cast<const uint8_t*>(call.codes_in) + begin / 8 * call.bits, static_cast<uint8_t*>(call.out) + begin,
              end - begin, call.bits, call.is_signed);
}

}  // namespace detent::DETENT_LEVEL
