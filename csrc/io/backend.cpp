// Chooses a backend when an engine starts, and keeps the reason. Owns the table of makers.
#include "io/backend.h"

#include <fcntl.h>

#include <cerrno>
#include <utility>

#include "base/error.h"
#include "io/backend_chaos.h"

namespace swapper {
namespace {

struct Maker {
  const char* name;
  std::unique_ptr<Backend> (*make)(const BackendOptions&);
};

#define SWAPPER_ENTRY(which) {.name = #which, .make = make_##which##_backend},
constexpr Maker kMakers[] = {SWAPPER_BACKENDS(SWAPPER_ENTRY)};
#undef SWAPPER_ENTRY

ChosenBackend first_that_works(const BackendOptions& options) {
  std::string refusals;
  for (const Maker& maker : kMakers) {
    try {
      auto backend = maker.make(options);
      std::string reason = refusals + maker.name + ": " + backend->describe();
      return {.backend = std::move(backend), .name = maker.name, .reason = std::move(reason)};
    } catch (const BackendUnavailable& refusal) {
      refusals += std::string("no ") + maker.name + ": " + refusal.what() + "; ";
    }
  }
  throw ConfigError("no backend works on this machine: " + refusals);
}

ChosenBackend choose_plain(const std::string& name, const BackendOptions& options) {
  if (name == "auto") return first_that_works(options);
  std::string known = "\"auto\", \"chaos\"";
  for (const Maker& maker : kMakers) {
    known += std::string(", \"") + maker.name + "\"";
    if (name != maker.name) continue;
    try {
      auto backend = maker.make(options);
      std::string reason = std::string(maker.name) + " (requested): " + backend->describe();
      return {.backend = std::move(backend), .name = maker.name, .reason = std::move(reason)};
    } catch (const BackendUnavailable& refusal) {
      throw ConfigError("backend \"" + name + "\" does not work here: " + refusal.what());
    }
  }
  throw ConfigError("unknown backend \"" + name + "\"; there are " + known);
}

}  // namespace

ChosenBackend choose_backend(const std::string& name, const BackendOptions& options,
                             const std::optional<ChaosOptions>& chaos) {
  const std::string prefix = "chaos:";
  const bool named = name == "chaos" || name.starts_with(prefix);
  if (!named && !chaos) return choose_plain(name, options);
  const std::string inner = name == "chaos" ? "auto" : named ? name.substr(prefix.size()) : name;
  ChosenBackend chosen = choose_plain(inner, options);
  const ChaosOptions faults = chaos.value_or(ChaosOptions{});
  chosen.backend = make_chaos_backend(std::move(chosen.backend), faults);
  chosen.name = prefix + chosen.name;
  chosen.reason = "faults from seed " + std::to_string(faults.seed) + " around " + chosen.reason;
  return chosen;
}

std::int64_t flush_range(const Transfer& transfer) {
  constexpr unsigned kWaitForAll =
      SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
  const int result = ::sync_file_range(transfer.fd, static_cast<off64_t>(transfer.offset),
                                       static_cast<off64_t>(transfer.nbytes), kWaitForAll);
  return result == 0 ? 0 : -errno;
}

}  // namespace swapper
