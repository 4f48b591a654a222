// A CUDA device that is not there, for PyTorch's own registries: one GPU, index 0, nothing to wait for.
// It computes nothing. Without it autograd stops at the first tensor that says it is on a CUDA device.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>
#include <mutex>
#include <unordered_set>

namespace at {

// Seeds and states as on the host; only the device that it names is another.
struct SimulatedGenerator final : CPUGeneratorImpl {
  explicit SimulatedGenerator(uint64_t seed) : CPUGeneratorImpl(seed) {
    device_ = Device(DeviceType::CUDA, 0);
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
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
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

  Device getDeviceFromPtr(void*) const override { return Device(DeviceType::CUDA, 0); }

  const Generator& getDefaultGenerator(DeviceIndex) const override {
    static auto* only = new Generator(make_generator<SimulatedGenerator>(c10::default_rng_seed_val));
    return *only;
  }

  Generator getNewGenerator(DeviceIndex) const override {
    return make_generator<SimulatedGenerator>(c10::default_rng_seed_val);
  }
};

// PyTorch makes its hooks once and keeps the object; whose functions answer is told by the object's first word. Ours has
// no members, so exchanging that word is all there is to it, at any time, and it can be put back.
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

} // namespace at

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

// Devices and streams have index 0 here: PyTorch's own guard that does nothing says −1, which autograd refuses.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Device device() { return Device(DeviceType::CUDA, 0); }
  static Stream stream() { return Stream(Stream::DEFAULT, device()); }

  Device exchangeDevice(Device) const override { return device(); }
  Device getDevice() const override { return device(); }
  Stream getStream(Device) const noexcept override { return stream(); }
  Stream getDefaultStream(Device) const override { return stream(); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return stream(); }
  Stream getNewStream(Device, int) const override { return stream(); }
  Stream exchangeStream(Stream) const noexcept override { return stream(); }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 0.0; }
};

void* real_functions = nullptr;
const c10::impl::DeviceGuardImplInterface* real_guard = nullptr;
} // namespace

// From here on there is a simulated device, for the whole process.
extern "C" void hotloop_simulate_begin() {
  static const auto* guard = new Guard();
  real_functions = at::exchange_hooks(at::simulated_functions());
  real_guard = c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].exchange(guard);
}

extern "C" void hotloop_simulate_end() {
  at::exchange_hooks(real_functions);
  c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(real_guard);
}
