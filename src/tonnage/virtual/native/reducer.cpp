// DistributedDataParallel's reducer asks for a timer of its device; a build without CUDA has none for it.
#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

namespace c10d {
namespace {

// Nothing runs on the device, so the host's clock says as much as a card's would.
class VirtualTimer final : public Timer {
 public:
  explicit VirtualTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const auto from = getTimestamp(start), to = getTimestamp(end);
    if (!from || !to || *to < *from) return std::nullopt;
    return *to - *from;
  }
};

C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, VirtualTimer)

}  // namespace
}  // namespace c10d
