// A CUDA device without kernels, for torch on a machine without a GPU: one device, streams and events that are numbers.
// It must be loaded before torch is imported, since torch asks once whether there is an accelerator.
// What torch itself does with streams (autograd makes one stream wait for another) is reported to an observer.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using Observer = void (*)(int what, int64_t subject, int64_t stream);
enum What { RECORD, WAIT, USE };  // event recorded in stream; stream waits for event; storage marked as used by stream

const c10::Device kDevice(c10::DeviceType::CUDA, 0);
std::atomic<Observer> observer{nullptr};
std::atomic<int64_t> last_event{0};
thread_local int64_t current_stream = 0;

void report(What what, int64_t subject, const c10::Stream& stream) {
  if (const Observer call = observer.load()) call(what, subject, stream.id());
}

c10::Stream stream_of(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }

int64_t address_of_storage(const c10::DataPtr& data) {
  static const c10::StorageImpl example(c10::StorageImpl::use_byte_size_t(), 0, c10::DataPtr(), nullptr, false);
  const auto offset = reinterpret_cast<int64_t>(&example.data_ptr()) - reinterpret_cast<int64_t>(&example);
  return reinterpret_cast<int64_t>(&data) - offset;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice.type(); }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream_of(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    const int64_t before = current_stream;
    current_stream = stream.id();
    return stream_of(before);
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = reinterpret_cast<void*>(++last_event);
    report(RECORD, reinterpret_cast<int64_t>(*event), stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    report(WAIT, reinterpret_cast<int64_t>(event), stream);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    report(USE, address_of_storage(data), stream);
  }
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

// autograd asks the hooks, not the guard, whether the device is usable
struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

const c10::impl::DeviceGuardImplRegistrar registered_guard(c10::DeviceType::CUDA, new Guard());

}  // namespace

extern "C" {
void fake_cuda_register() { c10::impl::registerDeviceGuard(c10::DeviceType::CUDA, new Guard()); }
void fake_cuda_observe(Observer call) { observer = call; }
int64_t fake_cuda_current_stream() { return current_stream; }
void fake_cuda_set_stream(int64_t stream) { current_stream = stream; }
}

namespace at {
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
// preferred to the hooks that a build of torch for CUDA registers
namespace {
RegistererCUDAHooksRegistry registered_hooks(
    "CUDAHooks", c10::REGISTRY_PREFERRED, CUDAHooksRegistry(), RegistererCUDAHooksRegistry::DefaultCreator<Hooks>, "fake");
}  // namespace
}  // namespace at
