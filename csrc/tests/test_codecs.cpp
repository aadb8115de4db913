// Compares the codecs of every instruction set that this processor has, bit by bit, on memory that ends where
// the run ends. That these bits are the reference's is tested in Python (tests/codecs). Owns nothing.
#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "codecs/codecs.h"
#include "tests/testing.h"

namespace swapper {
namespace {

constexpr std::size_t kSizes[] = {1, 7, 8, 31, 32, 33, 64, 1023, 1024, 1025, 300'000};

using Bytes = std::vector<unsigned char>;

// The parts of a code, each in memory of its own of exactly its size.
struct Code {
  Code(const Codec& codec, std::size_t count) {
    for (std::size_t n = 0; n < codec.part_count; ++n) {
      const std::size_t elements = (count + codec.part_elements[n] - 1) / codec.part_elements[n];
      memory[n].resize(elements * codec.part_bytes[n]);
      parts.at[n] = memory[n].data();
    }
  }
  Code(const Code&) = delete;
  Code& operator=(const Code&) = delete;

  Bytes memory[kMostParts];
  Parts parts;
};

// Half of the values have any bits, half are near 1; squares, if there must be none that is negative.
std::vector<float> values(std::mt19937& random, std::size_t count) {
  std::vector<float> all(count);
  for (float& each : all) {
    const std::uint32_t bits = random();
    each = static_cast<float>(bits % 1000 + 1) / 500.0f;
    if (bits & 0x1000000u) std::memcpy(&each, &bits, sizeof each);
  }
  return all;
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST(every_instruction_set_gives_the_same_code_and_values) {
  std::mt19937 random(1);
  for (const std::size_t count : kSizes) {
    const std::vector<float> value = values(random, count);
    std::vector<std::uint16_t> parameter(count);
    kBaselineKernels.bf16.round(value.data(), count, parameter.data());
    for (const Codec& plain : kBaselineKernels.codecs) {
      Code wanted(plain, count);
      std::vector<float> wanted_value(count), found_value(count);
      const std::uint64_t unheld = encode(plain, value.data(), count, wanted.parts, parameter.data(), 1);
      decode(plain, wanted.parts, count, wanted_value.data(), parameter.data(), 1);
      for (const Kernels* kernels : codec_kernels()) {
        const Codec& codec = find_codec(*kernels, plain.name);
        Code found(codec, count);
        EXPECT(encode(codec, value.data(), count, found.parts, parameter.data(), 3) == unheld);
        EXPECT(found.memory[0] == wanted.memory[0] && found.memory[1] == wanted.memory[1]);
        decode(codec, found.parts, count, found_value.data(), parameter.data(), 3);
        EXPECT(same(found_value, wanted_value));
      }
    }
  }
}

// Updates state in 8 bits; returns the parameters and all parts of the code.
std::vector<Bytes> updated(const Kernels& kernels, std::size_t count, std::size_t threads) {
  std::mt19937 random(2);
  std::vector<float> master(count), exp_avg(count), exp_avg_sq(count), gradient(count);
  for (std::size_t i = 0; i < count; ++i) {
    master[i] = static_cast<float>(random() % 1000) / 100.0f - 5.0f;
    exp_avg[i] = master[i] / 10.0f;
    exp_avg_sq[i] = static_cast<float>(random() % 1000) / 1e5f;
    gradient[i] = static_cast<float>(random() % 1000) / 500.0f - 1.0f;
  }
  std::vector<std::uint16_t> parameter(count);
  kernels.bf16.round(master.data(), count, parameter.data());
  const Codec &masters = find_codec(kernels, "master24"), &moment = find_codec(kernels, "moment8"),
              &variance = find_codec(kernels, "variance8");
  Code rho(masters, count), first(moment, count), second(variance, count);
  EXPECT(encode(masters, master.data(), count, rho.parts, parameter.data(), 1) == 0);
  EXPECT(encode(moment, exp_avg.data(), count, first.parts, nullptr, 1) == 0);
  EXPECT(encode(variance, exp_avg_sq.data(), count, second.parts, nullptr, 1) == 0);
  const CodedState state{.codec = &masters, .parts = rho.parts};
  const CodedSlice slice{.count = count,
                         .parameter = parameter.data(),
                         .parameter_dtype = Dtype::kBf16,
                         .gradient = gradient.data(),
                         .gradient_dtype = Dtype::kFp32,
                         .masters = &state,
                         .exp_avg = {.codec = &moment, .parts = first.parts},
                         .exp_avg_sq = {.codec = &variance, .parts = second.parts}};
  const AdamWNumbers numbers{.factor = 1.0f,
                             .decay = 0.999f,
                             .beta1 = 0.9f,
                             .rest1 = 0.1f,
                             .beta2 = 0.95f,
                             .rest2 = 0.05f,
                             .root_scale = 1.25f,
                             .eps = 1e-8f,
                             .step_size = 1e-3f};
  EXPECT(update_adamw(kernels, slice, numbers, threads) == 0);
  const auto* bytes = reinterpret_cast<const unsigned char*>(parameter.data());
  return {Bytes(bytes, bytes + 2 * count),
          rho.memory[0],
          first.memory[0],
          first.memory[1],
          second.memory[0],
          second.memory[1]};
}

TEST(every_instruction_set_and_any_threads_update_alike) {
  for (const std::size_t count : kSizes) {
    const auto wanted = updated(kBaselineKernels, count, 1);
    for (const Kernels* kernels : codec_kernels()) {
      if (count == kSizes[0]) std::printf("  %s\n", kernels->isa);
      EXPECT(updated(*kernels, count, 1) == wanted);
      EXPECT(updated(*kernels, count, 3) == wanted);
    }
  }
}

TEST(every_instruction_set_and_any_threads_give_the_same_weights) {
  std::mt19937 random(3);
  for (const std::size_t bits : {8, 4}) {
    const std::size_t count = 500, block = 64, columns = block * 6, row_bytes = columns * bits / 8 + 6 * 2;
    Bytes bytes(count * row_bytes);
    for (unsigned char& each : bytes) each = static_cast<unsigned char>(random() & 0xBF);  // no scale is NaN
    const WeightRows rows{.bytes = bytes.data(), .count = count, .columns = columns, .block = block};
    for (const Dtype dtype : {Dtype::kFp32, Dtype::kBf16}) {
      Bytes wanted(count * columns * (dtype == Dtype::kFp32 ? 4 : 2)), found(wanted.size());
      dequantise(kBaselineKernels, rows, bits, dtype, wanted.data(), 1);
      for (const Kernels* kernels : codec_kernels()) {
        for (const std::size_t threads : {1, 3}) {
          std::fill(found.begin(), found.end(), 0);
          dequantise(*kernels, rows, bits, dtype, found.data(), threads);
          EXPECT(found == wanted);
        }
      }
    }
  }
}

}  // namespace
}  // namespace swapper
