// One table of functions for each instruction set: the arithmetic of the codecs of optimizer state, and of
// weights in few bits, on runs of memory. tests/codec_reference.py and swapper/checkpoint/quantization.py
// define every result; all tables give its bits. Owns nothing.
#pragma once

#include <cstddef>
#include <cstdint>

namespace swapper {

constexpr std::size_t kGroup = 32;  // elements that share a scale
constexpr std::size_t kMostParts = 2;

// The numbers of a step as torch rounds them to fp32, in the order of AdamWStep's arithmetic.
struct AdamWNumbers {
  float factor, decay, beta1, rest1, beta2, rest2, root_scale, eps, step_size;
};

// Those of a step of torch.optim's Adam or AdamW, in their own order of operations. Without weight decay
// `decay` is 1; `l2` is 0 unless it goes by way of the gradients, as Adam's does. `step_size` is negative.
struct TorchAdamNumbers {
  float decay, l2, weight, beta2, rest2, root_scale, eps, step_size;
  bool maximize;
};

enum class Dtype : std::uint8_t { kFp32, kBf16, kFp16 };

// How fp32 becomes 16 bits, rounded to nearest, ties to even, and how these become fp32.
struct HalfFormat {
  void (*widen)(const std::uint16_t* words, std::size_t count, float* out);
  void (*round)(const float* value, std::size_t count, std::uint16_t* out);
};

// Addresses of the parts of one code.
struct Parts {
  void* at[kMostParts] = {};
};

struct Codec {
  const char* name;
  std::size_t part_count;
  std::size_t part_bytes[kMostParts];     // of one element of the part
  std::size_t part_elements[kMostParts];  // values that share it
  // Returns how many elements the code cannot hold. Runs begin at a multiple of kGroup.
  std::uint64_t (*encode)(const float* value, std::size_t count, const Parts& parts,
                          const std::uint16_t* parameter);
  void (*decode)(const Parts& parts, std::size_t count, float* value, const std::uint16_t* parameter);
  // For a code that a bf16 parameter completes, else null: rounds the values to parameters, and encodes.
  std::uint64_t (*round_and_encode)(const float* value, std::size_t count, const Parts& parts,
                                    std::uint16_t* parameter) = nullptr;
  // For a code of roots, else null: encodes values whose roots these are.
  std::uint64_t (*encode_roots)(const float* roots, std::size_t count, const Parts& parts,
                                const std::uint16_t* parameter) = nullptr;

  bool needs_parameter() const { return round_and_encode != nullptr; }
  bool is_fp32() const { return part_bytes[0] == 4; }
};

constexpr std::size_t kCodecs = 6;

// Rows of a weight in few bits, of which each is its codes, then a bf16 scale for each block of columns
// (swapper/checkpoint/quantization.py). `block` is a multiple of kGroup, `columns` of `block`, in 4 bits of
// twice that.
struct WeightRows {
  const std::uint8_t* bytes;
  std::size_t count, columns, block;
};
using Dequantise = void (*)(const WeightRows& rows, void* value);

struct Kernels {
  const char* isa;
  Codec codecs[kCodecs];
  using Update = void (*)(float* master, float* exp_avg, float* exp_avg_sq, const void* gradient,
                          bool is_gradient_bf16, std::size_t count, const AdamWNumbers& numbers);
  Update update_adamw;
  Update update_adamw_to_roots;  // leaves the roots of second moments in their place
  HalfFormat bf16, fp16;
  using Moments = void (*)(const float* master, const float* gradient, float* exp_avg, float* exp_avg_sq,
                           std::size_t count, const TorchAdamNumbers& numbers);
  Moments moments, moments_by_fma;  // the second adds products before they are rounded
  void (*take_roots)(const float* value, std::size_t count, float* out);
  struct {
    Dequantise to_fp32, to_bf16;
  } weights8, weights4;
  void (*masters)(float* master, const float* exp_avg, const float* roots, std::size_t count,
                  const TorchAdamNumbers& numbers);

  const HalfFormat& half(Dtype dtype) const { return dtype == Dtype::kFp16 ? fp16 : bf16; }
};

extern const Kernels kBaselineKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels, kAvx512Kernels;
#endif

}  // namespace swapper
