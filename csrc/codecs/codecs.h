// Runs the codecs of optimizer state and of weights over memory, in the fastest instruction set that the
// processor has, by several threads if asked for. Pure functions; results depend on neither.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "codecs/kernels.h"

namespace swapper {

// The tables that this processor can run, fastest first.
std::span<const Kernels* const> codec_kernels();

// Raises ConfigError if there is none of that name; "" is the fastest.
const Kernels& find_kernels(std::string_view isa);
const Codec& find_codec(const Kernels& kernels, std::string_view name);

// Returns how many elements the code cannot hold.
[[nodiscard]] std::uint64_t encode(const Codec& codec, const float* value, std::size_t count,
                                   const Parts& parts, const std::uint16_t* parameter, std::size_t threads);
void decode(const Codec& codec, const Parts& parts, std::size_t count, float* value,
            const std::uint16_t* parameter, std::size_t threads);

// Writes the values of the rows, in fp32 or bf16. Raises ConfigError if the shape or the kind is another.
void dequantise(const Kernels& kernels, const WeightRows& rows, std::size_t bits, Dtype dtype, void* value,
                std::size_t threads);

struct CodedState {
  const Codec* codec;
  Parts parts;
};

// A slice of parameters and its state. The masters are the parameters, in fp32, if `masters` is null.
struct CodedSlice {
  std::size_t count;
  void* parameter;
  Dtype parameter_dtype;
  const void* gradient;
  Dtype gradient_dtype;
  const CodedState* masters;
  CodedState exp_avg, exp_avg_sq;
};

// Decodes, updates by AdamW, rounds the parameters and encodes, a block that fits the L1 cache after the
// other. Returns how many elements the codes cannot hold. Gradients and parameters are fp32 or bf16.
[[nodiscard]] std::uint64_t update_adamw(const Kernels& kernels, const CodedSlice& slice,
                                         const AdamWNumbers& numbers, std::size_t threads);

// MKL's vmsSqrt.
using Roots = void (*)(int count, const float* value, float* out, long long mode);

// How torch computes on this processor, of which results depend.
struct TorchArithmetic {
  bool uses_fma;
  Roots roots;  // null: correctly rounded ones
};

// The same in the order of operations of torch.optim's Adam and AdamW.
[[nodiscard]] std::uint64_t update_as_torch(const Kernels& kernels, const CodedSlice& slice,
                                            const TorchAdamNumbers& numbers,
                                            const TorchArithmetic& arithmetic, std::size_t threads);

}  // namespace swapper
