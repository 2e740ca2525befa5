// One AdamW step of a layer in one pass: one body (adamw_element.h), compiled for three instruction sets.
//
// What goes into another state than it came from is written past the caches, block by block: else the processor would
// read every line of that state before it writes it.
//
// A call shares its work out to threads that wait here between calls. They take parts of the call with the earliest
// deadline: a slow thread delays no other, and what is needed first overtakes what is under way.

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <system_error>

#include <pthread.h>
#include <signal.h>

#include "adamw_element.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t BLOCK = 256;  // elements whose new state lies in the nearest cache until it is written

template <typename Value>
[[gnu::always_inline]] inline void write_past_caches(Value* to, const Value* from, int64_t count) {
    int64_t bytes = count * sizeof(Value), done = 0;
#if defined(__x86_64__)
    const auto target = reinterpret_cast<char*>(to);
    const auto source = reinterpret_cast<const char*>(from);
    if (reinterpret_cast<uintptr_t>(to) % sizeof(__m128i) == 0)
        for (; done + static_cast<int64_t>(sizeof(__m128i)) <= bytes; done += sizeof(__m128i))
            _mm_stream_si128(reinterpret_cast<__m128i*>(target + done),
                             _mm_load_si128(reinterpret_cast<const __m128i*>(source + done)));
#endif
    std::memcpy(reinterpret_cast<char*>(to) + done, reinterpret_cast<const char*>(from) + done, bytes - done);
}

template <bool is_tail, typename Format>
[[gnu::always_inline]] inline void update_run(
    const typename Format::Word* grads, State<Format> from, State<Format> to, int64_t start, int64_t stop, Factors by) {
    if (to.weights == from.weights) {
        update<is_tail>(grads + start, from.at(start), to.at(start), stop - start, by);
        return;
    }
    alignas(64) typename Format::Word weights[BLOCK];
    alignas(64) typename Format::Rest rest[BLOCK];
    alignas(64) float exp_avg[BLOCK], exp_avg_sq[BLOCK];
    for (; start < stop; start += BLOCK) {
        const int64_t count = std::min(BLOCK, stop - start);
        const State<Format> there = to.at(start);
        update<is_tail>(grads + start, from.at(start), State<Format>{weights, rest, exp_avg, exp_avg_sq}, count, by);
        write_past_caches(there.weights, weights, count);
        if (there.rest) write_past_caches(there.rest, rest, count);
        write_past_caches(there.exp_avg, exp_avg, count);
        write_past_caches(there.exp_avg_sq, exp_avg_sq, count);
    }
}

template <typename Format>
[[gnu::always_inline]] inline void update_piece(
    const typename Format::Word* grads, State<Format> from, State<Format> to, Piece piece, Factors by) {
    const int64_t tail = piece.stop - (piece.stop - piece.start) % 8;
    if (!piece.is_decayed) by.decay = 1.0f;
    update_run<false>(grads, from, to, piece.start, tail, by);
    update_run<true>(grads, from, to, tail, piece.stop, by);
}

template <typename Format>
void plain(const typename Format::Word* grads, State<Format> from, State<Format> to, Piece piece, Factors by) {
    update_piece(grads, from, to, piece, by);
}

#if defined(__x86_64__)
template <typename Format>
[[gnu::target("avx2,fma")]] void avx2(
    const typename Format::Word* grads, State<Format> from, State<Format> to, Piece piece, Factors by) {
    update_piece(grads, from, to, piece, by);
    _mm_sfence();
}

template <typename Format>
[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")]] void avx512(
    const typename Format::Word* grads, State<Format> from, State<Format> to, Piece piece, Factors by) {
    update_piece(grads, from, to, piece, by);
    _mm_sfence();
}
#endif

using Run = void (*)(int path, const void* grads, void* const* from, void* const* to, Piece piece, Factors by);

template <typename Format>
void run(int path, const void* grads, void* const* from, void* const* to, Piece piece, Factors by) {
    const auto state = [](void* const* slabs) {
        return State<Format>{static_cast<typename Format::Word*>(slabs[0]), static_cast<typename Format::Rest*>(slabs[1]),
                             static_cast<float*>(slabs[2]), static_cast<float*>(slabs[3])};
    };
    auto update_piece = plain<Format>;
#if defined(__x86_64__)
    if (path == 1) update_piece = avx2<Format>;
    if (path == 2) update_piece = avx512<Format>;
#endif
    update_piece(static_cast<const typename Format::Word*>(grads), state(from), state(to), piece, by);
}

constexpr int64_t PART = 1 << 16;  // elements that a thread takes at once: a tenth of a millisecond, a multiple of 8

