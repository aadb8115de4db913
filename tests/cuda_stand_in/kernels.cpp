// torch's operators for CUDA, computed by the CPU over the same memory: the stand-in's device memory is host
// memory. They take the place of torch's own kernels; what torch does without one stays torch's: allocations,
// views, plain copies, streams.
//
// An operator waits until all that is queued on the current stream is done, and for nothing else, as its
// kernel would; the caller waits with it, as it would not on a GPU.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <functional>
#include <map>
#include <set>

namespace {

const std::set<std::string> TORCHS_OWN = {"aten::empty.memory_format",
                                          "aten::empty_strided",
                                          "aten::resize_",
                                          "aten::as_strided",
                                          "aten::view",
                                          "aten::_reshape_alias",
                                          "aten::unfold",
                                          "aten::set_",
                                          "aten::set_.source_Storage",
                                          "aten::set_.source_Storage_storage_offset",
                                          "aten::set_.source_Tensor",
                                          "aten::_local_scalar_dense",
                                          "aten::record_stream",
                                          "aten::is_set_to",
                                          "aten::view_as_real",
                                          "aten::view_as_complex",
                                          "aten::_efficientzerotensor",
                                          "aten::is_pinned",
                                          "aten::_pin_memory",
                                          "aten::alias",
                                          "aten::copy_"};

// Tensors of the CPU in the memory of tensors of the device: those that one operator is given.
struct Aliases {
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors;  // the device's, the CPU's
  std::map<c10::StorageImpl*, c10::Storage> on_host;       // by the device's
  std::map<c10::StorageImpl*, c10::Storage> there;         // by the CPU's

  at::Tensor on_cpu(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    auto options = tensor.options().device(at::kCPU).requires_grad(false);
    auto& storage = on_host[tensor.storage().unsafeGetStorageImpl()];
    if (!storage) {
      auto bytes = at::from_blob(tensor.storage().mutable_data(),
                                 {static_cast<int64_t>(tensor.storage().nbytes())}, options.dtype(at::kByte));
      storage = bytes.storage();
      there.emplace(storage.unsafeGetStorageImpl(), tensor.storage());
    }
    auto alias = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                       tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
      alias.unsafeGetTensorImpl()->set_wrapped_number(true);
    tensors.emplace_back(tensor, alias);
    return alias;
  }

  at::Tensor on_device(const at::Tensor& tensor, c10::Device device) {
    if (!tensor.defined() || tensor.is_cuda()) return tensor;
    for (auto& [original, alias] : tensors)
      if (alias.is_same(tensor)) return original;
    auto found = there.find(tensor.storage().unsafeGetStorageImpl());
    if (found != there.end()) {
      auto view = at::detail::make_tensor<c10::TensorImpl>(
          c10::Storage(found->second), c10::DispatchKeySet(c10::DispatchKey::CUDA), tensor.dtype());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                        tensor.storage_offset());
      return view;
    }
    auto made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
    Aliases other;
    other.on_cpu(made).copy_(tensor);
    return made;
  }
};

