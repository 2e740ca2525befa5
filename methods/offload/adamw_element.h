// One AdamW step of one element: in mixed precision bf16 or fp16 gradients and weights, fp32 master and moments; or all of
// it fp32. Compiled for the host's vectors (adamw_kernel.cpp) and for a GPU (adamw_cuda.cu), which thus have the same bits.
//
// The fp32 master of an fp16 weight is kept whole; that of a bf16 weight is split: its bf16 rounding (to nearest, ties to
// even) is the weight, its low 16 bits are kept beside it. They give its high bits, too, but where a tie (low == 0x8000)
// was rounded down: that is marked by the sign of the second moment, which is never negative. So 12 bytes a parameter keep
// every bit of the state.
//
// The order of operations is that of torch's fused AdamW on x86, and so are the bits: whole vectors of 8 elements of a
// tensor fuse one product of the second moment into the sum, its last elements the other. The compiler is to fuse nothing
// by itself (-ffp-contract=off, --fmad=false).

#pragma once

#if defined(__CUDACC_RTC__)  // has no headers, and these by itself
#define INLINE __device__ __forceinline__
using int16_t = short;
using int32_t = int;
using int64_t = long;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long;
#else
#include <cmath>
#include <cstdint>
#include <cstring>
#define INLINE [[gnu::always_inline]] inline
#endif

namespace {

struct Fp32 {
    using Word = float;  // of a weight and of its gradient
    using Rest = float;  // of the master, beside the weight: none
    static constexpr bool is_split = false, is_half = false;
};

struct Bf16 {
    using Word = uint16_t;
    using Rest = uint16_t;  // the low half of the master; the weight is the other
    static constexpr bool is_split = true, is_half = false;
};

struct Fp16 {
    using Word = uint16_t;
    using Rest = float;  // all of the master
    static constexpr bool is_split = false, is_half = true;
};

template <typename Format>
struct State {
    typename Format::Word* weights;
    typename Format::Rest* rest;
    float *exp_avg, *exp_avg_sq;

    INLINE State at(int64_t start) const {
        return {weights + start, rest ? rest + start : nullptr, exp_avg + start, exp_avg_sq + start};
    }
};

struct Piece {  // elements [start, stop) of one tensor; only its last piece is no multiple of 8
    int64_t start, stop, is_decayed;
};

struct Factors {
    float factor, decay, grad_weight, beta2, grad_sq_weight, bias2_sqrt, epsilon, minus_step_size;
};

#if defined(__CUDACC_RTC__)
INLINE float as_float(uint32_t bits) { return __uint_as_float(bits); }
INLINE uint32_t as_bits(float value) { return __float_as_uint(value); }
#else
INLINE float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}
#endif

// By arithmetic that any vector unit has: a multiplication moves the exponent, of what is below the normal numbers, too.
INLINE float from_fp16(uint16_t half) {
    const uint32_t bits = static_cast<uint32_t>(half & 0x7fff) << 13;
    const uint32_t finite = as_bits(as_float(bits) * 0x1p112f);
    const uint32_t value = bits >= 0x0f800000 ? bits | 0x7f800000 : finite;
    return as_float(value | static_cast<uint32_t>(half & 0x8000) << 16);
}

// Rounded to nearest, ties to even. Below the normal numbers of fp16 an addition to 1/2 rounds to its smallest step.
INLINE uint16_t to_fp16(float value) {
    const uint32_t bits = as_bits(value) & 0x7fffffff;
    const uint32_t normal = (bits + 0xc8000fff + ((bits >> 13) & 1)) >> 13;
    const uint32_t small = as_bits(as_float(bits) + 0.5f) - as_bits(0.5f);
    const uint32_t large = bits > 0x7f800000 ? 0x7e00 : 0x7c00;
    const uint32_t half = bits >= 0x47800000 ? large : bits < 0x38800000 ? small : normal;
    return static_cast<uint16_t>(half | (as_bits(value) >> 16 & 0x8000));
}

template <bool is_tail, typename Format>
INLINE void update(
    const typename Format::Word* grads, State<Format> from, State<Format> to, int64_t count, Factors by) {
    constexpr bool is_split = Format::is_split, is_half = Format::is_half;
#if defined(__CUDACC_RTC__)
#pragma unroll  // with a constant count, arrays stay in registers
#else
#pragma GCC ivdep
#endif
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t marked = as_bits(from.exp_avg_sq[i]);
        float master, grad;
        if constexpr (is_split) {
            const uint32_t low = static_cast<int32_t>(static_cast<int16_t>(from.rest[i]));
            master = as_float((static_cast<uint32_t>(from.weights[i]) << 16) + low + ((marked >> 31) << 16));
            grad = as_float(static_cast<uint32_t>(grads[i]) << 16) * by.factor;
        } else if constexpr (is_half) {
            master = from.rest[i];
            grad = from_fp16(grads[i]) * by.factor;
        } else {
            master = from.weights[i];
            grad = grads[i] * by.factor;
        }
        const float before = from.exp_avg[i], before_sq = as_float(marked & 0x7fffffff);
        // as torch's lerp: from the nearer end
        const bool is_near = by.grad_weight < 0.5f;
        const float avg =
            fmaf(is_near ? by.grad_weight : by.grad_weight - 1.0f, grad - before, is_near ? before : grad);
        const float grad_part = by.grad_sq_weight * grad;
        const float avg_sq = is_tail ? fmaf(before_sq, by.beta2, grad_part * grad)
                                     : fmaf(grad_part, grad, before_sq * by.beta2);
        const float scale = sqrtf(avg_sq) / by.bias2_sqrt + by.epsilon;
        master = master * by.decay + by.minus_step_size * avg / scale;

        to.exp_avg[i] = avg;
        if constexpr (is_split) {
            const uint32_t bits = as_bits(master);
            uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
            rounded = master != master ? 0x7fc0 : rounded;
            const uint32_t kept = static_cast<int32_t>(static_cast<int16_t>(bits));
            const uint32_t mark = (bits - (rounded << 16) - kept) << 15;
            to.weights[i] = static_cast<uint16_t>(rounded);
            to.rest[i] = static_cast<uint16_t>(bits);
            to.exp_avg_sq[i] = as_float((as_bits(avg_sq) & 0x7fffffff) | mark);
        } else if constexpr (is_half) {
            to.weights[i] = to_fp16(master);
            to.rest[i] = master;
            to.exp_avg_sq[i] = avg_sq;
        } else {
            to.weights[i] = master;
            to.exp_avg_sq[i] = avg_sq;
        }
    }
}

}  // namespace
