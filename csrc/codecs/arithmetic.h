// The arithmetic of tests/codec_reference.py on runs of memory. Each kernels_<isa>.cpp includes it once
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
constexpr int32_t kNearInfinity = 0x7F7F0000;  // bf16's largest
constexpr uint16_t kNan = 0x7FC0;              // the one NaN that is written
constexpr uint32_t kOne = 0x3F800000u;
constexpr float kWhole = 12582912.0f;
constexpr size_t kRunGroups = 32;  // whose scales are found together

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

void widen_bf16(const uint16_t* __restrict words, size_t count, float* __restrict out) {
  for (size_t i = 0; i < count; ++i) out[i] = widened(words[i]);
}

void round_to_bf16(const float* __restrict value, size_t count, uint16_t* __restrict out) {
  for (size_t i = 0; i < count; ++i) out[i] = nearest_word(bits_of(value[i]));
}

// fp16 by operations on floats that are exact, or round as the conversion does. After M. Dukhan's FP16
// library.
void widen_fp16(const uint16_t* __restrict words, size_t count, float* __restrict out) {
  for (size_t i = 0; i < count; ++i) {
    const uint32_t word = words[i], magnitude = word & 0x7FFFu;
    const float normal = float_of((magnitude << 13) + (0xE0u << 23)) * 0x1p-112f;  // infinities and NaNs too
    const float subnormal = float_of(magnitude | (126u << 23)) - 0.5f;
    const uint32_t bits = magnitude < 0x0400u ? bits_of(subnormal) : bits_of(normal);
    out[i] = float_of(bits | (word & 0x8000u) << 16);
  }
}

void round_to_fp16(const float* __restrict value, size_t count, uint16_t* __restrict out) {
  for (size_t i = 0; i < count; ++i) {
    const uint32_t bits = bits_of(value[i]), magnitude = bits & kMagnitude;
    const float four_times = float_of(magnitude) * 0x1p+112f * 0x1p-110f;  // infinite from 2^16 on
    // A sum with a power of two rounds behind the last of fp16's bits.
    uint32_t bias = (magnitude << 1) & 0xFF000000u;
    bias = bias < 0x71000000u ? 0x71000000u : bias;
    const uint32_t sum = bits_of(float_of((bias >> 1) + 0x07800000u) + four_times);
    const uint32_t word = ((sum >> 13) & 0x7C00u) + (sum & 0x0FFFu);
    out[i] = static_cast<uint16_t>((bits >> 16 & 0x8000u) | (magnitude > kInfinity ? 0x7E00u : word));
  }
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

// What is to be added to the parameter's bits, in steps of 256.
inline int32_t rho_of(uint32_t bits, uint32_t high) {
  const int32_t below = static_cast<int32_t>(bits - high);
  const int32_t rho =
      static_cast<int32_t>(static_cast<uint32_t>(below) + 127u + (static_cast<uint32_t>(below >> 8) & 1u)) >>
      8;
  return rho < -127 ? -127 : rho > 127 ? 127 : rho;
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
      const uint32_t magnitude = bits & kMagnitude;
      const int32_t rho = magnitude > kInfinity ? 0 : rho_of(bits, high);
      const uint32_t decoded = (high + static_cast<uint32_t>(rho) * 256u) & kMagnitude;
      const uint32_t is_overflown = (magnitude < kInfinity) & (decoded == kInfinity);
      other += Parameter::is_unheld(bits, word) | is_overflown;
      rhos[i] = static_cast<int8_t>(rho);
    }
    unheld += other;
  });
  return unheld;
}

// The same for values that all are finite and do not round to infinity, as nearly always: a shorter loop. It
// looks for others on the way.
uint64_t round_to_master24(const float* __restrict value, size_t count, const Parts& parts,
                           uint16_t* __restrict words) {
  int8_t* __restrict rhos = static_cast<int8_t*>(parts.at[0]);
  int32_t largest = 0;
  for (size_t i = 0; i < count; ++i) {
    const uint32_t bits = bits_of(value[i]), word = nearest(bits);
    const int32_t magnitude = static_cast<int32_t>(bits & kMagnitude);
    largest = magnitude > largest ? magnitude : largest;
    words[i] = static_cast<uint16_t>(word);
    rhos[i] = static_cast<int8_t>(rho_of(bits, word << 16));
  }
  if (largest < kNearInfinity) return 0;
  return encode_master24<RoundedParameter, uint16_t>(value, count, parts, words);
}

