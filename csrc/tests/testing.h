// A test framework of one page: tests register themselves; failed expectations are counted and printed. With
// it the data plane is tested without a dependency. Owns the list of tests.
#pragma once

#include <cstdio>
#include <vector>

namespace swapper::testing {

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

inline int& failures() {
  static int count = 0;
  return count;
}

struct Registration {
  Registration(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

}  // namespace swapper::testing

#define TEST(name)                                                                \
  static void name();                                                             \
  static const ::swapper::testing::Registration registration_##name(#name, name); \
  static void name()

#define EXPECT(condition)                                                           \
  do {                                                                              \
    if (!(condition)) {                                                             \
      ++::swapper::testing::failures();                                             \
      std::fprintf(stderr, "%s:%d: expected %s\n", __FILE__, __LINE__, #condition); \
    }                                                                               \
  } while (false)
