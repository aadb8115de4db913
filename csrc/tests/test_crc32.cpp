// Compares every CRC-32 implementation that this processor can run with a bitwise one. Owns nothing.
#include <random>
#include <vector>

#include "base/crc32.h"
#include "tests/testing.h"

namespace swapper {
namespace {

std::uint32_t bit_by_bit(std::uint32_t crc, const unsigned char* data, std::size_t nbytes) {
  for (; nbytes != 0; ++data, --nbytes) {
    crc ^= *data;
    for (int k = 0; k < 8; ++k) crc = (crc & 1) ? (crc >> 1) ^ 0xEDB88320u : crc >> 1;
  }
  return crc;
}

TEST(all_methods_agree) {
  std::mt19937 random(1);
  std::vector<unsigned char> data(5000);
  for (auto& byte : data) byte = static_cast<unsigned char>(random());
  for (const Crc32Method& method : crc32_methods()) {
    std::printf("  %s\n", method.name);
    for (int n = 0; n < 3000; ++n) {
      const std::size_t begin = random() % 70, nbytes = random() % (n % 2 ? 600 : data.size() - 70);
      const std::uint32_t crc = random();
      EXPECT(method.update(crc, &data[begin], nbytes) == bit_by_bit(crc, &data[begin], nbytes));
    }
  }
}

TEST(the_known_check_value) {
  EXPECT(crc32("123456789", 9) == 0xCBF43926u);
  EXPECT(crc32_combine(crc32("12345", 5), crc32("6789", 4), 4) == 0xCBF43926u);
  EXPECT(crc32("", 0) == 0);
}

}  // namespace
}  // namespace swapper