void decode_master24(const Parts& parts, size_t count, float* __restrict value,
                     const uint16_t* __restrict parameter) {
  const int8_t* __restrict rhos = static_cast<const int8_t*>(parts.at[0]);
  for (size_t i = 0; i < count; ++i) {
    value[i] = float_of((static_cast<uint32_t>(parameter[i]) << 16) + static_cast<uint32_t>(rhos[i] * 256));
  }
}

// --- 8 bits and a scale

// The rules of a code: which bits of a value tell its size, the bits of the scale for the largest of a group
// (as fp32, and as stored), what values are multiplied by, and what rounds to a value's code.
struct MomentCode {
  using Word = int8_t;
  using Scale = uint16_t;
  static constexpr float kTop = 1.0f;

  static uint32_t size_bits(float value) { return bits_of(value) & kMagnitude; }
  static uint32_t scale_bits(uint32_t largest) {
    return largest < 0x8000u ? 0u : clamp(nearest(largest), 0x0080, 0x7F7F) << 16;
  }
  static Scale stored(uint32_t bits) { return static_cast<Scale>(bits >> 16); }
  static float near(float value, float inverse) {
    const float x = value * inverse;
    return x * 254.0f / (__builtin_fabsf(x) + 1.0f);
  }
};

// Of roots of second moments, not of these. The root of a negative value is a NaN.
struct RootCode {
  using Word = uint8_t;
  using Scale = uint32_t;
  static constexpr float kTop = 255.0f;

  static uint32_t size_bits(float root) { return bits_of(root + 0.0f) & kMagnitude; }  // -0 becomes 0
  static uint32_t scale_bits(uint32_t largest) {
    const uint32_t even = (largest + 0x3Fu + ((largest >> 7) & 1u)) & ~0x7Fu;
    return largest == 0u ? 0u : clamp(even, 0x24000000, 0x5F7FFF80);
  }
  static Scale stored(uint32_t bits) { return bits; }
  static float near(float root, float inverse) {
    const float z = root * inverse, least = root > 0.0f ? 1.0f : 0.0f;
    return z > least ? z : least;
  }
};

// Codes of a group that cannot be held: it decodes to NaN. Returns how many of its values are to blame.
template <typename Rules>
uint32_t write_nan(const float* value, typename Rules::Word* code, typename Rules::Scale* scale) {
  memset(code, 0, kGroup);
  *scale = Rules::stored(uint32_t{kNan} << 16);
  uint32_t bad = 0;
  for (size_t i = 0; i < kGroup; ++i) bad += Rules::size_bits(value[i]) >= kInfinity;
  return bad;
}

// Codes `groups` whole groups, at most kRunGroups; returns how many values cannot be held. The scales of all
// come first: one division for several of them, and none that the next group waits for.
template <typename Rules>
uint64_t encode_run(const float* __restrict value, size_t groups, typename Rules::Word* __restrict code,
                    typename Rules::Scale* __restrict scales) {
  alignas(64) uint32_t largest[kRunGroups];
  alignas(64) float inverse[kRunGroups];
  for (size_t group = 0; group < groups; ++group) {
    int32_t most = 0;
    for (size_t i = 0; i < kGroup; ++i) {
      const int32_t size = static_cast<int32_t>(Rules::size_bits(value[group * kGroup + i]));
      most = size > most ? size : most;
    }
    largest[group] = static_cast<uint32_t>(most);
  }
  uint32_t bad_groups = 0;
  for (size_t group = 0; group < groups; ++group) {
    const uint32_t bits = Rules::scale_bits(largest[group]);
    inverse[group] = Rules::kTop / float_of(bits == 0u ? kOne : bits);
    scales[group] = Rules::stored(bits);
    bad_groups += largest[group] >= kInfinity;
  }
  for (size_t group = 0; group < groups; ++group) {
    const float factor = inverse[group];
    alignas(64) float near[kGroup];  // apart from what has narrower lanes
    for (size_t i = 0; i < kGroup; ++i) near[i] = Rules::near(value[group * kGroup + i], factor);
    for (size_t i = 0; i < kGroup; ++i) {
      code[group * kGroup + i] = static_cast<typename Rules::Word>(rounded(near[i]));
    }
  }
  uint64_t bad = 0;
  for (size_t group = 0; bad_groups != 0 && group < groups; ++group) {
    if (largest[group] < kInfinity) continue;
    bad += write_nan<Rules>(value + group * kGroup, code + group * kGroup, scales + group);
  }
  return bad;
}

void take_roots(const float* value, size_t count, float* out) {
  for (size_t i = 0; i < count; ++i) out[i] = __builtin_sqrtf(value[i]);
}