c10::IValue convert(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& each) {
  if (value.isTensor()) return each(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(each(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor.has_value() ? std::optional<at::Tensor>(each(*tensor)) : std::nullopt);
    return list;
  }
  return value;
}

// A generator of the CPU for one operator: what it gives depends on the device's, which moves on.
at::Generator on_cpu(at::Generator generator) {
  if (generator.device().is_cpu()) return generator;
  std::lock_guard<std::mutex> lock(generator.mutex());
  uint64_t offset = generator.get_offset();
  generator.set_offset(offset + 4);
  return at::make_generator<at::CPUGeneratorImpl>(generator.current_seed() + offset * 0x9E3779B97F4A7C15u);
}

void compute(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                           c10::autocast_dispatch_keyset);
  Aliases aliases;
  std::optional<c10::Device> device;
  size_t count = op.schema().arguments().size(), begin = stack->size() - count;
  std::vector<std::pair<at::Tensor, at::Tensor>>
      sized;  // results without elements, whose sizes the operator sets
  std::optional<size_t> with_generator;
  for (size_t i = 0; i < count; i++) {
    c10::IValue& value = (*stack)[begin + i];
    if (value.isDevice() && value.toDevice().is_cuda()) {
      device = value.toDevice();
      value = c10::Device(at::kCPU);
    }
    if (op.schema().arguments()[i].name() == "generator") with_generator = i;
    const auto* alias_info = op.schema().arguments()[i].alias_info();
    bool is_written = alias_info != nullptr && alias_info->isWrite();
    value = convert(value, [&](const at::Tensor& tensor) {
      if (tensor.defined() && tensor.is_cuda()) device = tensor.device();
      if (is_written && tensor.defined() && tensor.is_cuda() && tensor.numel() == 0) {
        auto fresh = at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
        sized.emplace_back(tensor, fresh);
        aliases.tensors.emplace_back(tensor, fresh);
        return fresh;
      }
      return aliases.on_cpu(tensor);
    });
  }
  c10::Device on = device.value_or(c10::Device(at::kCUDA, c10::cuda::current_device()));
  if (!on.has_index()) on = c10::Device(at::kCUDA, c10::cuda::current_device());
  c10::cuda::CUDAGuard on_device(on);
  c10::cuda::getCurrentCUDAStream(on.index()).synchronize();
  if (with_generator) {
    c10::IValue& given = (*stack)[begin + *with_generator];
    given = on_cpu(given.isGenerator() ? given.toGenerator()
                                       : at::cuda::detail::getDefaultCUDAGenerator(on.index()));
  }
  op.callBoxed(stack);
  for (auto& [original, fresh] : sized)
    if (fresh.numel() > 0) {
      original.resize_(fresh.sizes());
      Aliases other;
      other.on_cpu(original).copy_(fresh);
    }
  size_t results = op.schema().returns().size();
  for (size_t i = stack->size() - results; i < stack->size(); i++)
    (*stack)[i] =
        convert((*stack)[i], [&](const at::Tensor& tensor) { return aliases.on_device(tensor, on); });
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  bool is_plain = self.dtype() == source.dtype() && self.is_non_overlapping_and_dense() &&
                  self.strides() == source.strides() && self.sizes() == source.sizes();
  if (self.is_cuda() && source.is_cuda() && self.device() == source.device() && !is_plain) {
    c10::cuda::CUDAGuard on_device(self.device());
    c10::cuda::getCurrentCUDAStream(self.device().index()).synchronize();
    c10::impl::ExcludeDispatchKeyGuard guard(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    Aliases aliases;
    auto target = aliases.on_cpu(self);
    target.copy_(aliases.on_cpu(source));
    return self;
  }
  return at::native::copy_(self, source, non_blocking);
}

// What torch has for CUDA only, so that `compute` finds it for the CPU too. In fp32, as torch's kernel.
std::tuple<at::Tensor, at::Tensor> fused_rms_norm_backward(const at::Tensor& gradient,
                                                           const at::Tensor& input, at::IntArrayRef shape,
                                                           const at::Tensor& rstd,
                                                           const std::optional<at::Tensor>& weight,
                                                           std::array<bool, 2> wanted) {
  std::vector<int64_t> inner, outer;
  for (int64_t i = 0; i < input.dim(); i++)
    (i < input.dim() - static_cast<int64_t>(shape.size()) ? outer : inner).push_back(i);
  bool is_weighted = weight.has_value() && weight->defined();
  at::Tensor given = gradient.to(at::kFloat), factor = rstd.to(at::kFloat),
             normed = input.to(at::kFloat) * factor;
  at::Tensor scaled = is_weighted ? given * weight->to(at::kFloat) : given;
  at::Tensor of_input, of_weight;
  if (wanted[0])
    of_input = ((scaled - normed * (scaled * normed).mean(inner, true)) * factor).to(input.scalar_type());
  if (wanted[1] && is_weighted) {
    auto products = given * normed;
    of_weight = (outer.empty() ? products : products.sum(outer)).to(weight->scalar_type());
  }
  return {of_input, of_weight};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, CPU, library) {
  library.impl("_fused_rms_norm_backward", TORCH_FN(fused_rms_norm_backward));
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  for (const auto& name :
       c10::Dispatcher::singleton().getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
    std::string full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    if (name.name.rfind("aten::", 0) == 0 && TORCHS_OWN.count(full) == 0)
      library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&compute>());
  }
  library.impl("copy_", TORCH_FN(copy_));
}
