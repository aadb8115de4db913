// One table of functions for each instruction set: the arithmetic of the codecs of optimizer state on runs of
// memory. swapper/codecs/reference.py defines every result; all tables give its bits. Owns nothing.
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
                                    std::uint16_t* parameter);
  // For a code of roots, else null: encodes values whose roots these are.
  std::uint64_t (*encode_roots)(const float* roots, std::size_t count, const Parts& parts,
                                const std::uint16_t* parameter);

  bool needs_parameter() const { return round_and_encode != nullptr; }
  bool is_fp32() const { return part_bytes[0] == 4; }
};

constexpr std::size_t kCodecs = 6;

struct Kernels {
  const char* isa;
  Codec codecs[kCodecs];
  using Update = void (*)(float* master, float* exp_avg, float* exp_avg_sq, const void* gradient,
                          bool is_gradient_bf16, std::size_t count, const AdamWNumbers& numbers);
  Update update_adamw;
  Update update_adamw_to_roots;  // leaves the roots of second moments in their place
  void (*round_to_bf16)(const float* value, std::size_t count, std::uint16_t* out);
};

extern const Kernels kBaselineKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels, kAvx512Kernels;
#endif

}  // namespace swapper
