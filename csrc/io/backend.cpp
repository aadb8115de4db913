// The choice of a backend, made once when an engine starts and kept with its reason. Owns the table of
// makers.
#include "io/backend.h"

#include "base/error.h"

namespace swapper {
namespace {

struct Maker {
  const char* name;
  std::unique_ptr<Backend> (*make)(const BackendOptions&);
};

#define SWAPPER_ENTRY(name) {#name, make_##name##_backend},
constexpr Maker kMakers[] = {SWAPPER_BACKENDS(SWAPPER_ENTRY)};
#undef SWAPPER_ENTRY

ChosenBackend first_that_works(const BackendOptions& options) {
  std::string refusals;
  for (const Maker& maker : kMakers) {
    try {
      auto backend = maker.make(options);
      std::string reason = refusals + maker.name + ": " + backend->describe();
      return {std::move(backend), maker.name, std::move(reason)};
    } catch (const BackendUnavailable& refusal) {
      refusals += std::string("no ") + maker.name + ": " + refusal.what() + "; ";
    }
  }
  throw ConfigError("no backend works on this machine: " + refusals);
}

}  // namespace

ChosenBackend choose_backend(const std::string& name, const BackendOptions& options) {
  if (name == "auto") return first_that_works(options);
  std::string known = "\"auto\"";
  for (const Maker& maker : kMakers) {
    known += std::string(", \"") + maker.name + "\"";
    if (name != maker.name) continue;
    try {
      auto backend = maker.make(options);
      std::string reason = std::string(maker.name) + " (asked for): " + backend->describe();
      return {std::move(backend), maker.name, std::move(reason)};
    } catch (const BackendUnavailable& refusal) {
      throw ConfigError("backend \"" + name + "\" does not work here: " + refusal.what());
    }
  }
  throw ConfigError("unknown backend \"" + name + "\"; there are " + known);
}

}  // namespace swapper
