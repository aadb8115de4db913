// Binds the codecs of optimizer state and of weights to Python, by the addresses of tensors that
// swapper/codecs/ and swapper/checkpoint/ have checked. The GIL is released meanwhile. Owns nothing.
#include "codecs/codecs.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <vector>

#include "base/error.h"
#include "bindings/handles.h"

using namespace nanobind::literals;

namespace swapper {
namespace {

using Address = std::uintptr_t;
using State = std::tuple<std::string, std::vector<Address>>;
using Tensor = std::tuple<Address, std::string>;  // and its dtype
using Numbers = std::tuple<float, float, float, float, float, float, float, float, float>;
using TorchNumbers = std::tuple<float, float, float, float, float, float, float, float, bool>;

template <typename T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

Parts parts_of(const Codec& codec, const std::vector<Address>& addresses) {
  if (addresses.size() != codec.part_count) throw ConfigError("a code has as many parts as its codec says");
  Parts parts;
  for (std::size_t n = 0; n < addresses.size(); ++n) parts.at[n] = at<void>(addresses[n]);
  return parts;
}

const std::uint16_t* parameter_of(const Codec& codec, Address parameter, std::size_t count) {
  if (codec.needs_parameter() && parameter == 0 && count != 0)
    throw ConfigError("this codec needs the parameter");
  return at<const std::uint16_t>(parameter);
}

std::uint64_t encode_at(const std::string& name, Address value, std::size_t count,
                        const std::vector<Address>& addresses, Address parameter, std::size_t threads,
                        const std::string& isa) {
  const Codec& codec = find_codec(find_kernels(isa), name);
  const Parts parts = parts_of(codec, addresses);
  const std::uint16_t* words = parameter_of(codec, parameter, count);
  const nb::gil_scoped_release released;
  return encode(codec, at<const float>(value), count, parts, words, threads);
}

void decode_at(const std::string& name, const std::vector<Address>& addresses, std::size_t count,
               Address value, Address parameter, std::size_t threads, const std::string& isa) {
  const Codec& codec = find_codec(find_kernels(isa), name);
  const Parts parts = parts_of(codec, addresses);
  const std::uint16_t* words = parameter_of(codec, parameter, count);
  const nb::gil_scoped_release released;
  decode(codec, parts, count, at<float>(value), words, threads);
}

Dtype dtype_of(const std::string& name) {
  if (name == "fp32") return Dtype::kFp32;
  if (name == "bf16") return Dtype::kBf16;
  if (name == "fp16") return Dtype::kFp16;
  throw ConfigError("parameters and gradients are fp32, bf16 or fp16, not " + name);
}

void dequantise_at(Address rows, std::size_t count, std::size_t columns, std::size_t block, std::size_t bits,
                   const Tensor& value, std::size_t threads, const std::string& isa) {
  const Kernels& kernels = find_kernels(isa);
  const WeightRows weight{
      .bytes = at<const std::uint8_t>(rows), .count = count, .columns = columns, .block = block};
  const auto& [address, dtype] = value;
  const Dtype kind = dtype_of(dtype);
  const nb::gil_scoped_release released;
  dequantise(kernels, weight, bits, kind, at<void>(address), threads);
}

// The states of a slice, for as long as a call.
class States {
 public:
  States(const Kernels& kernels, const std::vector<State>& states) {
    if (states.size() != 2 && states.size() != 3)
      throw ConfigError("the states are two moments, after masters or alone");
    for (const auto& [name, addresses] : states) {
      const Codec& codec = find_codec(kernels, name);
      coded_.push_back({.codec = &codec, .parts = parts_of(codec, addresses)});
      if (codec.needs_parameter() && coded_.size() + 2 > states.size())
        throw ConfigError("moments are not what is missing to a parameter");
    }
  }

  CodedSlice slice(std::size_t count, const Tensor& parameter, const Tensor& gradient) const {
    const bool has_masters = coded_.size() == 3;
    return {.count = count,
            .parameter = at<void>(std::get<Address>(parameter)),
            .parameter_dtype = dtype_of(std::get<std::string>(parameter)),
            .gradient = at<const void>(std::get<Address>(gradient)),
            .gradient_dtype = dtype_of(std::get<std::string>(gradient)),
            .masters = has_masters ? &coded_.front() : nullptr,
            .exp_avg = coded_[coded_.size() - 2],
            .exp_avg_sq = coded_.back()};
  }

 private:
  std::vector<CodedState> coded_;
};

std::uint64_t update_at(std::size_t count, const Tensor& parameter, const Tensor& gradient,
                        const std::vector<State>& states, const Numbers& numbers, std::size_t threads,
                        const std::string& isa) {
  const Kernels& kernels = find_kernels(isa);
  const States coded(kernels, states);
  const CodedSlice slice = coded.slice(count, parameter, gradient);
  const AdamWNumbers given = std::apply([](auto... each) { return AdamWNumbers{each...}; }, numbers);
  const nb::gil_scoped_release released;
  return update_adamw(kernels, slice, given, threads);
}

std::uint64_t update_as_torch_at(std::size_t count, const Tensor& parameter, const Tensor& gradient,
                                 const std::vector<State>& states, const TorchNumbers& numbers, bool uses_fma,
                                 Address roots, std::size_t threads, const std::string& isa) {
  const Kernels& kernels = find_kernels(isa);
  const States coded(kernels, states);
  const CodedSlice slice = coded.slice(count, parameter, gradient);
  const TorchAdamNumbers given = std::apply([](auto... each) { return TorchAdamNumbers{each...}; }, numbers);
  const TorchArithmetic arithmetic{.uses_fma = uses_fma, .roots = reinterpret_cast<Roots>(roots)};
  const nb::gil_scoped_release released;
  return update_as_torch(kernels, slice, given, arithmetic, threads);
}

std::vector<std::string> names_of_isas() {
  std::vector<std::string> names;
  for (const Kernels* each : codec_kernels()) names.emplace_back(each->isa);
  return names;
}

}  // namespace

void bind_codecs(nb::module_& module) {
  module.def("codec_isas", &names_of_isas);
  module.def("codec_encode", &encode_at, "codec"_a, "value"_a, "count"_a, "parts"_a, "parameter"_a,
             "threads"_a = 1, "isa"_a = "");
  module.def("codec_decode", &decode_at, "codec"_a, "parts"_a, "count"_a, "value"_a, "parameter"_a,
             "threads"_a = 1, "isa"_a = "");
  module.def("dequantise", &dequantise_at, "rows"_a, "count"_a, "columns"_a, "block"_a, "bits"_a, "value"_a,
             "threads"_a = 1, "isa"_a = "");
  module.def("codec_adamw", &update_at, "count"_a, "parameter"_a, "gradient"_a, "states"_a, "numbers"_a,
             "threads"_a = 1, "isa"_a = "");
  module.def("codec_torch_adam", &update_as_torch_at, "count"_a, "parameter"_a, "gradient"_a, "states"_a,
             "numbers"_a, "uses_fma"_a, "roots"_a, "threads"_a = 1, "isa"_a = "");
}

}  // namespace swapper
