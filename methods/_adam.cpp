// One AdamW step in one pass: in mixed precision bf16 gradients and weights, fp32 master and moments; or all of it fp32.
//
// The fp32 master of mixed precision is split: its bf16 rounding (to nearest, ties to even) is the weight, its low 16
// bits are kept beside it. They give its high bits, too, but where a tie (low == 0x8000) was rounded down: that is marked
// by the sign of the second moment, which is never negative. So 12 bytes a parameter keep every bit of the state.
//
// The order of operations is that of torch's fused AdamW on x86, and so are the bits: whole vectors of 8 elements of a
// tensor fuse one product of the second moment into the sum, its last elements the other. One body, compiled for three
// instruction sets; the compiler is to fuse nothing by itself (-ffp-contract=off).
//
// What goes into another state than it came from is written past the caches, block by block: else the processor would
// read every line of that state before it writes it.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

template <typename Word>  // of a weight and of its gradient: float, or the bits of a bf16, half of a split master
struct State {
    Word* weights;
    uint16_t* low;  // the other half of a split master
    float *exp_avg, *exp_avg_sq;

    State at(int64_t start) const {
        return {weights + start, low ? low + start : nullptr, exp_avg + start, exp_avg_sq + start};
    }
};

struct Piece {  // elements [start, stop) of one tensor; only its last piece is no multiple of 8
    int64_t start, stop, is_decayed;
};

struct Factors {
    float factor, decay, grad_weight, beta2, grad_sq_weight, bias2_sqrt, epsilon, minus_step_size;
};

inline float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

template <bool is_tail, typename Word>
[[gnu::always_inline]] inline void update(
    const Word* grads, State<Word> from, State<Word> to, int64_t count, Factors by) {
    constexpr bool is_split = sizeof(Word) == 2;
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t marked = as_bits(from.exp_avg_sq[i]);
        float master, grad;
        if constexpr (is_split) {
            const uint32_t low = static_cast<int32_t>(static_cast<int16_t>(from.low[i]));
            master = as_float((static_cast<uint32_t>(from.weights[i]) << 16) + low + ((marked >> 31) << 16));
            grad = as_float(static_cast<uint32_t>(grads[i]) << 16) * by.factor;
        } else {
            master = from.weights[i];
            grad = grads[i] * by.factor;
        }
        const float before = from.exp_avg[i], before_sq = as_float(marked & 0x7fffffff);
        const float avg = __builtin_fmaf(by.grad_weight, grad - before, before);
        const float grad_part = by.grad_sq_weight * grad;
        const float avg_sq = is_tail ? __builtin_fmaf(before_sq, by.beta2, grad_part * grad)
                                     : __builtin_fmaf(grad_part, grad, before_sq * by.beta2);
        const float scale = std::sqrt(avg_sq) / by.bias2_sqrt + by.epsilon;
        master = master * by.decay + by.minus_step_size * avg / scale;

        to.exp_avg[i] = avg;
        if constexpr (is_split) {
            const uint32_t bits = as_bits(master);
            uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
            rounded = master != master ? 0x7fc0 : rounded;
            const uint32_t kept = static_cast<int32_t>(static_cast<int16_t>(bits));
            const uint32_t mark = (bits - (rounded << 16) - kept) << 15;
            to.weights[i] = static_cast<uint16_t>(rounded);
            to.low[i] = static_cast<uint16_t>(bits);
            to.exp_avg_sq[i] = as_float((as_bits(avg_sq) & 0x7fffffff) | mark);
        } else {
            to.weights[i] = master;
            to.exp_avg_sq[i] = avg_sq;
        }
    }
}

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

