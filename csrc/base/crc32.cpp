// Computes CRC-32 by carry-less multiplication; tables serve the ends of the buffer and other processors. The
// method is that of Intel's paper "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ" (Gopal et
// al., 2009). All constants are derived below from the polynomial, at compile time. Owns the tables.
//
// [Note: folding] A message is a polynomial over GF(2); its CRC is the remainder modulo P. In the
// bit-reflected order that zip uses, a 128-bit accumulator with low half L and high half H moves forward over
// D bits of message when it is replaced with L * (x^(D+32) mod P) + H * (x^(D-32) mod P), which is congruent
// modulo P. (The products of reflected operands come out one bit low, hence the constants' shift by one.) So
// two multiplications absorb sixteen bytes. Several independent accumulators hide the latency. The last
// sixteen bytes are congruent to the whole message, and the tables turn them into its CRC.
#include "base/crc32.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace swapper {
namespace {

constexpr std::uint32_t kPolynomial = 0xEDB88320u;  // x^32 + x^26 + ... + 1 without x^32, bit-reflected
constexpr std::uint32_t kOne = 0x80000000u;         // x^0 in reflected order

// a * b modulo P, both reflected.
constexpr std::uint32_t multiply_modulo(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (std::uint32_t bit = kOne; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b & 1) ? (b >> 1) ^ kPolynomial : b >> 1;  // b *= x
  }
  return product;
}

// kSquares[n] is x^(2^n) modulo P.
constexpr auto kSquares = [] {
  std::array<std::uint32_t, 64> squares{};
  squares[0] = kOne >> 1;
  for (std::size_t n = 1; n < squares.size(); ++n) {
    squares[n] = multiply_modulo(squares[n - 1], squares[n - 1]);
  }
  return squares;
}();

// x^exponent modulo P.
constexpr std::uint32_t power_modulo(std::uint64_t exponent) {
  std::uint32_t power = kOne;
  for (std::size_t n = 0; exponent != 0; ++n, exponent >>= 1) {
    if (exponent & 1) power = multiply_modulo(power, kSquares[n]);
  }
  return power;
}

using Tables = std::array<std::array<std::uint32_t, 256>, 8>;
constexpr Tables kTables = [] {
  Tables tables{};
  for (std::uint32_t n = 0; n < 256; ++n) {
    std::uint32_t crc = n;
    for (int k = 0; k < 8; ++k) crc = (crc & 1) ? (crc >> 1) ^ kPolynomial : crc >> 1;
    tables[0][n] = crc;
  }
  for (std::size_t k = 1; k < 8; ++k) {
    for (std::size_t n = 0; n < 256; ++n) {
      tables[k][n] = (tables[k - 1][n] >> 8) ^ tables[0][tables[k - 1][n] & 0xFF];
    }
  }
  return tables;
}();

// Slicing by eight, on the register itself (no complement before or after).
std::uint32_t update_by_table(std::uint32_t crc, const unsigned char* data, std::size_t nbytes) {
  for (; nbytes >= 8; data += 8, nbytes -= 8) {
    const std::uint32_t low = crc ^ (std::uint32_t{data[0]} | std::uint32_t{data[1]} << 8 |
                                     std::uint32_t{data[2]} << 16 | std::uint32_t{data[3]} << 24);
    crc = kTables[7][low & 0xFF] ^ kTables[6][(low >> 8) & 0xFF] ^ kTables[5][(low >> 16) & 0xFF] ^
          kTables[4][low >> 24] ^ kTables[3][data[4]] ^ kTables[2][data[5]] ^ kTables[1][data[6]] ^
          kTables[0][data[7]];
  }
  for (; nbytes != 0; ++data, --nbytes) crc = (crc >> 8) ^ kTables[0][(crc ^ *data) & 0xFF];
  return crc;
}

#if defined(__x86_64__)

struct FoldConstants {
  std::uint64_t low, high;
};

// See [Note: folding]: the factors that move an accumulator over `bits` of message.
constexpr FoldConstants fold_over(std::uint64_t bits) {
  return {std::uint64_t{power_modulo(bits + 32)} << 1, std::uint64_t{power_modulo(bits - 32)} << 1};
}

// Held against the numbers printed in the paper.
static_assert(fold_over(512).low == 0x154442bd4 && fold_over(512).high == 0x1c6e41596);
static_assert(fold_over(128).low == 0x1751997d0 && fold_over(128).high == 0x0ccaa009e);

#define SWAPPER_CLMUL __attribute__((target("pclmul,sse4.1")))

constexpr std::size_t kLanes = 8;
constexpr std::size_t kStrideBytes = kLanes * sizeof(__m128i);

SWAPPER_CLMUL inline __m128i load(const unsigned char* data) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
}