// One call of adamw(), until it returns.
struct Call {
    Run run;
    int path;
    const void* grads;
    void* const* from;
    void* const* to;
    const Piece* pieces;
    Factors by;
    int64_t deadline, num_parts;
    int64_t num_taken = 0, num_done = 0;
    Call* next = nullptr;  // waits behind this one

    static int64_t parts_of(Piece piece) { return (piece.stop - piece.start + PART - 1) / PART; }

    void work(int64_t part) const {
        const Piece* piece = pieces;
        for (; part >= parts_of(*piece); ++piece) part -= parts_of(*piece);
        const int64_t start = piece->start + part * PART;
        run(path, grads, from, to, {start, std::min(piece->stop, start + PART), piece->is_decayed}, by);
    }
};

constexpr size_t STACK_BYTES = 1 << 19;  // of a thread: a limit on the process's memory counts the whole stack

// Threads that live as long as the process: nobody needs to end them, and a call is over before its caller is.
class Pool {
  public:
    // Throws std::system_error if the system has no thread more, not even the first.
    explicit Pool(int num_threads) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads of Python
        pthread_attr_t small;
        pthread_attr_init(&small);
        pthread_attr_setstacksize(&small, STACK_BYTES);
        pthread_attr_setdetachstate(&small, PTHREAD_CREATE_DETACHED);
        const auto serve = [](void* pool) -> void* { static_cast<Pool*>(pool)->serve(); return nullptr; };
        int started = 0;
        pthread_t thread;
        while (started < num_threads && !pthread_create(&thread, &small, serve, this)) ++started;
        pthread_attr_destroy(&small);
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        if (!started) throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again));
    }

    void work(Call& call) {
        std::unique_lock lock(guard);
        Call** place = &first;
        while (*place && (*place)->deadline <= call.deadline) place = &(*place)->next;
        call.next = *place;
        *place = &call;
        to_do.notify_all();
        over.wait(lock, [&] { return call.num_done == call.num_parts; });
    }

  private:
    void serve() {
        std::unique_lock lock(guard);
        for (;;) {
            to_do.wait(lock, [this] { return first; });
            Call* const call = first;
            const int64_t part = call->num_taken++;
            if (call->num_taken == call->num_parts) first = call->next;
            lock.unlock();
            call->work(part);
            lock.lock();
            if (++call->num_done == call->num_parts) over.notify_all();  // now its caller may return: it is gone
        }
    }

    std::mutex guard;
    std::condition_variable to_do, over;
    Call* first = nullptr;  // by deadline; all of them have parts to take
};

// The pools by their numbers of threads. A forked process has none of their threads, so it begins with no pools.
struct Pools {
    std::mutex guard;
    std::map<int, Pool*> by_size;
};
Pools* pools = new Pools;
const int forgets = pthread_atfork(nullptr, nullptr, [] { pools = new Pools; });

// Null where there is no thread to be had.
Pool* pool_of(int num_threads) try {
    const std::lock_guard lock(pools->guard);
    Pool*& pool = pools->by_size[num_threads];
    return pool ? pool : pool = new Pool(num_threads);
} catch (const std::exception&) {
    return nullptr;
}

}  // namespace

extern "C" {

// The widest path that this processor runs: 0 plain, 1 AVX2, 2 AVX-512.
int adamw_widest_path() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return 1;
#endif
    return 0;
}

// format: 0 fp32, 1 bf16, 2 fp16. from and to: weights, rest of the master (none in fp32), exp_avg, exp_avg_sq; to may be
// from. numbers: as Factors, to be rounded.
void adamw(int path, int format, const void* grads, void* const* from, void* const* to, const Piece* pieces, int64_t num_pieces,
           const double* numbers, int num_threads, int64_t deadline) {
    float by[8];
    std::copy(numbers, numbers + 8, by);
    int64_t num_parts = 0;
    for (const Piece* piece = pieces; piece < pieces + num_pieces; ++piece) num_parts += Call::parts_of(*piece);
    const Run of_format = format == 0 ? run<Fp32> : format == 1 ? run<Bf16> : run<Fp16>;
    const Factors rounded = {by[0], by[1], by[2], by[3], by[4], by[5], by[6], by[7]};
    Call call{of_format, path, grads, from, to, pieces, rounded, deadline, num_parts};
    Pool* const pool = num_threads > 1 && num_parts > 1 ? pool_of(num_threads) : nullptr;
    if (pool)
        pool->work(call);
    else
        for (int64_t part = 0; part < num_parts; ++part) call.work(part);
}
}
