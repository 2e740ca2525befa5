// One AdamW step of a bf16 layer on a GPU in one pass: 26 bytes a parameter, by the very body of the host's.

#include "adamw_element.h"

// A thread loads AT_ONCE neighbours of a slab by one instruction: with one element at a time too few bytes are under way
// to keep the device's memory busy.
constexpr int AT_ONCE = 4;

template <typename Type>
struct alignas(AT_ONCE * sizeof(Type)) Several {
    Type at[AT_ONCE];
};

template <typename Type>
INLINE Several<Type> load(const Type* slab) {
    return *reinterpret_cast<const Several<Type>*>(slab);
}

template <typename Type>
INLINE void store(Type* slab, Several<Type> values) {
    *reinterpret_cast<Several<Type>*>(slab) = values;
}

template <typename Type>
INLINE bool is_aligned(const Type* slab, int64_t start) {
    return reinterpret_cast<uint64_t>(slab + start) % alignof(Several<Type>) == 0;
}

INLINE bool is_aligned(State<Bf16> state, int64_t start) {
    return is_aligned(state.weights, start) && is_aligned(state.rest, start) && is_aligned(state.exp_avg, start) &&
           is_aligned(state.exp_avg_sq, start);
}

// From one state into another, or the same. A row of blocks for each piece; its threads stride through it. `factor` is
// read where it is computed, so nothing waits for it. Numbers come in double precision, as torch passes them.
extern "C" __global__ void __launch_bounds__(256, 4) adamw(  // NUM_THREADS of adamw_cuda.py; room for 4 blocks on a multiprocessor
    const uint16_t* grads, const uint16_t* weights, const uint16_t* rest, const float* exp_avg, const float* exp_avg_sq,
    uint16_t* to_weights, uint16_t* to_rest, float* to_exp_avg, float* to_exp_avg_sq, const Piece* pieces,
    const float* factor, int has_factor, double scale, double decay, double grad_weight, double beta2,
    double grad_sq_weight, double bias2_sqrt, double epsilon, double minus_step_size) {
    const Piece piece = pieces[blockIdx.y];
    const int64_t tail = piece.stop - (piece.stop - piece.start) % 8;
    const Factors by = {
        static_cast<float>(has_factor ? scale * *factor : scale),
        piece.is_decayed ? static_cast<float>(decay) : 1.0f,
        static_cast<float>(grad_weight),
        static_cast<float>(beta2),
        static_cast<float>(grad_sq_weight),
        static_cast<float>(bias2_sqrt),
        static_cast<float>(epsilon),
        static_cast<float>(minus_step_size),
    };
    const State<Bf16> from = {const_cast<uint16_t*>(weights), const_cast<uint16_t*>(rest), const_cast<float*>(exp_avg),
                              const_cast<float*>(exp_avg_sq)};
    const State<Bf16> to = {to_weights, to_rest, to_exp_avg, to_exp_avg_sq};
    const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
    const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const bool are_aligned =
        is_aligned(grads, piece.start) && is_aligned(from, piece.start) && is_aligned(to, piece.start);
    const int64_t singly_from = are_aligned ? tail : piece.start;
    for (int64_t i = piece.start + AT_ONCE * thread; i < singly_from; i += AT_ONCE * stride) {
        Several<uint16_t> gradient = load(grads + i), weight = load(from.weights + i), low = load(from.rest + i);
        Several<float> avg = load(from.exp_avg + i), avg_sq = load(from.exp_avg_sq + i);
        const State<Bf16> here = {weight.at, low.at, avg.at, avg_sq.at};
        update<false>(gradient.at, here, here, AT_ONCE, by);
        store(to.weights + i, weight), store(to.rest + i, low);
        store(to.exp_avg + i, avg), store(to.exp_avg_sq + i, avg_sq);
    }
    for (int64_t i = singly_from + thread; i < piece.stop; i += stride) {
        if (i < tail)
            update<false>(grads + i, from.at(i), to.at(i), 1, by);
        else
            update<true>(grads + i, from.at(i), to.at(i), 1, by);
    }
}
