// Divides runs among threads and blocks, and calls the kernels of the processor's instruction set. Owns
// nothing.
#include "codecs/codecs.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cfenv>
#include <string>

#include "base/error.h"
#include "base/parallel.h"

namespace swapper {
namespace {

constexpr std::size_t kBlock = 1024;  // its three states in fp32 fit the L1 cache
// Elements of a part, at least: waking a thread takes 20 us, and these some 40 and 60.
constexpr std::size_t kLeastToCode = 1 << 17;
constexpr std::size_t kLeastToUpdate = 1 << 15;
// Parts for each thread, at most: one whose processor has something else to do takes fewer.
constexpr std::size_t kParts = 4;

// The results are those of the default rounding, with subnormal numbers, whatever the calling thread has set.
class DefaultArithmetic {
 public:
  DefaultArithmetic() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultArithmetic() { std::fesetenv(&saved_); }
  DefaultArithmetic(const DefaultArithmetic&) = delete;
  DefaultArithmetic& operator=(const DefaultArithmetic&) = delete;

 private:
  std::fenv_t saved_;
};

// Calls work(begin, end) for parts of [0, count), each from a multiple of `unit` and of some `least` or more,
// on up to `threads` threads. Returns the sum of what the calls return.
template <typename Work>
std::uint64_t share(std::size_t count, std::size_t threads, std::size_t least, const Work& work,
                    std::size_t unit = kBlock) {
  threads = std::clamp<std::size_t>(count / least, 1, std::max<std::size_t>(threads, 1));
  const std::size_t parts = threads == 1 ? 1 : std::min(count / least, threads * kParts);
  const std::size_t each = (count / parts + unit - 1) / unit * unit;
  std::atomic<std::uint64_t> sum{0};
  std::atomic<std::size_t> next{0};
  run_parallel(threads, [&] {
    const DefaultArithmetic arithmetic;
    for (std::size_t begin = each * next++; begin < count; begin = each * next++) {
      sum += work(begin, std::min(begin + each, count));
    }
  });
  return sum;
}

Parts moved(const Codec& codec, const Parts& parts, std::size_t first) {
  Parts there;
  for (std::size_t n = 0; n < codec.part_count; ++n) {
    there.at[n] = static_cast<std::byte*>(parts.at[n]) + first / codec.part_elements[n] * codec.part_bytes[n];
  }
  return there;
}

// One state of a block while it is updated: decoded to `scratch`, or in its place if it is not coded.
struct OpenState {
  const Codec& codec;
  Parts parts;
  float* value;

  OpenState(const CodedState& state, std::size_t first, float* scratch)
      : codec(*state.codec), parts(moved(codec, state.parts, first)) {
    value = codec.is_fp32() ? static_cast<float*>(parts.at[0]) : scratch;
  }

  void decode(std::size_t count, const std::uint16_t* parameter) const {
    if (!codec.is_fp32()) codec.decode(parts, count, value, parameter);
  }

  std::uint64_t encode(std::size_t count, const std::uint16_t* parameter) const {
    return codec.is_fp32() ? 0 : codec.encode(value, count, parts, parameter);
  }

  std::uint64_t encode_roots(std::size_t count) const {
    return codec.encode_roots(value, count, parts, nullptr);
  }

  std::uint64_t round_and_encode(const HalfFormat& half, std::size_t count, std::uint16_t* parameter) const {
    if (codec.needs_parameter()) return codec.round_and_encode(value, count, parts, parameter);
    half.round(value, count, parameter);
    return encode(count, parameter);
  }
};

const void* gradient_at(const CodedSlice& slice, std::size_t first) {
  return static_cast<const std::byte*>(slice.gradient) +
         first * (slice.gradient_dtype == Dtype::kFp32 ? 4 : 2);
}

// Decodes the states of `count` elements from `first` on, at most kBlock, has them changed by
// update(master, exp_avg, exp_avg_sq), rounds the parameters and encodes. `leaves_roots`: of second moments,
// for a code of roots.
template <typename Update>
std::uint64_t update_block(const Kernels& kernels, const CodedSlice& slice, std::size_t first,
                           std::size_t count, bool leaves_roots, const Update& update) {
  alignas(64) float scratch[3][kBlock];
  const OpenState exp_avg(slice.exp_avg, first, scratch[1]), exp_avg_sq(slice.exp_avg_sq, first, scratch[2]);
  exp_avg.decode(count, nullptr);
  exp_avg_sq.decode(count, nullptr);
  std::uint64_t unheld = 0;
  if (slice.masters == nullptr) {
    update(static_cast<float*>(slice.parameter) + first, exp_avg.value, exp_avg_sq.value);
  } else {
    std::uint16_t* parameter = static_cast<std::uint16_t*>(slice.parameter) + first;
    const OpenState masters(*slice.masters, first, scratch[0]);
    masters.decode(count, parameter);
    update(masters.value, exp_avg.value, exp_avg_sq.value);
    unheld += masters.round_and_encode(kernels.half(slice.parameter_dtype), count, parameter);
  }
  unheld += leaves_roots ? exp_avg_sq.encode_roots(count) : exp_avg_sq.encode(count, nullptr);
  return unheld + exp_avg.encode(count, nullptr);
}

// Calls block(first, count) for the blocks of the elements, by several threads. Returns the sum.
template <typename Block>
std::uint64_t for_blocks(std::size_t count, std::size_t threads, const Block& block) {
  return share(count, threads, kLeastToUpdate, [&](std::size_t begin, std::size_t end) {
    std::uint64_t unheld = 0;
    for (std::size_t first = begin; first < end; first += kBlock) {
      unheld += block(first, std::min(kBlock, end - first));
    }
    return unheld;
  });
}

// MKL's: high accuracy, subnormal numbers, no error status. As torch calls it.
constexpr long long kRootsMode = 0x2 | 0x140000 | 0x100;

struct Available {
  std::array<const Kernels*, 3> kernels{};
  std::size_t count = 0;