// Codes any number of values, or their roots.
template <typename Rules, bool rooted>
uint64_t encode_groups(const float* value, size_t count, const Parts& parts, const uint16_t*) {
  using Word = typename Rules::Word;
  Word* code = static_cast<Word*>(parts.at[0]);
  auto* scale = static_cast<typename Rules::Scale*>(parts.at[1]);
  alignas(64) float run[kRunGroups * kGroup];
  uint64_t unheld = 0;
  for (size_t first = 0; first < count; first += kRunGroups * kGroup, scale += kRunGroups) {
    const size_t size = count - first < kRunGroups * kGroup ? count - first : kRunGroups * kGroup;
    const size_t groups = size / kGroup, whole = groups * kGroup;
    const float* from = value + first;
    if constexpr (rooted) {
      take_roots(from, whole, run);
      from = run;
    }
    unheld += encode_run<Rules>(from, groups, code + first, scale);
    if (whole == size) continue;
    float last[kGroup] = {};
    Word last_code[kGroup];
    memcpy(last, value + first + whole, (size - whole) * sizeof(float));
    if constexpr (rooted) take_roots(last, kGroup, last);
    unheld += encode_run<Rules>(last, 1, last_code, scale + groups);
    memcpy(code + first + whole, last_code, size - whole);
  }
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
  const float* __restrict scales = static_cast<const float*>(parts.at[1]);
  for_groups(count, [&](size_t begin, auto size) {
    const float unit = scales[begin / kGroup] / 255.0f;
    for (size_t i = begin; i < begin + size; ++i) {
      const float root = static_cast<float>(code[i]) * unit;
      value[i] = root * root;
    }
  });
}

// --- AdamW

template <bool kKeepsRoots, typename Gradient>
inline void update(float* __restrict master, float* __restrict exp_avg, float* __restrict exp_avg_sq,
                   size_t count, const AdamWNumbers& numbers, Gradient gradient) {
  const AdamWNumbers n = numbers;
  for (size_t i = 0; i < count; ++i) {
    const float g = gradient(i) * n.factor;
    const float m = exp_avg[i] * n.beta1 + g * n.rest1;
    const float v = exp_avg_sq[i] * n.beta2 + g * g * n.rest2;
    const float root = __builtin_sqrtf(v);
    const float denominator = root * n.root_scale + n.eps;
    master[i] = master[i] * n.decay - m / denominator * n.step_size;
    exp_avg[i] = m;
    exp_avg_sq[i] = kKeepsRoots ? root : v;
  }
}

template <bool kKeepsRoots>
void update_adamw(float* master, float* exp_avg, float* exp_avg_sq, const void* gradient,
                  bool is_gradient_bf16, size_t count, const AdamWNumbers& numbers) {
  const uint16_t* __restrict words = static_cast<const uint16_t*>(gradient);
  const float* __restrict floats = static_cast<const float*>(gradient);
  if (is_gradient_bf16) {
    update<kKeepsRoots>(master, exp_avg, exp_avg_sq, count, numbers,
                        [&](size_t i) { return widened(words[i]); });
  } else {
    update<kKeepsRoots>(master, exp_avg, exp_avg_sq, count, numbers, [&](size_t i) { return floats[i]; });
  }
}

// --- torch.optim's Adam and AdamW: its operations on whole tensors, here one element after the other, in its
// order

template <bool kFma>
inline float product_and(float a, float b, float c) {
  if constexpr (kFma) return __builtin_fmaf(a, b, c);
  return a * b + c;
}

template <bool kFma>
void advance_moments(const float* __restrict master, const float* __restrict gradient,
                     float* __restrict exp_avg, float* __restrict exp_avg_sq, size_t count,
                     const TorchAdamNumbers& numbers) {
  const TorchAdamNumbers n = numbers;
  const bool is_near = n.weight < 0.5f;  // torch's lerp begins at the nearer end
  const float weight = is_near ? n.weight : n.weight - 1.0f;
  const uint32_t sign = n.maximize ? ~kMagnitude : 0u;
  for (size_t i = 0; i < count; ++i) {
    float g = float_of(bits_of(gradient[i]) ^ sign);
    if (n.l2 != 0.0f) g = product_and<kFma>(master[i], n.l2, g);
    const float m = exp_avg[i];
    exp_avg[i] = product_and<kFma>(weight, g - m, is_near ? m : g);
    exp_avg_sq[i] = product_and<kFma>(n.rest2 * g, g, exp_avg_sq[i] * n.beta2);
  }
}

