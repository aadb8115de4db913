// The stand-in's devices, memory, streams and copies; cudart.cpp is what CUDA calls them by.
#pragma once

#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using Lock = std::unique_lock<std::mutex>;
constexpr unsigned char POISON = 0xA5;

size_t setting(const char* name, size_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::strtoull(text, nullptr, 10) : otherwise;
}

const int device_count = static_cast<int>(setting("STAND_IN_DEVICES", 1));
const size_t memory_bytes = setting("STAND_IN_MEMORY", size_t{4} << 30);
const size_t delay_us = setting("STAND_IN_DELAY_US", 500);

// One lock for all that is below, and one condition for all that changes. Never freed: threads outlive
// exit().
std::mutex& world = *new std::mutex;
std::condition_variable& changed = *new std::condition_variable;

struct Block {
  size_t nbytes;
  int device;          // -1: host memory
  bool is_registered;  // and not allocated by cudaHostAlloc
};
struct Range {
  const char* begin;
  const char* end;
};
struct Mark {
  bool is_done = false;
  Clock::time_point at;
};
struct Operation {
  std::function<void()> run;
  std::vector<Range> used;
};
struct Stream {
  int device;
  std::deque<std::unique_ptr<Operation>> queue;  // the first one runs
  std::condition_variable has_work;
};
struct Event {
  std::shared_ptr<Mark> mark;  // of the last record
  bool has_time;
};

std::map<const char*, Block>& blocks = *new std::map<const char*, Block>;
std::list<Stream*>& streams = *new std::list<Stream*>;
std::vector<size_t>& used_bytes = *new std::vector<size_t>(device_count, 0);
std::vector<bool>& has_context = *new std::vector<bool>(device_count, false);
std::vector<Stream*>& default_streams = *new std::vector<Stream*>(device_count, nullptr);
std::map<const void*, const char*>& kernel_names = *new std::map<const void*, const char*>;
int lost = 0;  // the error that stays
int copies_until_lost = -1;

thread_local int current = 0;
thread_local cudaError_t last = cudaSuccess;

cudaError_t result(cudaError_t error) {
  if (error == cudaSuccess && lost != 0) error = static_cast<cudaError_t>(lost);
  if (error != cudaSuccess) last = error;
  return error;
}

cudaError_t complain(cudaError_t error, const char* what) {
  std::fprintf(stderr, "stand-in for CUDA: %s\n", what);
  return result(error);
}

// --- streams: `world` is held ---

void work(Stream* stream) {
  Lock lock(world);
  for (;;) {
    stream->has_work.wait(lock, [&] { return !stream->queue.empty(); });
    Operation* first = stream->queue.front().get();
    lock.unlock();
    first->run();
    lock.lock();
    stream->queue.pop_front();
    changed.notify_all();
  }
}

Stream* make_stream(int device) {
  auto* stream = new Stream{device, {}, {}};
  streams.push_back(stream);
  has_context[device] = true;
  std::thread(work, stream).detach();
  return stream;
}

Stream* stream_of(cudaStream_t handle) {
  if (reinterpret_cast<uintptr_t>(handle) > 2) {
    auto* named = reinterpret_cast<Stream*>(handle);
    if (std::find(streams.begin(), streams.end(), named) != streams.end()) return named;
    std::fprintf(stderr, "stand-in for CUDA: %p is no stream\n", static_cast<void*>(named));
    std::abort();
  }
  Stream*& stream = default_streams[current];
  if (stream == nullptr) stream = make_stream(current);
  return stream;
}

void add(Stream* stream, std::function<void()> run, std::vector<Range> used = {}) {
  stream->queue.push_back(std::make_unique<Operation>(Operation{std::move(run), std::move(used)}));
  stream->has_work.notify_one();
}

void drain(Lock& lock, Stream* stream) {
  changed.wait(lock, [&] { return stream->queue.empty(); });
}

