// Binds the codecs of optimizer state to Python, by the addresses of tensors that swapper/codecs/ has
// checked. The GIL is released meanwhile. Owns nothing.
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
using Numbers = std::tuple<float, float, float, float, float, float, float, float, float>;

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

std::uint64_t update_at(std::size_t count, Address parameter, Address gradient, bool is_gradient_bf16,
                        const std::vector<State>& states, const Numbers& numbers, std::size_t threads,
                        const std::string& isa) {
  if (states.size() != 2 && states.size() != 3)
    throw ConfigError("the states are two moments, after masters or alone");
  const Kernels& kernels = find_kernels(isa);
  std::vector<CodedState> coded;
  for (const auto& [name, addresses] : states) {
    const Codec& codec = find_codec(kernels, name);
    coded.push_back({&codec, parts_of(codec, addresses)});
  }
  const bool has_masters = coded.size() == 3;
  const CodedSlice slice{count,
                         at<void>(parameter),
                         at<const void>(gradient),
                         is_gradient_bf16,
                         has_masters ? &coded.front() : nullptr,
                         coded[coded.size() - 2],
                         coded.back()};
  if (slice.exp_avg.codec->needs_parameter() || slice.exp_avg_sq.codec->needs_parameter()) {
    throw ConfigError("moments are not what is missing to a parameter");
  }
  const AdamWNumbers given = std::apply([](auto... each) { return AdamWNumbers{each...}; }, numbers);
  const nb::gil_scoped_release released;
  return update_adamw(kernels, slice, given, threads);
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
  module.def("codec_adamw", &update_at, "count"_a, "parameter"_a, "gradient"_a, "is_gradient_bf16"_a,
             "states"_a, "numbers"_a, "threads"_a = 1, "isa"_a = "");
}

}  // namespace swapper