  Available() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (has_avx512) kernels[count++] = &kAvx512Kernels;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) kernels[count++] = &kAvx2Kernels;
#endif
    kernels[count++] = &kBaselineKernels;
  }
};

}  // namespace

std::span<const Kernels* const> codec_kernels() {
  static const Available available;
  return {available.kernels.data(), available.count};
}

const Kernels& find_kernels(std::string_view isa) {
  for (const Kernels* each : codec_kernels()) {
    if (isa.empty() || isa == each->isa) return *each;
  }
  throw ConfigError("this processor does not have " + std::string(isa));
}

const Codec& find_codec(const Kernels& kernels, std::string_view name) {
  for (const Codec& each : kernels.codecs) {
    if (name == each.name) return each;
  }
  throw ConfigError("there is no codec " + std::string(name));
}

std::uint64_t encode(const Codec& codec, const float* value, std::size_t count, const Parts& parts,
                     const std::uint16_t* parameter, std::size_t threads) {
  return share(count, threads, kLeastToCode, [&](std::size_t begin, std::size_t end) {
    return codec.encode(value + begin, end - begin, moved(codec, parts, begin),
                        codec.needs_parameter() ? parameter + begin : nullptr);
  });
}

void decode(const Codec& codec, const Parts& parts, std::size_t count, float* value,
            const std::uint16_t* parameter, std::size_t threads) {
  share(count, threads, kLeastToCode, [&](std::size_t begin, std::size_t end) {
    codec.decode(moved(codec, parts, begin), end - begin, value + begin,
                 codec.needs_parameter() ? parameter + begin : nullptr);
    return std::uint64_t{0};
  });
}

void dequantise(const Kernels& kernels, const WeightRows& rows, std::size_t bits, Dtype dtype, void* value,
                std::size_t threads) {
  const std::size_t blocks = rows.block * (bits == 4 ? 2 : 1), value_bytes = dtype == Dtype::kFp32 ? 4 : 2;
  if ((bits != 4 && bits != 8) || dtype == Dtype::kFp16 || rows.block == 0 || rows.block % kGroup != 0 ||
      rows.columns == 0 || rows.columns % blocks != 0) {
    throw ConfigError(
        "weights in few bits have 4 or 8, blocks of a multiple of 32 columns, and values in fp32 or bf16");
  }
  const auto& kernel = bits == 8 ? kernels.weights8 : kernels.weights4;
  const Dequantise run = dtype == Dtype::kFp32 ? kernel.to_fp32 : kernel.to_bf16;
  const std::size_t row_bytes = rows.columns * bits / 8 + rows.columns / rows.block * 2;
  const std::size_t least = std::max<std::size_t>(kLeastToCode / rows.columns, 1);
  const auto part = [&](std::size_t begin, std::size_t end) {
    WeightRows there = rows;
    there.bytes += begin * row_bytes;
    there.count = end - begin;
    run(there, static_cast<std::byte*>(value) + begin * rows.columns * value_bytes);
    return std::uint64_t{0};
  };
  share(rows.count, threads, least, part, 1);
}

std::uint64_t update_adamw(const Kernels& kernels, const CodedSlice& slice, const AdamWNumbers& numbers,
                           std::size_t threads) {
  const bool has_roots = slice.exp_avg_sq.codec->encode_roots != nullptr;
  const auto to_state = has_roots ? kernels.update_adamw_to_roots : kernels.update_adamw;
  return for_blocks(slice.count, threads, [&](std::size_t first, std::size_t count) {
    const void* gradient = gradient_at(slice, first);
    return update_block(kernels, slice, first, count, has_roots, [&](float* master, float* m, float* v) {
      to_state(master, m, v, gradient, slice.gradient_dtype == Dtype::kBf16, count, numbers);
    });
  });
}

std::uint64_t update_as_torch(const Kernels& kernels, const CodedSlice& slice,
                              const TorchAdamNumbers& numbers, const TorchArithmetic& arithmetic,
                              std::size_t threads) {
  const auto moments = arithmetic.uses_fma ? kernels.moments_by_fma : kernels.moments;
  return for_blocks(slice.count, threads, [&](std::size_t first, std::size_t count) {
    alignas(64) float scratch[kBlock];  // of the gradients, then of the roots
    const void* gradient = gradient_at(slice, first);
    if (slice.gradient_dtype != Dtype::kFp32) {
      kernels.half(slice.gradient_dtype).widen(static_cast<const std::uint16_t*>(gradient), count, scratch);
      gradient = scratch;
    }
    return update_block(kernels, slice, first, count, false, [&](float* master, float* m, float* v) {
      moments(master, static_cast<const float*>(gradient), m, v, count, numbers);
      if (arithmetic.roots != nullptr) {
        arithmetic.roots(static_cast<int>(count), v, scratch, kRootsMode);
      } else {
        kernels.take_roots(v, count, scratch);
      }
      kernels.masters(master, m, scratch, count, numbers);
    });
  });
}

}  // namespace swapper