template <bool is_tail, typename Word>
[[gnu::always_inline]] inline void update_run(
    const Word* grads, State<Word> from, State<Word> to, int64_t start, int64_t stop, Factors by) {
    if (to.weights == from.weights) {
        update<is_tail>(grads + start, from.at(start), to.at(start), stop - start, by);
        return;
    }
    alignas(64) Word weights[BLOCK];
    alignas(64) uint16_t low[BLOCK];
    alignas(64) float exp_avg[BLOCK], exp_avg_sq[BLOCK];
    for (; start < stop; start += BLOCK) {
        const int64_t count = std::min(BLOCK, stop - start);
        const State<Word> there = to.at(start);
        update<is_tail>(grads + start, from.at(start), State<Word>{weights, low, exp_avg, exp_avg_sq}, count, by);
        write_past_caches(there.weights, weights, count);
        if (sizeof(Word) == 2) write_past_caches(there.low, low, count);
        write_past_caches(there.exp_avg, exp_avg, count);
        write_past_caches(there.exp_avg_sq, exp_avg_sq, count);
    }
}

template <typename Word>
[[gnu::always_inline]] inline void update_all(
    const Word* grads, State<Word> from, State<Word> to, const Piece* pieces, int64_t num_pieces, Factors by) {
    const float decay = by.decay;
    for (const Piece* piece = pieces; piece < pieces + num_pieces; ++piece) {
        const int64_t tail = piece->stop - (piece->stop - piece->start) % 8;
        by.decay = piece->is_decayed ? decay : 1.0f;
        update_run<false>(grads, from, to, piece->start, tail, by);
        update_run<true>(grads, from, to, tail, piece->stop, by);
    }
}

template <typename Word>
void plain(const Word* grads, State<Word> from, State<Word> to, const Piece* pieces, int64_t num_pieces, Factors by) {
    update_all(grads, from, to, pieces, num_pieces, by);
}

#if defined(__x86_64__)
template <typename Word>
[[gnu::target("avx2,fma")]] void avx2(
    const Word* grads, State<Word> from, State<Word> to, const Piece* pieces, int64_t num_pieces, Factors by) {
    update_all(grads, from, to, pieces, num_pieces, by);
    _mm_sfence();
}

template <typename Word>
[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")]] void avx512(
    const Word* grads, State<Word> from, State<Word> to, const Piece* pieces, int64_t num_pieces, Factors by) {
    update_all(grads, from, to, pieces, num_pieces, by);
    _mm_sfence();
}
#endif

template <typename Word>
void step(int path, const void* grads, void* const* from, void* const* to, const Piece* pieces, int64_t num_pieces,
          Factors by) {
    const auto state = [](void* const* slabs) {
        return State<Word>{static_cast<Word*>(slabs[0]), static_cast<uint16_t*>(slabs[1]),
                           static_cast<float*>(slabs[2]), static_cast<float*>(slabs[3])};
    };
    auto run = plain<Word>;
#if defined(__x86_64__)
    if (path == 1) run = avx2<Word>;
    if (path == 2) run = avx512<Word>;
#endif
    run(static_cast<const Word*>(grads), state(from), state(to), pieces, num_pieces, by);
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

// from and to: weights, low, exp_avg, exp_avg_sq; to may be from; without low, all of it is fp32. numbers: clip factor,
// learning rate, weight decay, beta1, beta2, epsilon, number of this step from 1.
void adamw(int path, const void* grads, void* const* from, void* const* to, const Piece* pieces, int64_t num_pieces,
           const double* numbers) {
    const double learning_rate = numbers[1], beta1 = numbers[3], beta2 = numbers[4], number = numbers[6];
    const Factors by = {
        static_cast<float>(numbers[0]),
        static_cast<float>(1 - learning_rate * numbers[2]),
        static_cast<float>(1 - beta1),
        static_cast<float>(beta2),
        static_cast<float>(1 - beta2),
        static_cast<float>(std::sqrt(1 - std::pow(beta2, number))),
        static_cast<float>(numbers[5]),
        static_cast<float>(-(learning_rate / (1 - std::pow(beta1, number)))),
    };
    (from[1] ? step<uint16_t> : step<float>)(path, grads, from, to, pieces, num_pieces, by);
}
}
