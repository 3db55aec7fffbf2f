// A second device for tests: its memory is the host's, its arithmetic that of the CPU, and torch treats it as another device.
// An operator that mixes its tensors with those of the CPU fails, as on a GPU.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <map>

namespace {

constexpr auto kSecond = c10::DeviceType::PrivateUse1;
const c10::Device second(kSecond, 0);

struct SecondAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto memory = c10::GetCPUAllocator()->allocate(bytes == 0 ? 1 : bytes);
    void* data = memory.get();
    auto* kept = new c10::DataPtr(std::move(memory));
    return {data, kept, [](void* context) { delete static_cast<c10::DataPtr*>(context); }, second};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
SecondAllocator allocator;
REGISTER_ALLOCATOR(kSecond, &allocator);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSecond; }
  c10::Device exchangeDevice(c10::Device) const override { return second; }
  c10::Device getDevice() const override { return second; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, second); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, second); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream&) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  at::Device getDeviceFromPtr(void*) const override { return second; }
};

// The same memory, seen as a tensor of the CPU.
at::Tensor host(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != kSecond) return tensor;
  auto options = tensor.options().device(at::kCPU).requires_grad(false);
  auto base = at::from_blob(
      const_cast<void*>(tensor.storage().data()), {static_cast<int64_t>(tensor.storage().nbytes() / tensor.itemsize())}, options);
  return at::as_strided(base, tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

at::Tensor moved(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  at::Tensor result = at::detail::empty_strided_generic(
      tensor.sizes(), tensor.strides(), &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), tensor.scalar_type());
  host(result).copy_(tensor);
  return result;
}

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor as_strided(
    const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

at::Tensor view(const at::Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); }

at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}

void grow(const at::Tensor& self, at::IntArrayRef size) {
  auto* impl = self.unsafeGetTensorImpl();
  int64_t entries = 1;
  for (auto n : size) entries *= n;
  const size_t bytes = (entries + self.storage_offset()) * self.itemsize();
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (bytes > storage->nbytes()) {
    auto memory = allocator.allocate(bytes);
    std::memcpy(memory.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(memory));
    storage->set_nbytes(bytes);
  }
  impl->set_sizes_contiguous(size);
}

