#include "threads.h"

#include <atomic>
#include <csignal>
#include <pthread.h>
#include <system_error>
#include <thread>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int LOOKS = 2000;  // for work or for its end, in some 200 us; then a thread sleeps or yields
constexpr int64_t MOST_HELPERS = 255;

// About 100 ns.
void pause() {
    for (int i = 0; i < 8; i++)
#if defined(__x86_64__)
        _mm_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
}

// One job at a time. `state` holds its number in the upper half and how many of its parts nobody has taken in the lower:
// whoever takes one off it owns that part, and knows that the job has not ended in between.
struct Pool {
    std::atomic<uint64_t> state{0};
    std::atomic<void (*)(const void *, int64_t)> run{nullptr};
    std::atomic<const void *> context{nullptr};
    std::atomic<int64_t> unfinished{0};
    std::atomic<int> sleepers{0};
    std::atomic<uint32_t> alarm{0};
    std::atomic_flag busy;
    int64_t helpers = 0;  // only while `busy`

    bool run_one() {
        uint64_t seen = state.load();
        while (uint32_t(seen)) {
            auto body = run.load(std::memory_order_relaxed);
            auto given = context.load(std::memory_order_relaxed);
            if (state.compare_exchange_weak(seen, seen - 1)) {
                body(given, uint32_t(seen) - 1);
                unfinished.fetch_sub(1, std::memory_order_release);
                return true;
            }
        }
        return false;
    }

    bool has_work() const { return uint32_t(state.load()); }

    void help() {
        for (;;) {
            for (int i = 1; i <= LOOKS && !has_work(); i++) {
                pause();
                if (i % 32 == 0) std::this_thread::yield();  // to whoever else wants this core
            }
            if (!has_work()) sleep();
            while (run_one()) {
            }
        }
    }

    // Either the sleeper sees new work or whoever publishes it sees the sleeper.
    void sleep() {
        sleepers.fetch_add(1);
        uint32_t before = alarm.load();
        if (!has_work()) alarm.wait(before);
        sleepers.fetch_sub(1);
    }

    void share(int64_t parts, void (*body)(const void *, int64_t), const void *given) {
        while (helpers < std::min(parts - 1, MOST_HELPERS) && start()) helpers++;
        run.store(body, std::memory_order_relaxed);
        context.store(given, std::memory_order_relaxed);
        unfinished.store(parts, std::memory_order_relaxed);
        state.store(((state.load() >> 32) + 1) << 32 | uint64_t(parts));
        if (sleepers.load()) {
            alarm.fetch_add(1);
            alarm.notify_all();
        }
        while (run_one()) {
        }
        for (int i = 0; unfinished.load(std::memory_order_acquire); i++)
            if (i < LOOKS) pause();
            else std::this_thread::yield();
    }

    // A thread that leaves all signals to the others, which can act on them; false if the system has none to give.
    bool start() {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        bool started = true;
        try {
            std::thread([this] { help(); }).detach();
        } catch (const std::system_error &) {
            started = false;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return started;
    }
};

// Never destroyed, as its threads never end. A forked child has none of them and begins with a pool of its own.
Pool *pool = nullptr;

Pool &the_pool() {
    static const bool ready = [] {
        pool = new Pool;
        pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
        return true;
    }();
    (void)ready;
    return *pool;
}

}  // namespace

void run_parts(int64_t parts, void (*run)(const void *context, int64_t part), const void *context) {
    Pool &shared = the_pool();
    if (shared.busy.test_and_set(std::memory_order_acquire)) {
        for (int64_t part = 0; part < parts; part++) run(context, part);
        return;
    }
    shared.share(parts, run, context);
    shared.busy.clear(std::memory_order_release);
}