void step_masters(float* __restrict master, const float* __restrict exp_avg, const float* __restrict roots,
                  size_t count, const TorchAdamNumbers& numbers) {
  const TorchAdamNumbers n = numbers;
  for (size_t i = 0; i < count; ++i) {
    const float denominator = roots[i] / n.root_scale + n.eps;
    master[i] = master[i] * n.decay + n.step_size * exp_avg[i] / denominator;
  }
}

// --- weights in few bits

inline void store(float value, float* out) {
  *out = value;
}

inline void store(float value, uint16_t* out) {
  *out = nearest_word(bits_of(value));
}

// Codes times their block's scale, rounded once. In 8 bits a byte is a code. In 4 a byte has the code of a
// column in its low bits, and that of the one half a row further in its high ones, both times 16.
template <size_t kBits, typename Value>
void dequantise_rows(const WeightRows& rows, void* value) {
  const size_t code_bytes = rows.columns * kBits / 8, row_bytes = code_bytes + rows.columns / rows.block * 2;
  for (size_t row = 0; row < rows.count; ++row) {
    const uint8_t* __restrict code = rows.bytes + row * row_bytes;
    const uint8_t* __restrict scales = code + code_bytes;
    Value* __restrict out = static_cast<Value*>(value) + row * rows.columns;
    for (size_t begin = 0; begin < code_bytes; begin += kGroup) {
      uint16_t words[2];
      memcpy(&words[0], scales + begin / rows.block * 2, 2);
      memcpy(&words[1], scales + (begin + code_bytes * (kBits == 4)) / rows.block * 2, 2);
      const float first = widened(words[0]), second = widened(words[1]);
      for (size_t i = begin; i < begin + kGroup; ++i) {
        if constexpr (kBits == 8) {
          store(static_cast<float>(static_cast<int8_t>(code[i])) * first, out + i);
        } else {
          store(static_cast<float>(static_cast<int8_t>(code[i] << 4)) * first, out + i);
          store(static_cast<float>(static_cast<int8_t>(code[i] & 0xF0)) * second, out + code_bytes + i);
        }
      }
    }
  }
}

constexpr Kernels kernels_of(const char* isa) {
  constexpr auto given_split = encode_split<GivenParameter, const uint16_t>;
  constexpr auto given_master24 = encode_master24<GivenParameter, const uint16_t>;
  constexpr auto moments = encode_groups<MomentCode, false>;
  constexpr auto roots = encode_groups<RootCode, false>;
  constexpr auto variances = encode_groups<RootCode, true>;
  return {.isa = isa,
          .codecs = {{.name = "fp32",
                      .part_count = 1,
                      .part_bytes = {4},
                      .part_elements = {1},
                      .encode = encode_fp32,
                      .decode = decode_fp32},
                     {.name = "bf16",
                      .part_count = 1,
                      .part_bytes = {2},
                      .part_elements = {1},
                      .encode = encode_bf16,
                      .decode = decode_bf16},
                     {.name = "split",
                      .part_count = 2,
                      .part_bytes = {2, 1},
                      .part_elements = {1, 8},
                      .encode = given_split,
                      .decode = decode_split,
                      .round_and_encode = encode_split<RoundedParameter, uint16_t>},
                     {.name = "master24",
                      .part_count = 1,
                      .part_bytes = {1},
                      .part_elements = {1},
                      .encode = given_master24,
                      .decode = decode_master24,
                      .round_and_encode = round_to_master24},
                     {.name = "moment8",
                      .part_count = 2,
                      .part_bytes = {1, 2},
                      .part_elements = {1, kGroup},
                      .encode = moments,
                      .decode = decode_moment8},
                     {.name = "variance8",
                      .part_count = 2,
                      .part_bytes = {1, 4},
                      .part_elements = {1, kGroup},
                      .encode = variances,
                      .decode = decode_variance8,
                      .encode_roots = roots}},
          .update_adamw = update_adamw<false>,
          .update_adamw_to_roots = update_adamw<true>,
          .bf16 = {.widen = widen_bf16, .round = round_to_bf16},
          .fp16 = {.widen = widen_fp16, .round = round_to_fp16},
          .moments = advance_moments<false>,
          .moments_by_fma = advance_moments<true>,
          .take_roots = take_roots,
          .weights8 = {.to_fp32 = dequantise_rows<8, float>, .to_bf16 = dequantise_rows<8, uint16_t>},
          .weights4 = {.to_fp32 = dequantise_rows<4, float>, .to_bf16 = dequantise_rows<4, uint16_t>},
          .masters = step_masters};
}

}  // namespace
}  // namespace swapper