const at::Tensor& resized(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  if (self.sizes() != size) grow(self, size);
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool) {
  host(to).copy_(host(self));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  resized(to, self.sizes(), std::nullopt);
  return copy_from(self, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) { return at::_local_scalar_dense(host(self)); }

at::Tensor& set_source(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  if (stride.empty() && !size.empty()) {
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  } else {
    self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  }
  return self;
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_source(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const int64_t entries = source.nbytes() / self.itemsize();
  return set_source(self, std::move(source), 0, {entries}, {});
}

at::Tensor& set_empty(at::Tensor& self) {
  at::Tensor fresh = empty({0}, self.scalar_type(), std::nullopt, std::nullopt, std::nullopt, std::nullopt);
  return set_source(self, fresh.storage(), 0, {0}, {1});
}

at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups) {
  TORCH_CHECK(input.device() == weight.device(), "convolution: tensors on ", input.device(), " and ", weight.device());
  std::optional<at::Tensor> offset;
  if (bias.has_value() && bias->defined()) offset = host(*bias);
  return moved(at::convolution(
      host(input), host(weight), offset, stride, padding, dilation, transposed, output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> wanted) {
  at::OptionalIntArrayRef bias_sizes;
  std::vector<int64_t> outputs = {gradient.size(1)};
  if (wanted[2]) bias_sizes = at::IntArrayRef(outputs);
  auto [a, b, c] = at::convolution_backward(
      host(gradient), host(input), host(weight), bias_sizes, stride, padding, dilation, transposed, output_padding, groups,
      wanted);
  return {moved(a), moved(b), moved(c)};
}

bool is_number(const at::Tensor& tensor) { return tensor.dim() == 0; }

// CUDA takes indices from the host, at the price of a copy.
bool takes_host_indices(const std::string& name) {
  return name == "aten::index" || name == "aten::_index_put_impl_" || name == "aten::index_put_" || name == "aten::_unsafe_index";
}

// Any other operator: run it on the CPU over the same memory.
void fallback(const c10::OperatorHandle& op, c10::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  const auto begin = stack->size() - count;
  std::vector<at::Tensor> originals, aliases;
  auto swap = [&](const at::Tensor& tensor) -> at::Tensor {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != kSecond) {
      if (!is_number(tensor)) {
        TORCH_CHECK(
            takes_host_indices(schema.name()), schema.name(), ": expected all tensors to be on the same device, but found one on ",
            tensor.device(), " beside others on ", second);
      }
      return tensor;
    }
    // An output without entries is resized, which only memory of the CPU's own can be.
    auto alias = tensor.numel() == 0 ? at::empty(tensor.sizes(), tensor.options().device(at::kCPU)) : host(tensor);
    originals.push_back(tensor);
    aliases.push_back(alias);
    return alias;
  };
  bool any = false;
  for (size_t i = 0; i < count; ++i) {
    const auto& value = (*stack)[begin + i];
    any = any || (value.isTensor() && value.toTensor().defined() && value.toTensor().device().type() == kSecond);
    if (value.isTensorList()) for (const at::Tensor& t : value.toTensorVector()) any = any || t.device().type() == kSecond;
  }
  for (size_t i = 0; i < count; ++i) {
    auto& value = (*stack)[begin + i];
    if (value.isTensor()) {
      // A tensor of the CPU alone in front of a device argument, as in _to_copy, mixes nothing.
      value = any ? c10::IValue(swap(value.toTensor())) : value;
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const auto& tensor : value.toTensorVector()) list.push_back(swap(tensor));
      value = c10::IValue(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor.has_value() ? std::optional<at::Tensor>(swap(*tensor)) : std::nullopt);
      }
      value = c10::IValue(list);
    } else if (value.isDevice()) {
      value = c10::IValue(c10::Device(at::kCPU));
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  // A tensor that the operator has resized has new memory.
  for (size_t i = 0; i < originals.size(); ++i) {
    if (aliases[i].sizes() != originals[i].sizes()) {
      grow(originals[i], aliases[i].sizes());
      host(originals[i]).copy_(aliases[i]);
    }
  }
  auto back = [&](const at::Tensor& tensor) -> at::Tensor {
    if (!tensor.defined()) return tensor;
    for (size_t i = 0; i < originals.size(); ++i) {
      if (tensor.is_same(aliases[i])) return originals[i];
    }
    for (size_t i = 0; i < originals.size(); ++i) {
      const auto* start = static_cast<const char*>(aliases[i].storage().data());
      const auto* found = static_cast<const char*>(tensor.storage().data());
      if (found == start && tensor.scalar_type() == originals[i].scalar_type() && tensor.numel() > 0) {
        return at::native::as_strided_tensorimpl(originals[i], tensor.sizes(), tensor.strides(), tensor.storage_offset());
      }
    }
    return moved(tensor);
  };
  const auto returned = schema.returns().size();
  for (size_t i = 0; i < returned; ++i) {
    auto& value = (*stack)[stack->size() - returned + i];
    if (value.isTensor()) {
      value = c10::IValue(back(value.toTensor()));
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const auto& tensor : value.toTensorVector()) list.push_back(back(tensor));
      value = c10::IValue(list);
    }
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resized);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("set_.source_Storage_storage_offset", set_source);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_", set_empty);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

// Autocast as on a GPU: what multiplies matrices is computed in half precision.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(conv1d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mv, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(baddbmm, lower_precision_fp)
}

const bool registered = (at::RegisterPrivateUse1HooksInterface(new Hooks()), true);

}  // namespace
