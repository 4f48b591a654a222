// A CUDA device that is not there, for PyTorch's own registries: one, with nothing to wait for.
// It computes nothing. Without it autograd stops at the first tensor that says it is on a CUDA device.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/device_lazy_init.h>

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_set>

namespace {
constexpr c10::DeviceIndex count = 1, current = 0;
} // namespace

namespace at {

// Seeds and states as on the host; only the device that it names is another.
struct SimulatedGenerator final : CPUGeneratorImpl {
  SimulatedGenerator(uint64_t seed, DeviceIndex index) : CPUGeneratorImpl(seed) {
    device_ = Device(DeviceType::CUDA, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  }
};

// Memory of the host that remembers that it was asked to be pinned.
struct SimulatedPinning final : Allocator {
  static SimulatedPinning& instance() {
    static auto* only = new SimulatedPinning(); // outlives every tensor
    return *only;
  }

  DataPtr allocate(size_t bytes) override {
    void* memory = c10::alloc_cpu(bytes == 0 ? 1 : bytes);
    std::lock_guard<std::mutex> hold(mutex_);
    pinned_.insert(memory);
    return {memory, memory, &SimulatedPinning::release, Device(DeviceType::CPU)};
  }

  DeleterFnPtr raw_deleter() const override {
    return &SimulatedPinning::release;
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  bool holds(const void* memory) const {
    std::lock_guard<std::mutex> hold(mutex_);
    return pinned_.count(memory) != 0;
  }

 private:
  static void release(void* memory) {
    {
      std::lock_guard<std::mutex> hold(instance().mutex_);
      instance().pinned_.erase(memory);
    }
    c10::free_cpu(memory);
  }

  mutable std::mutex mutex_;
  std::unordered_set<const void*> pinned_;
};

constexpr long cudnn_version = 91000; // cuda.py says the same

struct SimulatedHooks final : CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return count; }
  int getNumGPUs() const override { return count; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return current; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return current; }
  void deviceSynchronize(DeviceIndex) const override {}
  bool isPinnedPtr(const void* memory) const override { return SimulatedPinning::instance().holds(memory); }
  Allocator* getPinnedMemoryAllocator() const override { return &SimulatedPinning::instance(); }

  // By these PyTorch chooses kernels of cuDNN; not every version asks for all of them.
  bool hasCuDNN() const { return true; }
  bool compiledWithCuDNN() const { return true; }
  bool supportsDilatedConvolutionWithCuDNN() const { return true; }
  bool supportsDepthwiseConvolutionWithCuDNN() const { return true; }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const { return true; }
  bool supportsBFloat16RNNWithCuDNN() const { return true; }
  long versionCuDNN() const { return cudnn_version; }
  long versionRuntimeCuDNN() const { return cudnn_version; }
  double batchnormMinEpsilonCuDNN() const { return 0.0; }

  Device getDeviceFromPtr(void*) const override { return Device(DeviceType::CUDA, current); }

  const Generator& getDefaultGenerator(DeviceIndex index) const override {
    static auto* all = new std::map<DeviceIndex, Generator>(); // their addresses stay
    static std::mutex mutex;
    std::lock_guard<std::mutex> hold(mutex);
    index = index < 0 ? current : index;
    const auto found = all->find(index);
    return found != all->end() ? found->second : all->emplace(index, getNewGenerator(index)).first->second;
  }

  Generator getNewGenerator(DeviceIndex index) const override {
    return make_generator<SimulatedGenerator>(c10::default_rng_seed_val, index < 0 ? current : index);
  }
};

// PyTorch makes its hooks once and keeps the object; whose functions answer is told by the object's first word. Ours has
// no members, so exchanging that word is all there is to it, at any time, and it can be restored.
static_assert(sizeof(SimulatedHooks) == sizeof(void*), "the hooks of this version of torch have members");

void* exchange_hooks(void* functions) {
  void* place = const_cast<void*>(static_cast<const void*>(&detail::getCUDAHooks()));
  void* before = nullptr;
  std::memcpy(&before, place, sizeof before);
  std::memcpy(place, &functions, sizeof functions);
  return before;
}

void* simulated_functions() {
  static const auto* only = new SimulatedHooks();
  void* functions = nullptr;
  std::memcpy(&functions, static_cast<const void*>(only), sizeof functions);
  return functions;
}

// That a kind of device is initialised is private to PyTorch; an explicit instantiation may name what is private.
constexpr auto flags_of_initialization();
template <auto member>
struct Named {
  friend constexpr auto flags_of_initialization() { return member; }
};
template struct Named<&Context::init_>;

c10::once_flag& initialized() {
  return (globalContext().*flags_of_initialization())[static_cast<size_t>(DeviceType::CUDA)];
}

} // namespace at

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

// Devices and streams have an index here: PyTorch's own guard that does nothing says −1, which autograd refuses.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Device device(DeviceIndex index) { return Device(DeviceType::CUDA, index); }
  static Stream stream(Device of) { return Stream(Stream::DEFAULT, device(of.index() < 0 ? current : of.index())); }

  Device exchangeDevice(Device) const override { return device(current); }
  Device getDevice() const override { return device(current); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return count; }
  Stream getStream(Device of) const noexcept override { return stream(of); }
  Stream getDefaultStream(Device of) const override { return stream(of); }
  Stream getStreamFromGlobalPool(Device of, bool) const override { return stream(of); }
  Stream getNewStream(Device of, int) const override { return stream(of); }
  Stream exchangeStream(Stream to) const noexcept override { return stream(to.device()); }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 0.0; }
};

bool real_is_initialized = false;
void* real_functions = nullptr;
const c10::impl::DeviceGuardImplInterface* real_guard = nullptr;
} // namespace

// From here on there is a simulated device, for the whole process.
extern "C" void hotloop_simulate_begin() {
  static const auto* guard = new Guard();
  real_is_initialized = at::initialized().test_once();
  real_functions = at::exchange_hooks(at::simulated_functions());
  real_guard = c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].exchange(guard);
}

extern "C" void hotloop_simulate_end() {
  at::exchange_hooks(real_functions);
  c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(real_guard);
  if (!real_is_initialized) { // or PyTorch would never ask for the driver, and say that there is none
    auto* flag = &at::initialized();
    std::destroy_at(flag);
    std::construct_at(flag);
    torch::utils::set_requires_device_init(DeviceType::CUDA, true);
  }
}
