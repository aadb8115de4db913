// Declares the part of the kernel's io_uring interface that swapper uses, instead of including
// linux/io_uring.h: the layout never changes, but the headers on build machines (manylinux images) are older
// than the kernels that run. Names are the kernel's without their prefixes. Owns nothing.
#pragma once

#include <cstdint>

namespace swapper::uring {

inline constexpr long kSysSetup = 425;  // the same numbers on every architecture
inline constexpr long kSysEnter = 426;
inline constexpr long kSysRegister = 427;

inline constexpr std::uint64_t kOffSqRing = 0;
inline constexpr std::uint64_t kOffSqes = 0x10000000;

inline constexpr std::uint32_t kSetupClamp = 1u << 4;
inline constexpr std::uint32_t kSetupSubmitAll = 1u << 7;
inline constexpr std::uint32_t kSetupCoopTaskrun = 1u << 8;
inline constexpr std::uint32_t kSetupSingleIssuer = 1u << 12;
inline constexpr std::uint32_t kSetupDeferTaskrun = 1u << 13;

inline constexpr std::uint32_t kFeatureSingleMmap = 1u << 0;
inline constexpr std::uint32_t kFeatureNoDrop = 1u << 1;

inline constexpr std::uint32_t kEnterGetEvents = 1u << 0;

inline constexpr std::uint32_t kRegisterBuffers = 0;
inline constexpr std::uint32_t kUnregisterBuffers = 1;
inline constexpr std::uint32_t kRegisterProbe = 8;
inline constexpr std::uint32_t kRegisterBuffersUpdate = 16;  // 5.13

inline constexpr std::uint8_t kAsync = 1u << 4;  // a submission's flag: a kernel thread does it

enum Opcode : std::uint8_t {
  kNop = 0,
  kReadFixed = 4,
  kWriteFixed = 5,
  kPollAdd = 6,
  kSyncFileRange = 8,
  kRead = 22,
  kWrite = 23
};

struct SubmissionOffsets {
  std::uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, reserved;
  std::uint64_t user_address;
};

struct CompletionOffsets {
  std::uint32_t head, tail, ring_mask, ring_entries, overflow, entries, flags, reserved;
  std::uint64_t user_address;
};

struct Params {
  std::uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd, reserved[3];
  SubmissionOffsets sq;
  CompletionOffsets cq;
};
static_assert(sizeof(Params) == 120);

struct Submission {
  std::uint8_t opcode, flags;
  std::uint16_t ioprio;
  std::int32_t fd;
  std::uint64_t offset;
  std::uint64_t address;
  std::uint32_t nbytes;
  std::uint32_t op_flags;  // poll events, read/write flags
  std::uint64_t user_data;
  std::uint16_t buffer_index;
  std::uint16_t personality;
  std::int32_t file_index;
  std::uint64_t reserved[2];
};
static_assert(sizeof(Submission) == 64);

struct BuffersUpdate {
  std::uint32_t first, reserved;
  std::uint64_t vectors, tags;
  std::uint32_t count, reserved2;
};
static_assert(sizeof(BuffersUpdate) == 32);

struct CompletionEntry {
  std::uint64_t user_data;
  std::int32_t result;
  std::uint32_t flags;
};
static_assert(sizeof(CompletionEntry) == 16);

struct ProbeOp {
  std::uint8_t opcode, reserved;
  std::uint16_t flags;  // 1: supported
  std::uint32_t reserved2;
};

struct Probe {
  std::uint8_t last_opcode, count;
  std::uint16_t reserved;
  std::uint32_t reserved2[3];
  ProbeOp ops[256];
};
static_assert(sizeof(Probe) == 16 + 256 * 8);

}  // namespace swapper::uring
