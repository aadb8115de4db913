// Runs all tests and fails if any expectation did. Owns nothing.
#include "tests/testing.h"

int main() {
  using namespace swapper::testing;
  for (const Test& test : tests()) {
    std::printf("%s\n", test.name);
    test.run();
  }
  std::printf("%zu tests, %d failed expectations\n", tests().size(), failures());
  return failures() == 0 ? 0 : 1;
}