SWAPPER_CLMUL inline __m128i fold(__m128i accumulator, __m128i constants, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(accumulator, constants, 0x00);
  const __m128i high = _mm_clmulepi64_si128(accumulator, constants, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

SWAPPER_CLMUL inline __m128i constants_for(FoldConstants constants) {
  return _mm_set_epi64x(static_cast<long long>(constants.high), static_cast<long long>(constants.low));
}

SWAPPER_CLMUL std::uint32_t update_by_clmul(std::uint32_t crc, const unsigned char* data,
                                            std::size_t nbytes) {
  if (nbytes < 2 * kStrideBytes) return update_by_table(crc, data, nbytes);
  __m128i lanes[kLanes];
  for (std::size_t lane = 0; lane < kLanes; ++lane) lanes[lane] = load(data + 16 * lane);
  lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(static_cast<int>(crc)));
  const __m128i stride = constants_for(fold_over(8 * kStrideBytes));
  for (data += kStrideBytes, nbytes -= kStrideBytes; nbytes >= kStrideBytes;
       data += kStrideBytes, nbytes -= kStrideBytes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] = fold(lanes[lane], stride, load(data + 16 * lane));
    }
  }
  const __m128i step = constants_for(fold_over(128));
  __m128i all = lanes[0];
  for (std::size_t lane = 1; lane < kLanes; ++lane) all = fold(all, step, lanes[lane]);
  unsigned char rest[16];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(rest), all);
  return update_by_table(update_by_table(0, rest, sizeof rest), data, nbytes);
}

// The same with four of those multiplications in one instruction (AVX-512, since Ice Lake and Zen 4): on
// memory that is not in the cache 30 GB/s a core, where the narrow one makes 16.
#define SWAPPER_WIDE_CLMUL __attribute__((target("vpclmulqdq,avx512f,avx512vl,pclmul,sse4.1")))

constexpr std::size_t kWideLanes = 4;
constexpr std::size_t kWideStrideBytes = kWideLanes * sizeof(__m512i);

SWAPPER_WIDE_CLMUL inline __m512i fold_wide(__m512i accumulator, __m512i constants, __m512i next) {
  constexpr int kXorOfThree = 0x96;
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(accumulator, constants, 0x00),
                                   _mm512_clmulepi64_epi128(accumulator, constants, 0x11), next, kXorOfThree);
}

SWAPPER_WIDE_CLMUL inline __m512i wide_constants_for(FoldConstants constants) {
  return _mm512_maskz_broadcast_i32x4(0xFFFF,
                                      constants_for(constants));  // unmasked, g++ 12 warns of its header
}

SWAPPER_WIDE_CLMUL std::uint32_t update_by_wide_clmul(std::uint32_t crc, const unsigned char* data,
                                                      std::size_t nbytes) {
  if (nbytes < 2 * kWideStrideBytes) return update_by_clmul(crc, data, nbytes);
  __m512i lanes[kWideLanes];
  for (std::size_t lane = 0; lane < kWideLanes; ++lane) lanes[lane] = _mm512_loadu_si512(data + 64 * lane);
  const __m512i begin = _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(crc)));
  lanes[0] = _mm512_xor_si512(lanes[0], begin);
  const __m512i stride = wide_constants_for(fold_over(8 * kWideStrideBytes));
  for (data += kWideStrideBytes, nbytes -= kWideStrideBytes; nbytes >= kWideStrideBytes;
       data += kWideStrideBytes, nbytes -= kWideStrideBytes) {
    for (std::size_t lane = 0; lane < kWideLanes; ++lane) {
      lanes[lane] = fold_wide(lanes[lane], stride, _mm512_loadu_si512(data + 64 * lane));
    }
  }
  const __m512i step = wide_constants_for(fold_over(8 * sizeof(__m512i)));
  __m512i all = lanes[0];
  for (std::size_t lane = 1; lane < kWideLanes; ++lane) all = fold_wide(all, step, lanes[lane]);
  unsigned char rest[sizeof all];
  _mm512_storeu_si512(rest, all);
  _mm256_zeroupper();  // or the narrow instructions that follow, here and elsewhere, would run at half speed
  return update_by_clmul(update_by_table(0, rest, sizeof rest), data, nbytes);
}

#endif

struct Methods {
  std::array<Crc32Method, 3> method{};
  std::size_t count = 0;

  Methods() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool narrow = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
    const bool wide = __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512vl");
    if (narrow && wide) method[count++] = {"vpclmulqdq", update_by_wide_clmul};
    if (narrow) method[count++] = {"pclmulqdq", update_by_clmul};
#endif
    method[count++] = {"table", update_by_table};
  }
};

const Methods& methods() {
  static const Methods found;
  return found;
}

}  // namespace

std::span<const Crc32Method> crc32_methods() {
  return {methods().method.data(), methods().count};
}

std::uint32_t crc32(const void* data, std::size_t nbytes, std::uint32_t value) {
  return ~methods().method[0].update(~value, static_cast<const unsigned char*>(data), nbytes);
}

std::uint32_t crc32_combine(std::uint32_t a, std::uint32_t b, std::uint64_t nbytes_b) {
  return multiply_modulo(power_modulo(8 * nbytes_b), a) ^ b;
}

}  // namespace swapper
