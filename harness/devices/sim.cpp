// A second device on a CPU: torch's PrivateUse1 backend over host memory, with budgets of its own (sim.h).
//
// Every operation is the CPU's own kernel, on the same bytes: results are the CPU's to the last bit.

#include "sim.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::Storage;
using Layout = std::optional<c10::Layout>;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::Device getDeviceFromPtr(void*) const override { return SIM; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();  // dropout draws what it draws on the CPU
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard lock(books);
    auto found = blocks.find(data);
    return found != blocks.end() && found->second.memory == PINNED;
  }
  void resizePrivateUse1Bytes(const Storage& storage, size_t size) const override {
    c10::DataPtr data = sim_allocator.allocate(size);
    if (data && storage.data()) std::memcpy(data.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(size);
  }
};

// One operation's tensors and storages, as they are on the device and as the CPU's kernel sees them. Nothing is copied.
struct Crossing {
  struct Seen {
    Tensor sim, cpu;
    bool is_written;
  };
  c10::SmallVector<Seen, 8> tensors;
  c10::SmallVector<std::pair<Storage, Storage>, 8> storages;

  Storage to_cpu(const Storage& sim) {
    for (auto& [ours, cpu] : storages)
      if (ours.is_alias_of(sim)) return cpu;
    c10::DataPtr bytes(sim.mutable_data(), CPU);
    Storage cpu(Storage::use_byte_size_t(), sim.nbytes(), std::move(bytes), &host_allocator, /*resizable=*/true);
    storages.emplace_back(sim, cpu);
    return cpu;
  }

  // A tensor of the CPU may be a number; indices may lie there, too, as on CUDA.
  Tensor to_cpu(const Tensor& tensor, bool is_written, bool is_index = false) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_privateuseone()) {
      TORCH_CHECK(is_index || (tensor.dim() == 0 && !is_written),
                  "Expected all tensors to be on the same device, but found at least two devices, sim:0 and ",
                  tensor.device(), "!");
      return tensor;
    }
    auto cpu = at::detail::make_tensor<c10::TensorImpl>(to_cpu(tensor.storage()), DispatchKeySet(DispatchKey::CPU),
                                                        tensor.dtype());
    cpu.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    tensors.push_back({tensor, cpu, is_written});
    return cpu;
  }

  c10::IValue to_cpu(const c10::IValue& value, bool is_written) {
    if (value.isTensor()) return to_cpu(value.toTensor(), is_written);
    if (value.isStorage()) return to_cpu(value.toStorage());
    if (value.isDevice()) return CPU;
    if (value.isTensorList()) {
      c10::List<Tensor> seen;
      for (const Tensor& tensor : value.toTensorVector()) seen.push_back(to_cpu(tensor, is_written));
      return seen;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> seen;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
        seen.push_back(tensor ? std::optional(to_cpu(*tensor, is_written, /*is_index=*/true)) : tensor);
      return seen;
    }
    return value;
  }

  Storage to_sim(const Storage& cpu) {
    for (auto& [ours, theirs] : storages)
      if (theirs.is_alias_of(cpu)) return ours;
    Storage sim(Storage::use_byte_size_t(), cpu.nbytes(), taken(cpu), &sim_allocator, /*resizable=*/true);
    storages.emplace_back(sim, cpu);
    return sim;
  }

  Tensor to_sim(const Tensor& cpu) {
    if (!cpu.defined()) return cpu;
    for (auto& seen : tensors)
      if (seen.cpu.is_same(cpu)) return seen.sim;
    auto sim = at::detail::make_tensor<c10::TensorImpl>(to_sim(cpu.storage()), DispatchKeySet(DispatchKey::PrivateUse1),
                                                        cpu.dtype());
    sim.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
    return sim;
  }

  c10::IValue to_sim(const c10::IValue& value) {
    if (value.isTensor()) return to_sim(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<Tensor> made;
    for (const Tensor& tensor : value.toTensorVector()) made.push_back(to_sim(tensor));
    return made;
  }

  // Give the tensors that the kernel wrote to the size and the storage that it gave them.
  void update() {
    for (auto& [sim, cpu, is_written] : tensors) {
      if (!is_written) continue;
      c10::TensorImpl* impl = sim.unsafeGetTensorImpl();
      Storage storage = to_sim(cpu.storage());
      if (!storage.is_alias_of(sim.storage())) impl->set_storage_keep_dtype(storage);
      if (cpu.storage().data() && cpu.storage().data() != storage.data()) {
        storage.set_data_ptr_noswap(taken(cpu.storage()));
        storage.set_nbytes(cpu.storage().nbytes());
      }
      if (sim.sizes() != cpu.sizes() || sim.strides() != cpu.strides() || sim.storage_offset() != cpu.storage_offset())
        impl->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
    }
  }

  static c10::DataPtr taken(const Storage& cpu) {
    claim(cpu.data());
    c10::DataPtr data = cpu.set_data_ptr(c10::DataPtr(nullptr, CPU));
    data.unsafe_set_device(SIM);
    return data;
  }
};