bool is_in_use(Range range) {
  for (Stream* stream : streams)
    for (auto& operation : stream->queue)
      for (Range used : operation->used)
        if (used.begin < range.end && range.begin < used.end) return true;
  return false;
}

void drain_device(Lock& lock, int device) {
  changed.wait(lock, [&] {
    for (Stream* stream : streams)
      if (stream->device == device && !stream->queue.empty()) return false;
    return true;
  });
}

// --- memory: `world` is held ---

const std::pair<const char* const, Block>* block_at(const void* address) {
  auto after = blocks.upper_bound(static_cast<const char*>(address));
  if (after == blocks.begin()) return nullptr;
  const auto& found = *--after;
  return static_cast<const char*>(address) < found.first + found.second.nbytes ? &found : nullptr;
}

bool fits(const std::pair<const char* const, Block>& block, const void* address, size_t nbytes) {
  return static_cast<const char*>(address) + nbytes <= block.first + block.second.nbytes;
}

char* map_memory(size_t nbytes) {
  void* address = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return address == MAP_FAILED ? nullptr : static_cast<char*>(address);
}

void sleep_a_while() {
  if (delay_us == 0) return;
  thread_local std::minstd_rand random{std::random_device{}()};
  std::this_thread::sleep_for(std::chrono::microseconds(random() % (delay_us + 1)));
}

// `rows` rows of `row` bytes each, a pitch apart.
cudaError_t copy(void* target, size_t target_pitch, const void* source, size_t source_pitch, size_t row,
                 size_t rows, cudaStream_t handle, bool must_wait) {
  Lock lock(world);
  if (row == 0 || rows == 0) return result(cudaSuccess);
  if (copies_until_lost >= 0 && copies_until_lost-- == 0) lost = cudaErrorLaunchFailure;
  if (lost != 0) return result(cudaSuccess);
  size_t to_bytes = target_pitch * (rows - 1) + row, from_bytes = source_pitch * (rows - 1) + row;
  const auto* to = block_at(target);
  const auto* from = block_at(source);
  if (to != nullptr && !fits(*to, target, to_bytes))
    return complain(cudaErrorInvalidValue, "a copy leaves its target's allocation or registration");
  if (from != nullptr && !fits(*from, source, from_bytes))
    return complain(cudaErrorInvalidValue, "a copy leaves its source's allocation or registration");
  Range written{static_cast<char*>(target), static_cast<char*>(target) + to_bytes};
  Range read{static_cast<const char*>(source), static_cast<const char*>(source) + from_bytes};
  Stream* stream = stream_of(handle);
  std::shared_ptr<std::vector<char>> staged;
  if (from == nullptr) {  // pageable: it may be used for something else when this returns
    staged = std::make_shared<std::vector<char>>(read.begin, read.end);
    source = staged->data();
  }
  if (to != nullptr && rows == 1 && !is_in_use(written)) std::memset(target, POISON, row);
  add(stream,
      [=] {
        sleep_a_while();
        for (size_t i = 0; i < rows; i++)
          std::memmove(static_cast<char*>(target) + i * target_pitch,
                       static_cast<const char*>(source) + i * source_pitch, row);
        (void)staged;  // kept until here
      },
      {written, read});
  if (must_wait || to == nullptr) drain(lock, stream);
  return result(cudaSuccess);
}

cudaError_t set(void* target, int value, size_t nbytes, cudaStream_t handle, bool must_wait) {
  Lock lock(world);
  const auto* to = block_at(target);
  if (to == nullptr || !fits(*to, target, nbytes))
    return complain(cudaErrorInvalidValue, "memory is set that was not allocated");
  Stream* stream = stream_of(handle);
  add(stream, [=] { std::memset(target, value, nbytes); },
      {{static_cast<char*>(target), static_cast<char*>(target) + nbytes}});
  if (must_wait) drain(lock, stream);
  return result(cudaSuccess);
}

}  // namespace
