// One AdamW step in mixed precision, in one pass: bf16 gradients and weights, fp32 master and moments.
//
// The fp32 master is split: its bf16 rounding (to nearest, ties to even) is the weight, its low 16 bits are kept beside
// it. They give its high bits, too, but where a tie (low == 0x8000) was rounded down: that is marked by the sign of the
// second moment, which is never negative. So 12 bytes a parameter keep every bit of the state.
//
// The order of operations is that of torch's fused AdamW on x86, and so are the bits: whole vectors of 8 elements of a
// tensor fuse one product of the second moment into the sum, its last elements the other. One body, compiled for three
// instruction sets; the compiler is to fuse nothing by itself (-ffp-contract=off).

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct State {
    uint16_t *weights, *low;
    float *exp_avg, *exp_avg_sq;
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

template <bool is_tail>
[[gnu::always_inline]] inline void update(
    const uint16_t* grads, State from, State to, int64_t start, int64_t stop, Factors by) {
#pragma GCC ivdep
    for (int64_t i = start; i < stop; ++i) {
        const uint32_t marked = as_bits(from.exp_avg_sq[i]);
        const uint32_t low = static_cast<int32_t>(static_cast<int16_t>(from.low[i]));
        float master = as_float((static_cast<uint32_t>(from.weights[i]) << 16) + low + ((marked >> 31) << 16));
        const float grad = as_float(static_cast<uint32_t>(grads[i]) << 16) * by.factor;
        const float before = from.exp_avg[i], before_sq = as_float(marked & 0x7fffffff);
        const float avg = __builtin_fmaf(by.grad_weight, grad - before, before);
        const float grad_part = by.grad_sq_weight * grad;
        const float avg_sq = is_tail ? __builtin_fmaf(before_sq, by.beta2, grad_part * grad)
                                     : __builtin_fmaf(grad_part, grad, before_sq * by.beta2);
        const float scale = std::sqrt(avg_sq) / by.bias2_sqrt + by.epsilon;
        master = master * by.decay + by.minus_step_size * avg / scale;

        const uint32_t bits = as_bits(master);
        uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        rounded = master != master ? 0x7fc0 : rounded;
        const uint32_t kept = static_cast<int32_t>(static_cast<int16_t>(bits));
        to.weights[i] = static_cast<uint16_t>(rounded);
        to.low[i] = static_cast<uint16_t>(bits);
        to.exp_avg[i] = avg;
        to.exp_avg_sq[i] = as_float((as_bits(avg_sq) & 0x7fffffff) | ((bits - (rounded << 16) - kept) << 15));
    }
}

[[gnu::always_inline]] inline void update_all(
    const uint16_t* grads, State from, State to, const Piece* pieces, int64_t num_pieces, Factors by) {
    const float decay = by.decay;
    for (const Piece* piece = pieces; piece < pieces + num_pieces; ++piece) {
        const int64_t tail = piece->stop - (piece->stop - piece->start) % 8;
        by.decay = piece->is_decayed ? decay : 1.0f;
        update<false>(grads, from, to, piece->start, tail, by);
        update<true>(grads, from, to, tail, piece->stop, by);
    }
}

using Path = void (*)(const uint16_t*, State, State, const Piece*, int64_t, Factors);

void plain(const uint16_t* grads, State from, State to, const Piece* pieces, int64_t num_pieces, Factors by) {
    update_all(grads, from, to, pieces, num_pieces, by);
}

#if defined(__x86_64__)
[[gnu::target("avx2,fma")]] void avx2(
    const uint16_t* grads, State from, State to, const Piece* pieces, int64_t num_pieces, Factors by) {
    update_all(grads, from, to, pieces, num_pieces, by);
}

[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")]] void avx512(
    const uint16_t* grads, State from, State to, const Piece* pieces, int64_t num_pieces, Factors by) {
    update_all(grads, from, to, pieces, num_pieces, by);
}
#endif

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

// from and to: weights, low, exp_avg, exp_avg_sq; to may be from. numbers: clip factor, learning rate, weight decay,
// beta1, beta2, epsilon, number of this step from 1.
void adamw(int path, const uint16_t* grads, void* const* from, void* const* to, const Piece* pieces,
           int64_t num_pieces, const double* numbers) {
    const double learning_rate = numbers[1], beta1 = numbers[3], beta2 = numbers[4], step = numbers[6];
    const Factors by = {
        static_cast<float>(numbers[0]),
        static_cast<float>(1 - learning_rate * numbers[2]),
        static_cast<float>(1 - beta1),
        static_cast<float>(beta2),
        static_cast<float>(1 - beta2),
        static_cast<float>(std::sqrt(1 - std::pow(beta2, step))),
        static_cast<float>(numbers[5]),
        static_cast<float>(-(learning_rate / (1 - std::pow(beta1, step)))),
    };
    const auto state = [](void* const* slabs) {
        return State{static_cast<uint16_t*>(slabs[0]), static_cast<uint16_t*>(slabs[1]),
                     static_cast<float*>(slabs[2]), static_cast<float*>(slabs[3])};
    };
    Path run = plain;
#if defined(__x86_64__)
    if (path == 1) run = avx2;
    if (path == 2) run = avx512;
#endif
    run(grads, state(from), state(to), pieces, num_pieces, by);
}
}