struct Computing {
  const bool before = std::exchange(computing, true);
  ~Computing() { computing = before; }
};

// Any operation that is not below.
void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (current_stream == 0) wait_for(0);
  Computing scope;
  Crossing crossing;
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); i++) {
    const auto* alias = arguments[i].alias_info();
    (*stack)[first + i] = crossing.to_cpu((*stack)[first + i], alias && alias->isWrite());
  }
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  crossing.update();
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); i++)
    (*stack)[i] = crossing.to_sim((*stack)[i]);
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, Layout, std::optional<c10::Device>,
             std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(size, &sim_allocator, DispatchKeySet(DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, Layout,
                     std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &sim_allocator, DispatchKeySet(DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// What crosses the link has the device's dtype, as on CUDA.
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  const bool to_host = !to.is_privateuseone(), crosses = link_speed && (to_host || !from.is_privateuseone());
  if (!crosses && current_stream == 0) wait_for(0);
  const double start = now();
  Crossing crossing;
  crossing.to_cpu(to, true, /*is_index=*/true).copy_(crossing.to_cpu(from, false, /*is_index=*/true));
  if (crosses) {
    book_copy(to_host ? from.nbytes() : to.nbytes(), to_host, start);
    if (!non_blocking) wait_for(current_stream);
  }
  return to;
}

// As on the CPU, where it keeps its noise as it is; other devices compute by native_dropout, to other bits.
Tensor dropout(const Tensor& input, double p, bool train) {
  if (p == 0 || !train || input.numel() == 0) return input;
  if (p == 1) return input.mul(at::zeros({}, input.options()));
  return input.mul(at::empty_like(input).bernoulli_(1 - p).div_(1 - p));
}

// Whatever the CPU has a kernel of its own for is computed by it; the rest is composed of those, as on the CPU. Left to
// themselves, some would be composed on a new device that are not on a CPU, such as native_layer_norm.
void register_operations() {
  using torch::CppFunction;
  auto& aten = *new torch::Library(torch::Library::IMPL, "aten", DispatchKey::PrivateUse1, __FILE__, __LINE__);
  aten.impl("empty.memory_format", TORCH_FN(empty));
  aten.impl("empty_strided", TORCH_FN(empty_strided));
  aten.impl("_copy_from", TORCH_FN(copy_from));
  aten.impl("record_stream", [](Tensor& tensor, c10::Stream stream) {});
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getRegistrationsForDispatchKey(DispatchKey::CPU)) {
    const std::string text = c10::toString(name);
    if (text.starts_with("aten::") && text != "aten::empty.memory_format" && text != "aten::empty_strided")
      aten.impl(text.c_str(), CppFunction::makeFromBoxedFunction<&on_cpu>());
  }
  auto& others = *new torch::Library(torch::Library::IMPL, "_", DispatchKey::PrivateUse1, __FILE__, __LINE__);
  others.fallback(CppFunction::makeFromBoxedFunction<&on_cpu>());
  auto& autograd = *new torch::Library(torch::Library::IMPL, "aten", DispatchKey::AutogradPrivateUse1, __FILE__, __LINE__);
  autograd.impl("dropout", TORCH_FN(dropout));
}

}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &_fused_sdp_choice_cpp)
}

// For harness/devices/sim.py, by ctypes: so that nothing of Python is needed to compile this.
extern "C" {
void sim_start(size_t device_bytes, size_t host_bytes, size_t pinned_bytes, double link_bytes_per_second) {
  c10::SetAllocator(SIM.type(), &sim_allocator);
  c10::SetCPUAllocator(&host_allocator, /*priority=*/100);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  register_operations();
  ledgers[DEVICE].budget = device_bytes;
  ledgers[HOST].budget = host_bytes;
  ledgers[PINNED].budget = pinned_bytes;
  link_speed = link_bytes_per_second;
}

void sim_lift() {
  std::lock_guard lock(books);
  is_lifted = true;
}

void sim_stats(size_t* used_and_peak) {
  std::lock_guard lock(books);
  for (Memory memory : {DEVICE, HOST, PINNED})
    *used_and_peak++ = ledgers[memory].used, *used_and_peak++ = ledgers[memory].peak;
}

void sim_reset_peaks() {
  std::lock_guard lock(books);
  for (Ledger& ledger : ledgers) ledger.peak = ledger.used;
}
}
