// The two memories of sim.cpp, their budgets, and the time that copies between them take.
//
// The device: whatever its tensors hold, in units of 512 bytes; not what a CPU's kernel allocates while it computes,
// which grows with the CPU's threads and which memory_account.py could not see. The host: whatever else torch allocates,
// to the byte; page-locked memory is part of it, in powers of two, and has a budget of its own besides.
//
// Time: with a link speed given, a copy between the memories takes bytes / speed on its stream and on the link in its
// direction. Operations happen at once, in the calling thread; only time is simulated: a wait for a copy sleeps until
// the copy would have ended.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>

#include <bit>
#include <chrono>
#include <mutex>
#include <thread>

namespace {

const c10::Device SIM(c10::DeviceType::PrivateUse1, 0), CPU(c10::DeviceType::CPU);

// ---- Memories

enum Memory { DEVICE, HOST, PINNED, SCRATCH };

struct Ledger {
  const char* name;
  size_t budget = SIZE_MAX, used = 0, peak = 0;
};

struct Block {
  Memory memory;
  size_t bytes;  // as charged
};

std::mutex books;
Ledger ledgers[] = {{"device"}, {"host"}, {"pinned"}, {"scratch"}};
auto& blocks = *new std::unordered_map<const void*, Block>;  // outlives the tensors that die at exit
bool is_lifted = false;               // budgets no longer bind, peaks stand
thread_local bool computing = false;  // what is allocated now is a kernel's: scratch, until it is a result

void charge(Memory memory, size_t bytes) {
  Ledger& ledger = ledgers[memory];
  TORCH_CHECK_WITH(
      OutOfMemoryError, is_lifted || (bytes <= ledger.budget && ledger.used <= ledger.budget - bytes),
      "sim ", ledger.name, " out of memory: tried to allocate ", bytes, " bytes, ", ledger.used, " of ", ledger.budget,
      " bytes in use");
  if (memory == PINNED) charge(HOST, bytes);
  ledger.used += bytes;
  if (!is_lifted) ledger.peak = std::max(ledger.peak, ledger.used);
}

void discharge(Block block) {
  ledgers[block.memory].used -= block.bytes;
  if (block.memory == PINNED) ledgers[HOST].used -= block.bytes;
}

size_t in_units(size_t size) { return (size + 511) / 512 * 512; }  // the CUDA caching allocator's

// What a kernel made turns out to be a result: it is the device's.
void claim(const void* data) {
  if (!data) return;
  std::lock_guard lock(books);
  Block& block = blocks.at(data);
  Block claimed{DEVICE, in_units(block.bytes)};
  charge(claimed.memory, claimed.bytes);
  discharge(block);
  block = claimed;
}

void release(void* data) {
  if (!data) return;
  {
    std::lock_guard lock(books);
    auto found = blocks.find(data);
    discharge(found->second);
    blocks.erase(found);
  }
  c10::free_cpu(data);
}

c10::DataPtr allocate(Memory memory, size_t size, c10::Device device) {
  if (!size) return {nullptr, nullptr, &release, device};
  // Powers of two: the sizes of page-locked blocks of CUDA's host allocator.
  size_t bytes = memory == DEVICE ? in_units(size) : memory == PINNED ? std::bit_ceil(size) : size;
  {
    std::lock_guard lock(books);
    charge(memory, bytes);
  }
  void* data = nullptr;
  try {
    data = c10::alloc_cpu(size);
  } catch (...) {
    std::lock_guard lock(books);
    discharge({memory, bytes});
    throw;
  }
  std::lock_guard lock(books);
  blocks[data] = {memory, bytes};
  return {data, data, &release, device};
}

struct HostAllocator final : c10::Allocator {
  const bool pinned;
  explicit HostAllocator(bool pinned) : pinned(pinned) {}
  c10::DataPtr allocate(size_t size) override {
    return ::allocate(computing ? SCRATCH : pinned ? PINNED : HOST, size, CPU);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
};

struct SimAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override { return ::allocate(DEVICE, size, SIM); }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard lock(books);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = stats.reserved_bytes[0].current = static_cast<int64_t>(ledgers[DEVICE].used);
    stats.allocated_bytes[0].peak = stats.reserved_bytes[0].peak = static_cast<int64_t>(ledgers[DEVICE].peak);
    return stats;
  }
  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard lock(books);
    ledgers[DEVICE].peak = ledgers[DEVICE].used;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    std::lock_guard lock(books);
    size_t total = std::min(ledgers[DEVICE].budget, size_t{1} << 46);  // no budget: more than any machine has
    return {total - ledgers[DEVICE].used, total};
  }
};

SimAllocator sim_allocator;
HostAllocator host_allocator(false), pinned_allocator(true);

// ---- Time: streams that are busy until a moment, and a link with one lane a direction

double link_speed = 0;  // bytes per second; 0 is a link that takes no time
std::mutex timetable;
std::vector<double> busy_until(1);  // of each stream, by its number; 0 is the one that computes
double lane_busy_until[2] = {};     // to the device, to the host
thread_local c10::StreamId current_stream = 0;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void sleep_until(double moment) {
  double left = moment - now();
  if (left > 0) std::this_thread::sleep_for(std::chrono::duration<double>(left));
}

double busy(c10::StreamId stream) {
  std::lock_guard lock(timetable);
  return busy_until[stream];
}

void wait_for(c10::StreamId stream) {
  if (link_speed) sleep_until(busy(stream));
}

void book_copy(size_t bytes, bool to_host, double start) {
  std::lock_guard lock(timetable);
  double& lane = lane_busy_until[to_host];
  double& stream = busy_until[current_stream];
  lane = stream = std::max({start, lane, stream}) + static_cast<double>(bytes) / link_speed;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream(c10::StreamId number) { return c10::Stream(c10::Stream::UNSAFE, SIM, number); }
  static double& moment(void* event) { return *static_cast<double*>(event); }

  c10::DeviceType type() const override { return SIM.type(); }
  c10::Device exchangeDevice(c10::Device) const override { return SIM; }
  c10::Device getDevice() const override { return SIM; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    std::lock_guard lock(timetable);
    busy_until.push_back(0);
    return stream(static_cast<c10::StreamId>(busy_until.size()) - 1);
  }
  c10::Stream exchangeStream(c10::Stream next) const override { return stream(std::exchange(current_stream, next.id())); }
  bool queryStream(const c10::Stream& stream) const override { return now() >= busy(stream.id()); }
  void synchronizeStream(const c10::Stream& stream) const override { wait_for(stream.id()); }
  void synchronizeDevice(c10::DeviceIndex) const override {
    for (size_t number = 0; link_speed && number < busy_until.size(); number++) wait_for(number);
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new double;
    moment(*event) = std::max(now(), busy(stream.id()));
  }
  void block(void* event, const c10::Stream& stream) const override {
    std::lock_guard lock(timetable);
    busy_until[stream.id()] = std::max(busy_until[stream.id()], moment(event));
  }
  bool queryEvent(void* event) const override { return now() >= moment(event); }
  void synchronizeEvent(void* event) const override { sleep_until(moment(event)); }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<double*>(event); }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    return 1000 * (moment(to) - moment(from));
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace
