// The arithmetic of swapper/codecs/reference.py on runs of memory. Each kernels_<isa>.cpp includes it once
// and is compiled for its instruction set: plain loops that the compiler vectorizes, so that there is one
// source for all. Everything is in an unnamed namespace and no function of the standard library is
// instantiated: the linker must not take one file's copy for all. Owns nothing.
//
// [Note: the same bits] Each operation on floats is rounded by itself (-ffp-contract=off), in the order of
// the reference; division and square root are correctly rounded in every instruction set. Adding 1.5 * 2^23
// leaves a whole number, ties to even, in the lowest bits of the sum: no instruction for rounding is needed.
// Reductions are of integers, whose order does not matter.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "codecs/kernels.h"

namespace swapper {
namespace {

using std::int16_t;
using std::int32_t;
using std::int8_t;
using std::size_t;
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;

constexpr uint32_t kInfinity = 0x7F800000u;
constexpr uint32_t kMagnitude = 0x7FFFFFFFu;
constexpr uint16_t kNan = 0x7FC0;  // the one NaN that is written
constexpr float kWhole = 12582912.0f;
constexpr float kTopRoot = 254.002f;

inline uint32_t bits_of(float value) {
  return __builtin_bit_cast(uint32_t, value);
}

inline float float_of(uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}

inline float widened(uint16_t word) {
  return float_of(static_cast<uint32_t>(word) << 16);
}

// The upper 16 bits, rounded to nearest, ties to even; NaNs aside.
inline uint32_t nearest(uint32_t bits) {
  return (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
}

inline uint16_t nearest_word(uint32_t bits) {
  return (bits & kMagnitude) > kInfinity ? kNan : static_cast<uint16_t>(nearest(bits));
}

// A whole number from -127 to 255 in the lowest bits.
inline uint32_t rounded(float value) {
  return bits_of(value + kWhole);
}

inline uint32_t clamp(uint32_t value, uint32_t least, uint32_t most) {
  return value < least ? least : value > most ? most : value;
}

// The size of a whole group, which the compiler knows.
struct WholeGroup {
  constexpr operator size_t() const { return kGroup; }
};

// Calls group(begin, size) for each group of a run.
template <typename Group>
inline void for_groups(size_t count, Group group) {
  size_t begin = 0;
  for (; begin + kGroup <= count; begin += kGroup) group(begin, WholeGroup{});
  if (begin < count) group(begin, count - begin);
}

// --- fp32 and bf16

uint64_t encode_fp32(const float* value, size_t count, const Parts& parts, const uint16_t*) {
  memcpy(parts.at[0], value, count * sizeof(float));
  return 0;
}

void decode_fp32(const Parts& parts, size_t count, float* value, const uint16_t*) {
  memcpy(value, parts.at[0], count * sizeof(float));
}

void round_to_bf16(const float* __restrict value, size_t count, uint16_t* __restrict out) {
  for (size_t i = 0; i < count; ++i) out[i] = nearest_word(bits_of(value[i]));
}

uint64_t encode_bf16(const float* __restrict value, size_t count, const Parts& parts, const uint16_t*) {
  uint16_t* __restrict out = static_cast<uint16_t*>(parts.at[0]);
  uint64_t unheld = 0;
  for_groups(count, [&](size_t begin, auto size) {
    uint32_t infinite = 0;
    for (size_t i = begin; i < begin + size; ++i) {
      const uint32_t bits = bits_of(value[i]);
      const uint16_t word = nearest_word(bits);
      infinite += ((word & 0x7FFFu) == kInfinity >> 16) & ((bits & kMagnitude) < kInfinity);
      out[i] = word;
    }
    unheld += infinite;
  });
  return unheld;
}

void decode_bf16(const Parts& parts, size_t count, float* __restrict value, const uint16_t*) {
  const uint16_t* __restrict words = static_cast<const uint16_t*>(parts.at[0]);
  for (size_t i = 0; i < count; ++i) value[i] = widened(words[i]);
}

// --- the parameter and what is missing to the master

// The parameter of a value as it is given, or rounded now and written.
struct GivenParameter {
  const uint16_t* words;

  uint32_t word(size_t i, uint32_t) const { return words[i]; }
  static uint32_t is_unheld(uint32_t bits, uint32_t word) {
    const uint32_t is_nan = (bits & kMagnitude) > kInfinity;
    const uint32_t is_other = nearest(bits) != word;
    const uint32_t is_number = (word & 0x7FFFu) <= kInfinity >> 16;
    return (is_nan & is_number) | ((is_nan ^ 1u) & is_other);
  }
};

struct RoundedParameter {
  uint16_t* words;

  uint32_t word(size_t i, uint32_t bits) const { return words[i] = nearest_word(bits); }
  static uint32_t is_unheld(uint32_t, uint32_t) { return 0; }
};

template <typename Parameter, typename Word>
uint64_t encode_split(const float* __restrict value, size_t count, const Parts& parts, Word* words) {
  const Parameter parameter{words};
  uint16_t* __restrict low = static_cast<uint16_t*>(parts.at[0]);
  uint8_t* __restrict ties = static_cast<uint8_t*>(parts.at[1]);
  uint64_t unheld = 0;
  for_groups(count, [&](size_t begin, auto size) {
    uint32_t other = 0, tie_count = 0;
    for (size_t i = begin; i < begin + size; ++i) {
      const uint32_t bits = bits_of(value[i]), word = parameter.word(i, bits);
      other += Parameter::is_unheld(bits, word);
      low[i] = static_cast<uint16_t>((bits & kMagnitude) > kInfinity ? 0u : bits);
      tie_count += (bits ^ (word << 16)) == 0x8000u;  // of NaNs too
    }
    unheld += other;
    uint32_t flags = 0;
    for (size_t i = 0; tie_count != 0 && i < size; ++i) {
      const bool is_cut = (bits_of(value[begin + i]) >> 16) == words[begin + i];
      flags |= static_cast<uint32_t>(is_cut && low[begin + i] == 0x8000u) << i;
    }
    memcpy(ties + begin / 8, &flags, (size + 7) / 8);
  });
  return unheld;
}

void decode_split(const Parts& parts, size_t count, float* __restrict value,
                  const uint16_t* __restrict parameter) {
  const int16_t* __restrict low = static_cast<const int16_t*>(parts.at[0]);
  const uint8_t* __restrict ties = static_cast<const uint8_t*>(parts.at[1]);
  for_groups(count, [&](size_t begin, auto size) {
    uint32_t flags = 0;
    memcpy(&flags, ties + begin / 8, (size + 7) / 8);
    for (size_t i = begin; i < begin + size; ++i) {
      value[i] =
          float_of((static_cast<uint32_t>(parameter[i]) << 16) + static_cast<uint32_t>(int32_t{low[i]}));
    }
    for (size_t i = 0; flags != 0 && i < size; ++i) {
      value[begin + i] = float_of(bits_of(value[begin + i]) + (((flags >> i) & 1u) << 16));
    }
  });
}

template <typename Parameter, typename Word>
uint64_t encode_master24(const float* __restrict value, size_t count, const Parts& parts, Word* words) {
  const Parameter parameter{words};
  int8_t* __restrict rhos = static_cast<int8_t*>(parts.at[0]);
  uint64_t unheld = 0;
  for_groups(count, [&](size_t begin, auto size) {
    uint32_t other = 0;
    for (size_t i = begin; i < begin + size; ++i) {
      const uint32_t bits = bits_of(value[i]), word = parameter.word(i, bits), high = word << 16;
      const int32_t below = static_cast<int32_t>(bits - high);
      int32_t rho = static_cast<int32_t>(static_cast<uint32_t>(below) + 127u +
                                         (static_cast<uint32_t>(below >> 8) & 1u)) >>
                    8;
      rho = rho < -127 ? -127 : rho > 127 ? 127 : rho;
      const uint32_t magnitude = bits & kMagnitude;
      rho = magnitude > kInfinity ? 0 : rho;
      const uint32_t decoded = (high + static_cast<uint32_t>(rho) * 256u) & kMagnitude;
      const uint32_t is_overflown = (magnitude < kInfinity) & (decoded == kInfinity);
      other += Parameter::is_unheld(bits, word) | is_overflown;
      rhos[i] = static_cast<int8_t>(rho);
    }
    unheld += other;
  });
  return unheld;
}

void decode_master24(const Parts& parts, size_t count, float* __restrict value,
                     const uint16_t* __restrict parameter) {
  const int8_t* __restrict rhos = static_cast<const int8_t*>(parts.at[0]);
  for (size_t i = 0; i < count; ++i) {
    value[i] = float_of((static_cast<uint32_t>(parameter[i]) << 16) + static_cast<uint32_t>(rhos[i] * 256));
  }
}

// --- 8 bits and a scale

// Codes of a group that cannot be held: it decodes to NaN.
inline void write_nan(void* code, size_t size, uint16_t* scale) {
  memset(code, 0, size);
  *scale = kNan;
}

// Codes one group of kGroup values; returns how many are not finite.
inline uint32_t encode_moments(const float* __restrict value, int8_t* __restrict code, uint16_t* scale) {
  int32_t largest = 0;
  for (size_t i = 0; i < kGroup; ++i) {
    const int32_t size = static_cast<int32_t>(bits_of(value[i]) & kMagnitude);
    largest = size > largest ? size : largest;
  }
  if (largest >= static_cast<int32_t>(kInfinity)) {
    write_nan(code, kGroup, scale);
    uint32_t bad = 0;
    for (size_t i = 0; i < kGroup; ++i) bad += (bits_of(value[i]) & kMagnitude) >= kInfinity;
    return bad;
  }
  const bool is_zero = largest < 0x8000;
  const uint32_t word = is_zero ? 0u : clamp(nearest(static_cast<uint32_t>(largest)), 0x0080, 0x7F7F);
  const float inverse = 1.0f / (is_zero ? 1.0f : float_of(word << 16));
  for (size_t i = 0; i < kGroup; ++i) {
    const float x = value[i] * inverse;
    code[i] = static_cast<int8_t>(rounded(x * 254.0f / (__builtin_fabsf(x) + 1.0f)));
  }
  *scale = static_cast<uint16_t>(word);
  return 0;
}

// Codes one group of kGroup values; returns how many are not finite, or negative.
inline uint32_t encode_variances(const float* __restrict value, uint8_t* __restrict code, uint16_t* scale) {
  uint32_t largest = 0;
  for (size_t i = 0; i < kGroup; ++i) {
    const uint32_t size =
        bits_of(value[i] + 0.0f);  // -0 becomes 0; a negative number is larger than infinity
    largest = size > largest ? size : largest;
  }
  if (largest >= kInfinity) {
    write_nan(code, kGroup, scale);
    uint32_t bad = 0;
    for (size_t i = 0; i < kGroup; ++i) bad += bits_of(value[i] + 0.0f) >= kInfinity;
    return bad;
  }
  const bool is_zero = largest == 0;
  const uint32_t root = bits_of(__builtin_sqrtf(float_of(largest)));
  const uint32_t word = is_zero ? 0u : clamp(nearest(root), 0x2400, 0x5F7F);
  const float inverse = 255.0f / (is_zero ? 1.0f : float_of(word << 16));
  for (size_t i = 0; i < kGroup; ++i) {
    const float z = __builtin_sqrtf(value[i]) * inverse;
    const uint32_t near = rounded(z > kTopRoot ? 255.0f : z) & 0xFFu;
    const uint32_t magnitude = bits_of(value[i]) & kMagnitude;
    const uint32_t least = magnitude < 1u ? magnitude : 1u;
    code[i] = static_cast<uint8_t>(near > least ? near : least);
  }
  *scale = static_cast<uint16_t>(word);
  return 0;
}

template <typename Code, uint32_t (*encode_group)(const float*, Code*, uint16_t*)>
uint64_t encode_groups(const float* value, size_t count, const Parts& parts, const uint16_t*) {
  Code* code = static_cast<Code*>(parts.at[0]);
  uint16_t* scale = static_cast<uint16_t*>(parts.at[1]);
  uint64_t unheld = 0;
  for (; count >= kGroup; count -= kGroup, value += kGroup, code += kGroup, ++scale) {
    unheld += encode_group(value, code, scale);
  }
  if (count == 0) return unheld;
  float last[kGroup] = {};
  Code last_code[kGroup];
  memcpy(last, value, count * sizeof(float));
  unheld += encode_group(last, last_code, scale);
  memcpy(code, last_code, count);
  return unheld;
}

void decode_moment8(const Parts& parts, size_t count, float* __restrict value, const uint16_t*) {
  const int8_t* __restrict code = static_cast<const int8_t*>(parts.at[0]);
  const uint16_t* __restrict scales = static_cast<const uint16_t*>(parts.at[1]);
  for_groups(count, [&](size_t begin, auto size) {
    const float scale = widened(scales[begin / kGroup]);
    for (size_t i = begin; i < begin + size; ++i) {
      const float x = static_cast<float>(code[i]);
      value[i] = x / (254.0f - __builtin_fabsf(x)) * scale;
    }
  });
}

void decode_variance8(const Parts& parts, size_t count, float* __restrict value, const uint16_t*) {
  const uint8_t* __restrict code = static_cast<const uint8_t*>(parts.at[0]);
  const uint16_t* __restrict scales = static_cast<const uint16_t*>(parts.at[1]);
  for_groups(count, [&](size_t begin, auto size) {
    const float unit = widened(scales[begin / kGroup]) / 255.0f;
    for (size_t i = begin; i < begin + size; ++i) {
      const float root = static_cast<float>(code[i]) * unit;
      value[i] = root * root;
    }
  });
}

// --- AdamW

template <typename Gradient>
inline void update(float* __restrict master, float* __restrict exp_avg, float* __restrict exp_avg_sq,
                   size_t count, const AdamWNumbers& numbers, Gradient gradient) {
  const AdamWNumbers n = numbers;
  for (size_t i = 0; i < count; ++i) {
    const float g = gradient(i) * n.factor;
    const float m = exp_avg[i] * n.beta1 + g * n.rest1;
    const float v = exp_avg_sq[i] * n.beta2 + g * g * n.rest2;
    const float denominator = __builtin_sqrtf(v) * n.root_scale + n.eps;
    master[i] = master[i] * n.decay - m / denominator * n.step_size;
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
  }
}

void update_adamw(float* master, float* exp_avg, float* exp_avg_sq, const void* gradient,
                  bool is_gradient_bf16, size_t count, const AdamWNumbers& numbers) {
  const uint16_t* __restrict words = static_cast<const uint16_t*>(gradient);
  const float* __restrict floats = static_cast<const float*>(gradient);
  if (is_gradient_bf16) {
    update(master, exp_avg, exp_avg_sq, count, numbers, [&](size_t i) { return widened(words[i]); });
  } else {
    update(master, exp_avg, exp_avg_sq, count, numbers, [&](size_t i) { return floats[i]; });
  }
}

constexpr Kernels kernels_of(const char* isa) {
  constexpr auto given_split = encode_split<GivenParameter, const uint16_t>;
  constexpr auto given_master24 = encode_master24<GivenParameter, const uint16_t>;
  constexpr auto moments = encode_groups<int8_t, encode_moments>;
  constexpr auto variances = encode_groups<uint8_t, encode_variances>;
  return {isa,
          {{"fp32", 1, {4, 0}, {1, 1}, encode_fp32, decode_fp32, nullptr},
           {"bf16", 1, {2, 0}, {1, 1}, encode_bf16, decode_bf16, nullptr},
           {"split", 2, {2, 1}, {1, 8}, given_split, decode_split, encode_split<RoundedParameter, uint16_t>},
           {"master24",
            1,
            {1, 0},
            {1, 1},
            given_master24,
            decode_master24,
            encode_master24<RoundedParameter, uint16_t>},
           {"moment8", 2, {1, 2}, {1, kGroup}, moments, decode_moment8, nullptr},
           {"variance8", 2, {1, 2}, {1, kGroup}, variances, decode_variance8, nullptr}},
          update_adamw,
          round_to_bf16};
}

}  // namespace
}  // namespace swapper
