// Runs work on several threads at once. Owns nothing: torch owns its threads, and others end with the call.
#pragma once

#include <cstddef>
#include <functional>

namespace swapper {

// Calls work() on the calling thread and on up to `threads - 1` others, and returns when all calls have. Work
// must be right whatever their number: the system may give fewer.
//
// The others are OpenMP's, the same as torch's operations use in this thread: after an operation they spin
// for milliseconds, and threads of ours would have to share the processors with them. Without torch they are
// new ones.
void run_parallel(std::size_t threads, const std::function<void()>& work);

}  // namespace swapper
