// Work shared with threads that live as long as the process.
//
// The caller works too and never waits for a thread to begin, only for parts that were begun: on a machine that is busy
// with other things it does all parts itself. OpenMP's barriers wait there for a thread that does not run.

#pragma once
#include <algorithm>
#include <cstdint>

// Calls run(context, part) for each part in [0, parts), here and on up to parts - 1 other threads. Returns when all are
// done. If others use the threads already (or this is called from a part), all parts are run here.
void run_parts(int64_t parts, void (*run)(const void *context, int64_t part), const void *context);

// Calls body(part) for each part.
template <class Body>
static void parallel_parts(int64_t parts, const Body &body) {
    if (parts == 1) body(int64_t(0));
    if (parts <= 1) return;
    auto run = [](const void *context, int64_t part) { (*static_cast<const Body *>(context))(part); };
    run_parts(parts, run, &body);
}

// Calls body(begin, end) on parts of [0, count), on as many of `threads` as have at least `grain` items each.
template <class Body>
static void parallel_for(int64_t count, int64_t grain, int threads, const Body &body) {
    grain = std::max<int64_t>(grain, 1);
    int64_t parts = std::min<int64_t>(threads, (count + grain - 1) / grain);
    parallel_parts(parts, [&](int64_t part) { body(part * count / parts, (part + 1) * count / parts); });
}
